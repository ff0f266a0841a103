"""A form that cannot be met is refused by the gateway, before anything is placed, as an instance would."""

import asyncio
import gc
import json
import threading
import time
from collections.abc import Iterator

import pytest
from tests.support.models import smollm2_folder, tiny_folder
from tests.support.structure_specs import BAD, GOOD
from tests.unit.gateway.fake_cluster import chat_body, ids, running_cluster
from tests.unit.gateway.model_files import write_model_folder

from gateway import structure_check
from gateway.api.api_errors import ApiError
from gateway.api.structure import NamedStructure
from gateway.structure_check import StructureCheck
from policy.core import StructureKind, StructureSpec
from structures import compile_queue, compiler
from structures.compiler import StructureCompiler
from structures.grammar import grammar_of
from structures.vocabulary import Vocabulary, read_vocabulary
from worker import structures
from worker.intake import WorkError

pytestmark = pytest.mark.unit

MODELS = {"tiny": (tiny_folder, 512, (2,)), "smollm2": (smollm2_folder, 49_152, (2, 0))}


def named(kind: StructureKind, text: str = "") -> NamedStructure:
    return NamedStructure("guided_x", StructureSpec(kind, text))


@pytest.fixture
def check() -> Iterator[StructureCheck]:
    made = StructureCheck(tiny_folder(), 512, (2,))
    yield made
    made.close()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No regular expression is compiled until it is set."""
    go_on = threading.Event()

    def slow(spec: StructureSpec) -> str:
        assert spec.kind is not StructureKind.REGEX or go_on.wait(20)
        return grammar_of(spec)

    monkeypatch.setattr(compiler, "grammar_of", slow)
    yield go_on
    go_on.set()


@pytest.mark.parametrize("model", MODELS)
async def test_what_passes_instances_take_and_what_does_not_they_refuse_for_the_same_reason(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structure_check, "CHECK_WAIT_S_MAX", 30.0)
    monkeypatch.setattr(structures, "COMPILE_WAIT_S_MAX", 30.0)
    folder, tokens, end_token_ids = MODELS[model]
    gateway = StructureCheck(folder(), tokens, end_token_ids)
    instance = StructureCompiler(folder(), tokens, end_token_ids)
    for kind, text in (*GOOD, *((kind, text) for kind, text, _ in BAD)):
        spec, refusal, verdict = StructureSpec(kind, text), "", ""
        try:
            await structures.compiled(instance, spec)
        except WorkError as error:
            refusal = error.detail.removeprefix(f"sampling.structure: {kind}: ")
        try:
            await gateway.check(NamedStructure("guided_x", spec))
        except ApiError as error:
            verdict = error.message.removeprefix("guided_x: ")
        assert verdict == refusal, text[:100]
    gateway.close()
    instance.close()


async def test_nothing_asked_is_nothing_wrong(check: StructureCheck) -> None:
    await check.check(None)


async def test_what_is_known_costs_next_to_nothing(check: StructureCheck) -> None:
    schema = json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(200)}})
    await check.check(named(StructureKind.JSON_SCHEMA, schema))
    began_s = time.process_time()
    for _ in range(1000):
        await check.check(named(StructureKind.JSON_SCHEMA, schema))
    assert time.process_time() - began_s < 0.2


async def test_who_takes_too_long_is_refused_and_who_waits_behind_may_come_again(
    check: StructureCheck, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    await check.check(named(StructureKind.JSON_OBJECT))
    monkeypatch.setattr(structure_check, "CHECK_WAIT_S_MAX", 0.1)
    slow = asyncio.create_task(check.check(named(StructureKind.REGEX, "slow")))
    behind = asyncio.create_task(check.check(named(StructureKind.REGEX, "behind")))
    with pytest.raises(ApiError, match=r"guided_x: takes more than 0\.1 s to compile") as refused:
        await slow
    assert refused.value.kind.status == 400
    with pytest.raises(ApiError, match=r"guided_x: was not compiled within 0\.1 s") as busy:
        await behind
    assert (busy.value.kind.status, busy.value.reason) == (429, "structures_full")
    assert busy.value.headers()["Retry-After"] == "1"
    monkeypatch.setattr(structure_check, "CHECK_WAIT_S_MAX", 10.0)
    held.set()
    await check.check(named(StructureKind.REGEX, "slow"))


def slow_reading(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The tokenizer is read once this is set."""
    go_on = threading.Event()

    def slow(*model: object) -> Vocabulary:
        assert go_on.wait(20)
        return read_vocabulary(*model)

    monkeypatch.setattr(compiler, "read_vocabulary", slow)
    return go_on


async def test_a_tokenizer_that_is_still_being_read_is_not_the_clients_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = slow_reading(monkeypatch)
    monkeypatch.setattr(structure_check, "CHECK_WAIT_S_MAX", 0.05)
    monkeypatch.setattr(structure_check, "READ_WAIT_S_MAX", 0.05)
    check = StructureCheck(tiny_folder(), 512, (2,))
    with pytest.raises(ApiError, match="was not compiled within") as busy:
        await check.check(named(StructureKind.JSON_OBJECT))
    assert busy.value.kind.status == 429
    go_on.set()
    monkeypatch.setattr(structure_check, "CHECK_WAIT_S_MAX", 10.0)
    await check.check(named(StructureKind.JSON_OBJECT))
    check.close()


async def test_the_first_who_come_wait_for_the_tokenizer_beside_their_own_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = slow_reading(monkeypatch)
    check = StructureCheck(tiny_folder(), 512, (2,))
    leaving, staying = (asyncio.create_task(check.check(named(StructureKind.JSON_OBJECT))) for _ in range(2))
    await asyncio.sleep(0.01)
    leaving.cancel()
    await asyncio.wait({leaving})
    assert not staying.done()
    go_on.set()
    await staying
    check.close()


async def test_what_waits_is_bounded(
    check: StructureCheck, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_queue, "WAITING_MAX", 2)
    asked = [named(StructureKind.REGEX, text) for text in ("a", "b", "c")]
    waiting = [asyncio.create_task(check.check(one)) for one in asked[:2]]
    await asyncio.sleep(0)
    with pytest.raises(ApiError, match="2 structures wait to be compiled already") as busy:
        await check.check(asked[2])
    assert busy.value.kind.status == 429
    held.set()
    await asyncio.gather(*waiting)
    await check.check(asked[2])


async def test_who_leaves_takes_nothing_from_others_who_wait_for_the_same(
    check: StructureCheck, held: threading.Event
) -> None:
    leaving, staying = (asyncio.create_task(check.check(named(StructureKind.REGEX, "a"))) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait({leaving})
    held.set()
    await staying


async def test_an_error_that_comes_when_nobody_waits_is_not_the_loops(
    check: StructureCheck, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    await check.check(named(StructureKind.JSON_OBJECT))
    monkeypatch.setattr(structure_check, "CHECK_WAIT_S_MAX", 0.05)
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    with pytest.raises(ApiError, match="takes more than"):
        await check.check(named(StructureKind.REGEX, "(a"))
    held.set()
    monkeypatch.setattr(structure_check, "CHECK_WAIT_S_MAX", 10.0)
    with pytest.raises(ApiError, match="unclosed group"):
        await check.check(named(StructureKind.REGEX, "(a"))
    gc.collect()
    assert told == []


async def test_a_client_is_told_by_its_own_name_and_nothing_is_placed(tmp_path) -> None:
    schema = {"type": "integer", "minimum": 5, "maximum": 4}
    arguments = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": arguments}}
    named_tool = {"type": "function", "function": {"name": "f"}}
    async with running_cluster(write_model_folder(tmp_path)) as cluster:
        for parameters, param in (
            ({"guided_regex": "(a"}, "guided_regex"),
            ({"guided_grammar": "start: foo"}, "guided_grammar"),
            ({"guided_json": schema}, "guided_json"),
            (
                {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
                "response_format.json_schema.schema",
            ),
            ({"tools": [tool], "tool_choice": "required"}, "tools"),
            ({"tools": [tool], "tool_choice": named_tool}, "tools[0].function.parameters"),
        ):
            for stream in (False, True):
                reply = await cluster.post("/v1/chat/completions", chat_body(stream=stream, **parameters))
                assert reply.status == 400, reply.text
                error = json.loads(reply.text)["error"]
                assert (error["type"], error["param"]) == ("invalid_request_error", param)
                assert error["message"].startswith(param)
        assert cluster.scheduled == []
        assert cluster.requests.outcomes.answered == 0, "it counts against no instance"
        asking = asyncio.create_task(cluster.chat(guided_regex="Yes|No"))
        await cluster.decode.say(await cluster.prefill.submits.get(), ids("Yes"))
        assert (await asking)[0] == 200


async def test_a_model_that_names_no_end_token_holds_no_answer_to_a_form(tmp_path) -> None:
    """The tokenizer's own end token ends answers at the gateway, but instances do not know it."""
    folder = write_model_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    async with running_cluster(folder) as cluster:
        status, answer = await cluster.chat(guided_regex="a")
        assert status == 400
        assert "names no end token" in answer["error"]["message"]
