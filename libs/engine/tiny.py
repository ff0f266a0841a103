"""A random-weight Llama model made on the spot, for tests: small, deterministic, complete.

Its weights are scaled so that logits are not flat: two good tokens are rarely close, and every
parameter changes the answer. Its tokenizer is a working byte-level BPE with a ChatML template.
"""

from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase

import numpy as np

from engine.byte_pair_tokenizer import Splitting, byte_pair_tokenizer, byte_symbols
from engine.errors import ModelFolderError
from engine.model_folder import ModelConfig
from engine.safetensors_file import Float32Array, write_float32
from engine.tensor_shapes import EMBEDDING, tensor_shapes
from engine.tokenizer_file import SpecialTokens, Vocabulary, write_json, write_tokenizer

TINY_VERSION = 1
"""Written to config.json; grows when the same arguments give another model."""
TINY_FIELD = "moonpool_tiny_version"

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS_TOKEN_ID, EOS_TOKEN_ID = 1, 2
MATRIX_GAIN = 1.2
"""Standard deviation of a matrix, times the square root of its inputs: a little above unit gain."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    vocab_size: int = 512,
    context: int = 2048,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    tie_word_embeddings: bool = False,
) -> None:
    """Writes a whole Hugging Face folder; the same arguments give the same bytes.

    Raises ModelFolderError for sizes that do not fit together.
    """
    _check(vocab_size, hidden_size, heads, kv_heads)
    folder.mkdir(parents=True, exist_ok=True)
    head_dim = hidden_size // heads
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        TINY_FIELD: TINY_VERSION,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "tie_word_embeddings": tie_word_embeddings,
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": EOS_TOKEN_ID,
        "dtype": "float32",
        "torch_dtype": "float32",
    }
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json",
        {"bos_token_id": BOS_TOKEN_ID, "eos_token_id": EOS_TOKEN_ID, "pad_token_id": EOS_TOKEN_ID},
    )
    _write_tokenizer(folder, vocab_size, context)
    shapes = list(tensor_shapes(ModelConfig.load(folder)).items())
    write_float32(folder / "model.safetensors", shapes, _random_weights(shapes, seed))


def _check(vocab_size: int, hidden_size: int, heads: int, kv_heads: int) -> None:
    smallest = len(SPECIAL_TOKENS) + 256
    largest = smallest + len(ascii_lowercase) ** 2
    if not smallest <= vocab_size <= largest:
        raise ModelFolderError(f"vocab_size must be {smallest}..{largest}, not {vocab_size}")
    if hidden_size % (2 * heads) or heads % kv_heads:
        raise ModelFolderError(
            f"hidden_size {hidden_size} must be a multiple of 2·heads, heads {heads} of kv_heads {kv_heads}"
        )


def _write_tokenizer(folder: Path, vocab_size: int, context_tokens_max: int) -> None:
    """Special tokens, the 256 bytes, then pairs of letters until the vocabulary is full."""
    base = [*SPECIAL_TOKENS, *byte_symbols()]
    merges = list(islice(product(ascii_lowercase, repeat=2), vocab_size - len(base)))
    vocabulary = Vocabulary(
        tokens=[*base, *(first + second for first, second in merges)],
        control_token_ids=range(len(SPECIAL_TOKENS)),
        user_defined_token_ids=(),
        add_bos=False,
    )
    special = SpecialTokens(BOS_TOKEN_ID, EOS_TOKEN_ID, 0, EOS_TOKEN_ID)
    pairs = [(first, second) for first, second in merges]
    write_tokenizer(
        folder,
        byte_pair_tokenizer(vocabulary, pairs, Splitting.SMOLLM, special),
        vocabulary,
        special,
        chat_template=CHAT_TEMPLATE,
        context_tokens_max=context_tokens_max,
    )


def _random_weights(shapes: list[tuple[str, tuple[int, ...]]], seed: int) -> Iterator[Float32Array]:
    generator = np.random.default_rng(seed)
    for name, shape in shapes:
        if len(shape) == 1:
            yield generator.uniform(0.5, 1.5, shape).astype(np.float32)
        else:
            deviation = 1.0 if name == EMBEDDING else MATRIX_GAIN * shape[-1] ** -0.5
            yield generator.normal(0.0, deviation, shape).astype(np.float32)
