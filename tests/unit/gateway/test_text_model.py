"""Reading a model folder: what a prompt becomes, what a broken folder is called."""

import asyncio
import json

import msgspec
import pytest
from tests.unit.gateway.model_files import CONTEXT_TOKENS_MAX, byte_level_tokenizer, write_model_folder

from cluster.errors import ConfigError
from gateway.api.api_errors import ApiError
from gateway.api.request_types import AssistantMessage, DeveloperMessage, TextPart, UserMessage
from gateway.app import load_folder
from gateway.config import GatewayConfig
from gateway.model_folder import load_model_folder
from gateway.text.chat_template import ChatTemplate, TemplateError
from gateway.text_model import TextModel, pack_token_ids, unpack_token_ids
from kvhash import BLOCK_TOKENS, block_hashes, model_fingerprint, namespace

pytestmark = pytest.mark.unit

SEED = b"s" * 16


@pytest.fixture
def folder(tmp_path):
    return write_model_folder(tmp_path)


@pytest.fixture
def model(folder):
    text_model = TextModel(load_model_folder(folder, "tiny", "float32"), SEED)
    yield text_model
    text_model.close()


def test_limits_and_fingerprint_are_the_folders(model, folder) -> None:
    tokenizer = byte_level_tokenizer()
    assert model.limits.context_tokens_max == CONTEXT_TOKENS_MAX
    assert model.limits.end_token_ids == (tokenizer.token_to_id("<|im_end|>"),)
    assert model.fingerprint == model_fingerprint(folder, "float32", "float32", BLOCK_TOKENS)


def test_weights_of_another_dtype_than_the_kv_are_another_model(model, folder) -> None:
    """As workers with `weight_dtype` int8 have it: else none of them would take a request."""
    config = GatewayConfig(model_folder=str(folder), weight_dtype="int8")
    assert load_folder(config).fingerprint == model_fingerprint(folder, "int8", "float32", BLOCK_TOKENS)
    assert load_folder(config).fingerprint != model.fingerprint


async def test_a_chat_is_rendered_and_encoded(model) -> None:
    messages = [
        DeveloperMessage("Be short."),
        UserMessage([TextPart("text", "The capital"), TextPart("text", "of France?")]),
    ]
    token_ids = unpack_token_ids((await model.encode_chat(messages)).token_ids)
    expected = (
        "<|im_start|>system\nBe short.<|im_end|>\n"
        "<|im_start|>user\nThe capital\nof France?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert byte_level_tokenizer().decode(token_ids, skip_special_tokens=False) == expected
    assert token_ids[0] == byte_level_tokenizer().token_to_id("<|im_start|>")


async def test_a_chat_equals_transformers(folder, model) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    messages = [UserMessage("Wörter, 你好 🙂 12345\n"), AssistantMessage(" ok ")]
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    expected = reference.apply_chat_template(
        msgspec.to_builtins(messages), chat_template=template, add_generation_prompt=True, return_dict=False
    )
    prompt = await model.encode_chat(messages)
    assert unpack_token_ids(prompt.token_ids) == expected


async def test_what_the_template_refuses_is_400(model) -> None:
    with pytest.raises(ApiError, match="the word is forbidden") as caught:
        await model.encode_chat([UserMessage("forbidden")])
    assert (caught.value.kind.status, caught.value.param) == (400, "messages")


async def test_without_a_template_there_is_no_chat(tmp_path) -> None:
    model = TextModel(load_model_folder(write_model_folder(tmp_path, template=None), "tiny", "float32"), SEED)
    with pytest.raises(ApiError, match="no chat template"):
        await model.encode_chat([UserMessage("hello")])
    assert (await model.encode_text("hello")).tokens > 0
    model.close()


def test_a_template_file_counts_before_the_config(folder) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    template = load_model_folder(folder, "tiny", "float32").template
    assert template is not None
    assert template.render([{"role": "user", "content": "x"}]) == "x"


async def test_a_text_that_cannot_fit_is_refused_untokenised(model) -> None:
    with pytest.raises(ApiError) as caught:
        await model.encode_text("a" * 1_000_000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


async def test_long_texts_leave_the_event_loop_free(folder) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 1_000_000}
    (folder / "config.json").write_text(json.dumps(config))
    model = TextModel(load_model_folder(folder, "tiny", "float32"), SEED)
    # No two pieces alike: all of it has to be tokenised.
    encoding = asyncio.ensure_future(model.encode_text(" ".join(f"fox {place}." for place in range(40_000))))
    turns = 0
    while not encoding.done():
        await asyncio.sleep(0)
        turns += 1
    assert encoding.result().tokens > 20_000
    assert turns > 10
    model.close()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", "config.json"),
        ("config.json", "[]", "JSON object"),
        ("config.json", '{"vocab_size": 9}', "max_position_embeddings"),
        ("config.json", '{"max_position_embeddings": 9, "vocab_size": "x"}', "vocab_size"),
        (
            "config.json",
            '{"max_position_embeddings": 9, "vocab_size": 9, "eos_token_id": "x"}',
            "eos_token_id",
        ),
        ("tokenizer.json", "{}", "tokenizer.json"),
        ("chat_template.jinja", "{% if %}", "template"),
        ("model.safetensors", "", "safetensors"),
    ],
)
def test_a_broken_folder_is_an_error_by_file(folder, file: str, content: str, message: str) -> None:
    (folder / file).write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_model_folder(folder, "tiny", "float32")


def test_end_tokens_come_from_the_generation_config_first(folder) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')
    assert load_model_folder(folder, "tiny", "float32").limits.end_token_ids == (4, 5)
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    del config["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    expected = byte_level_tokenizer().token_to_id("<|im_end|>")
    assert load_model_folder(folder, "tiny", "float32").limits.end_token_ids == (expected,)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[99].content.x }}",
        "{{ 1 + 'a' }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])


def test_templates_have_what_transformers_gives_them() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}"
        "{{ bos_token }}{{ strftime_now('%Y') | length }}",
        {"bos_token": "<s>"},
    )
    rendered = template.render([{"content": "<é>"}, {"content": "no"}])
    assert rendered == '{"content": "<é>"}<s>4'
    with pytest.raises(TemplateError):
        ChatTemplate("{% for %}", {})


async def test_a_prompt_of_token_ids_has_the_hashes_of_its_full_blocks(model, folder) -> None:
    token_ids = list(range(3 * BLOCK_TOKENS + 5))
    prompt = await model.prompt_of(token_ids)
    space = namespace(SEED, model.fingerprint)
    assert prompt.tokens == len(token_ids)
    assert prompt.block_hashes == block_hashes(space, token_ids)
    assert len(prompt.block_hashes) == 3 * 16


def test_token_ids_are_packed_as_little_endian_int32() -> None:
    assert pack_token_ids([1, 258]) == b"\x01\x00\x00\x00\x02\x01\x00\x00"
    assert unpack_token_ids(pack_token_ids([0, 49151])) == [0, 49151]
