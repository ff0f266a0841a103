"""/tokenize and /detokenize: what a generation is given, and what its text would be."""

import asyncio
import json

import pytest
from tests.unit.gateway.fake_cluster import chat_body, ids, running_cluster
from tests.unit.gateway.model_files import CONTEXT_TOKENS_MAX, byte_level_tokenizer, write_model_folder

from gateway.answers.requests import GatewayLimits
from gateway.http_body import BodyLimits
from gateway.text.detokenizer import Detokenizer, TokenBytes
from gateway.text_model import unpack_token_ids

pytestmark = pytest.mark.unit

TEXTS = ["The lazy dog", "", "Wörter 你好 🙂👩‍👩‍👧", "<|im_start|>user\nHi<|im_end|>", "<tool→call>", "a\0b"]


@pytest.fixture
async def cluster(folder):
    async with running_cluster(folder, body_limits=BodyLimits(body_bytes_max=100_000)) as running:
        yield running


async def ask(cluster, path: str, **parameters: object) -> tuple[int, dict[str, object]]:
    reply = await cluster.post(path, parameters)
    return reply.status, json.loads(reply.text)


@pytest.mark.parametrize("text", TEXTS)
async def test_a_text_there_and_back(cluster, text: str) -> None:
    status, told = await ask(cluster, "/tokenize", model="tiny", prompt=text, return_token_strs=True)
    assert status == 200
    tokenizer = byte_level_tokenizer()
    token_ids = tokenizer.encode(text).ids
    assert told == {
        "count": len(token_ids),
        "max_model_len": CONTEXT_TOKENS_MAX,
        "tokens": token_ids,
        "token_strs": [tokenizer.id_to_token(token_id) for token_id in token_ids],
    }
    assert await ask(cluster, "/detokenize", model="tiny", tokens=token_ids) == (200, {"prompt": text})


async def test_a_conversation_has_the_tokens_that_a_generation_is_given(tmp_path) -> None:
    folder = write_model_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    async with running_cluster(folder) as cluster:
        for parameters in ({}, {"tools": [tool]}):
            asking = asyncio.create_task(cluster.chat(**parameters))
            submit = await cluster.prefill.submits.get()
            await cluster.decode.say(submit, ids("Yes"))
            assert (await asking)[0] == 200
            messages = chat_body()["messages"]
            status, told = await ask(cluster, "/tokenize", messages=messages, **parameters)
            assert status == 200
            assert told["tokens"] == unpack_token_ids(submit.work.prompt_token_ids)
            assert told["token_strs"] is None
        assert len(cluster.scheduled) == 2, "nothing is placed for it"


async def test_the_answer_may_be_left_unbegun(cluster) -> None:
    messages = chat_body()["messages"]
    _, begun = await ask(cluster, "/tokenize", messages=messages)
    _, told = await ask(cluster, "/tokenize", messages=messages, add_generation_prompt=False)
    opening = byte_level_tokenizer().encode("<|im_start|>assistant\n", add_special_tokens=False).ids
    assert told["tokens"] + opening == begun["tokens"]


async def test_special_tokens_are_added_as_the_tokenizer_has_it_unless_told_otherwise(tmp_path) -> None:
    folder = write_model_folder(tmp_path)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    start = byte_level_tokenizer().token_to_id("<|im_start|>")
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|im_start|>": {"id": "<|im_start|>", "ids": [start], "tokens": ["<|im_start|>"]}
        },
    }
    path.write_text(json.dumps(tokenizer))
    messages = chat_body()["messages"]
    async with running_cluster(folder) as cluster:
        for parameters, special in (
            ({"prompt": "Hi"}, True),
            ({"prompt": "Hi", "add_special_tokens": True}, True),
            ({"prompt": "Hi", "add_special_tokens": False}, False),
            ({"messages": messages}, False),
            ({"messages": messages, "add_special_tokens": True}, True),
        ):
            _, bare = await ask(cluster, "/tokenize", **parameters | {"add_special_tokens": False})
            _, told = await ask(cluster, "/tokenize", **parameters)
            assert told["tokens"] == [start] * special + bare["tokens"], parameters


async def test_the_text_is_the_gateways_own(cluster) -> None:
    """Tokens that are no whole characters included."""
    token_ids = [token_id for text in TEXTS for token_id in ids(text)][:-1]
    token_ids += byte_level_tokenizer().encode("🙂", add_special_tokens=False).ids[:1]
    detokenizer = Detokenizer(TokenBytes(byte_level_tokenizer(), keep_special=True))
    text = detokenizer.feed(token_ids) + detokenizer.finish()
    assert text.endswith("\N{REPLACEMENT CHARACTER}")
    assert await ask(cluster, "/detokenize", tokens=token_ids) == (200, {"prompt": text})


@pytest.mark.parametrize(
    ("path", "parameters", "status", "param"),
    [
        ("/tokenize", {"model": "other", "prompt": "Hi"}, 404, "model"),
        ("/detokenize", {"model": "other", "tokens": [5]}, 404, "model"),
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "Hi", "temperature": 1}, 400, "temperature"),
        ("/tokenize", {"prompt": "Hi" * 40_000}, 400, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "forbidden"}]}, 400, "messages"),
        ("/tokenize", {"prompt": "Hi" * 60_000}, 413, None),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "5"}, 400, "tokens"),
        ("/detokenize", {"tokens": [5, 10_000]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [5] * (CONTEXT_TOKENS_MAX + 1)}, 400, "tokens"),
    ],
)
async def test_what_is_wrong_is_named(
    cluster, path: str, parameters: dict[str, object], status: int, param: str | None
) -> None:
    got, told = await ask(cluster, path, **parameters)
    assert (got, told["error"]["param"]) == (status, param), told
    assert told["error"]["type"] == "invalid_request_error"


async def test_they_count_among_the_requests_in_progress(folder) -> None:
    async with running_cluster(folder, limits=GatewayLimits(requests_max=1)) as cluster:
        asking = asyncio.create_task(cluster.chat())
        submit = await cluster.prefill.submits.get()
        assert (await ask(cluster, "/tokenize", prompt="Hi"))[0] == 429
        assert (await ask(cluster, "/detokenize", tokens=[5]))[0] == 429
        await cluster.decode.say(submit, ids("Yes"))
        await asking
        assert (await ask(cluster, "/tokenize", prompt="Hi"))[0] == 200


async def test_models_are_told_whatever_their_names(folder) -> None:
    async with running_cluster(folder, model_name="org/tiny:v1 ü") as cluster:
        async with cluster.session.get(cluster.url + "/v1/models") as reply:
            (listed,) = (await reply.json())["data"]
        assert listed | {"created": 0} == {
            "id": "org/tiny:v1 ü",
            "object": "model",
            "created": 0,
            "owned_by": "moonpool",
            "root": "org/tiny:v1 ü",
            "max_model_len": CONTEXT_TOKENS_MAX,
        }
        for path in ("org/tiny:v1 ü", "org%2Ftiny%3Av1%20%C3%BC"):
            async with cluster.session.get(cluster.url + "/v1/models/" + path) as reply:
                assert (reply.status, await reply.json()) == (200, listed)
        for path in ("tiny", "org", "org/tiny:v1 ü/", "..%2F..", "%00"):
            async with cluster.session.get(cluster.url + "/v1/models/" + path) as reply:
                assert (reply.status, (await reply.json())["error"]["code"]) == (404, "model_not_found")


async def test_head_is_get_without_a_body(cluster) -> None:
    for path, status in (("/v1/models", 200), ("/v1/models/tiny", 200), ("/v1/models/other", 404)):
        async with cluster.session.get(cluster.url + path) as got:
            length = got.headers["Content-Length"]
        async with cluster.session.head(cluster.url + path) as reply:
            assert (reply.status, await reply.read()) == (status, b"")
            assert reply.headers["Content-Length"] == length
            assert reply.headers["x-request-id"]


async def test_there_is_nothing_at_the_roots(cluster) -> None:
    for path in ("/v1", "/v1/", "/", "/v1/embeddings"):
        async with cluster.session.get(cluster.url + path) as reply:
            error = (await reply.json())["error"]
            assert (reply.status, error["code"]) == (404, "not_found")
            assert error["message"] == f"there is nothing at {path}"
