"""A small model folder without weights that matter: real tokenizers, trained on the spot."""

import json
import struct
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = (
    "The capital of France is Paris. The quick brown fox jumps over the lazy dog. "
    "Stop at END or at \n\nUser: and go on. 1234567890 "
    "Wörter, élan, naïve façade, 你好世界 こんにちは 🙂🚀👩‍👩‍👧 "
) * 8
CONTEXT_TOKENS_MAX = 256
TEMPLATE = (
    "{% for message in messages %}\n"
    "    {%- if message.role == 'user' and message.content == 'forbidden' %}\n"
    "        {{- raise_exception('the word is forbidden') }}\n"
    "    {%- endif %}\n"
    "    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@cache
def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    # An added token that is no special one, with characters that name no byte.
    tokenizer.add_tokens([AddedToken("<tool→call>", special=False)])
    return tokenizer


@cache
def sentence_piece_tokenizer() -> Tokenizer:
    """As Llama 2's: ▁ for spaces, <0xNN> for what the vocabulary lacks."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁the", "▁Paris", "a", "b", "c", "é", "你"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def write_model_folder(folder: Path, *, template: str | None = TEMPLATE) -> Path:
    tokenizer = byte_level_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": CONTEXT_TOKENS_MAX,
        "vocab_size": tokenizer.get_vocab_size() + 8,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer_config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}
    if template is not None:
        tokenizer_config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0\0\0\0")
    return folder
