"""Calls found in an answer's text: each format, near misses, and the same however the text is cut."""

import itertools
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.tools import NO_PARAMETERS, Tool, ToolChoice, ToolUse
from gateway.text.call_layouts import ToolFormat
from gateway.text.call_parser import HELD_BLANKS_MAX
from gateway.text.tool_calls import CallArguments, CallBegun, Said, Spoken, joined
from gateway.tool_parsers import tool_parser
from policy.core import FinishReason

pytestmark = pytest.mark.unit

TOOLS = tuple(Tool(name, None, NO_PARAMETERS) for name in ("f", "get_weather"))
AUTO = ToolUse(TOOLS, ToolChoice.AUTO)
REQUIRED = ToolUse(TOOLS, ToolChoice.REQUIRED)
NAMED = ToolUse(TOOLS, ToolChoice.NAMED, named="f")
ONE_CALL = ToolUse(TOOLS, ToolChoice.AUTO, parallel=False)
HERMES, LLAMA, MISTRAL = ToolFormat.HERMES, ToolFormat.LLAMA3_JSON, ToolFormat.MISTRAL


def parse(use: ToolUse, tool_format: ToolFormat, *pieces: str) -> Said:
    parser = tool_parser(use, tool_format)
    found = [piece for text in pieces for piece in parser.feed(text)]
    return joined([*found, *parser.finish()])


def said(said: Said) -> tuple[str, list[tuple[str, str]]]:
    """Without the ids, which are random."""
    return said.content, [(call.name, call.arguments) for call in said.calls]


def read(tool_format: ToolFormat, text: str, use: ToolUse = AUTO) -> tuple[str, list[tuple[str, str]]]:
    whole = said(parse(use, tool_format, text))
    assert said(parse(use, tool_format, *text)) == whole, "read character by character"
    return whole


F = '{"name": "f", "arguments": {"a": [1, {"b": "}"}]}}'
F_ARGUMENTS = '{"a": [1, {"b": "}"}]}'
CALL_F = f"<tool_call>\n{F}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("no call", "no call", []),
        (CALL_F, "", [("f", F_ARGUMENTS)]),
        (f"I look.\n\n{CALL_F}\n", "I look.", [("f", F_ARGUMENTS)]),
        (f"{CALL_F}\n{CALL_F}", "", [("f", F_ARGUMENTS)] * 2),
        (f"{CALL_F}\n\nDone. ", "\n\nDone. ", [("f", F_ARGUMENTS)]),
        # The order of the keys is free, so is white space; an end marker may be missing.
        (
            '<tool_call>{"arguments" : {"x":1.50} ,"name":"get_weather"}',
            "",
            [("get_weather", '{"x":1.50}')],
        ),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"id": 7, "name": "f", "arguments": {}}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}, "why": [1]}</tool_call>', "", [("f", "{}")]),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>\\"}"}}</tool_call>',
            "",
            [("f", '{"a": "</tool_call>\\"}"}')],
        ),
        # What is cut off in the arguments is still a call; before them it is none.
        ('<tool_call>{"name": "f", "arguments": {"a": "x', "", [("f", '{"a": "x')]),
        ('<tool_call>{"name": "f", "arg', '<tool_call>{"name": "f", "arg', []),
        (f"{CALL_F[:-3]}", "", [("f", F_ARGUMENTS)]),
        ("text <tool_ca", "text <tool_ca", []),
        ("text\n <tool_ca", "text\n <tool_ca", []),
        # Near misses come out whole.
        ("a < b <tool> </tool_call>", "a < b <tool> </tool_call>", []),
        ("<tool_call>hello</tool_call>", "<tool_call>hello</tool_call>", []),
        ('\n<tool_call>{"name": "g", "arguments": {}}', '\n<tool_call>{"name": "g", "arguments": {}}', []),
        ('<tool_call>{"name": 1}', '<tool_call>{"name": 1}', []),
        ('<tool_call>{"other": 1}', '<tool_call>{"other": 1}', []),
        ('<tool_call>{"arguments": [1], "name": "f"}', '<tool_call>{"arguments": [1], "name": "f"}', []),
        ('<tool_call>{"name": "f" "x"}', '<tool_call>{"name": "f" "x"}', []),
        (f"<tool_call><tool_call>{F}", "<tool_call>", [("f", F_ARGUMENTS)]),
        (f'<tool_call>{{"name": {CALL_F}', '<tool_call>{"name": ', [("f", F_ARGUMENTS)]),
        # What follows a call and is no part of it.
        ('<tool_call>{"name": "f", "arguments": {}}}</tool_call>', "}</tool_call>", [("f", "{}")]),
        (
            '<tool_call>{"name": "f", "arguments": {"a": <b>}</tool_call>',
            "<b>}</tool_call>",
            [("f", '{"a": ')],
        ),
    ],
)
def test_hermes(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read(HERMES, text) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "f", "parameters": {"a": "1"}}', "", [("f", '{"a": "1"}')]),
        ('\n<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
        ('{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
        (
            '{"name": "f", "parameters": {}}; {"name": "get_weather", "parameters": {"a": 1}}\n',
            "",
            [("f", "{}"), ("get_weather", '{"a": 1}')],
        ),
        ('{"name": "f", "parameters": {}}\n{"name": "f"}', "", [("f", "{}")] * 2),
        ('Here: {"name": "f", "parameters": {}}', 'Here: {"name": "f", "parameters": {}}', []),
        ('{"city": "Paris"}', '{"city": "Paris"}', []),
        ('{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ('{"name": "f", "parameters": {}}; or not', "; or not", [("f", "{}")]),
        ('{"name": "f", "parameters": {}} yes', " yes", [("f", "{}")]),
    ],
)
def test_llama3_json(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read(LLAMA, text) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"[TOOL_CALLS][{F}]", "", [("f", F_ARGUMENTS)]),
        (f"Well. [TOOL_CALLS] [ {F} , {F}]", "Well.", [("f", F_ARGUMENTS)] * 2),
        (f"[TOOL_CALLS][{F}, ", "", [("f", F_ARGUMENTS)]),
        (f'[TOOL_CALLS][{F}, {{"name": "x"}}]', ', {"name": "x"}]', [("f", F_ARGUMENTS)]),
        ("[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
        ("[TOOL_ [1]", "[TOOL_ [1]", []),
        (f"[{F}]", f"[{F}]", []),
    ],
)
def test_mistral(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read(MISTRAL, text) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('[TOOL_CALLS]f[ARGS]{"a": [1]}', "", [("f", '{"a": [1]}')]),
        (
            'Well. [TOOL_CALLS]f{}[TOOL_CALLS]get_weather[CALL_ID]abc123DEF[ARGS]{"a": "}"}',
            "Well.",
            [("f", "{}"), ("get_weather", '{"a": "}"}')],
        ),
        ("[TOOL_CALLS]f[ARGS]{} Done.", " Done.", [("f", "{}")]),
        ('[TOOL_CALLS]f[ARGS]{"a": "x', "", [("f", '{"a": "x')]),
        ("[TOOL_CALLS]g[ARGS]{}", "[TOOL_CALLS]g[ARGS]{}", []),
        ("[TOOL_CALLS]f[ARGS", "[TOOL_CALLS]f[ARGS", []),
        ("[TOOL_CALLS] are [TOOL_CALLS]f{}", "[TOOL_CALLS] are", [("f", "{}")]),
        (f"[TOOL_CALLS]{'f' * 300}{{}}", f"[TOOL_CALLS]{'f' * 300}{{}}", []),
    ],
)
def test_mistrals_newer_form(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read(ToolFormat.MISTRAL_ARGS, text) == (content, calls)


@pytest.mark.parametrize("tool_format", ToolFormat)
def test_a_forced_list_of_calls(tool_format: ToolFormat) -> None:
    text = f'[{F}, {{"name": "get_weather", "arguments": {{}}}}]'
    assert read(tool_format, text, REQUIRED) == ("", [("f", F_ARGUMENTS), ("get_weather", "{}")])


@pytest.mark.parametrize("text", ["[", "[\n  {", '[{"na', '[{"name": "f"', "  "])
def test_a_forced_list_that_was_cut_before_its_first_call_says_nothing(text: str) -> None:
    assert read(HERMES, text, REQUIRED) == ("", [])


def test_a_named_call_is_the_whole_answer() -> None:
    assert read(HERMES, '{"a": "<tool_call>"}', NAMED) == ("", [("f", '{"a": "<tool_call>"}')])
    # Cut off before its first character it is a call nevertheless.
    assert read(HERMES, "", NAMED) == ("", [("f", "")])


def test_what_is_certain_comes_at_once() -> None:
    parser = tool_parser(AUTO, HERMES)
    assert parser.feed("Hello <") == (Spoken("Hello"),)
    assert parser.feed("b>") == (Spoken(" <b>"),)
    assert parser.feed('<tool_call>{"name": "f", "arguments": ') == ()
    begun, arguments = parser.feed('{"a": "x')
    assert isinstance(begun, CallBegun)
    assert begun.id.startswith("call_")
    assert (begun.index, begun.name) == (0, "f")
    assert arguments == CallArguments(0, '{"a": "x')
    assert parser.feed("y") == (CallArguments(0, "y"),)
    assert parser.called
    assert not parser.complete


def test_without_parallel_calls_the_first_is_the_last() -> None:
    parser = tool_parser(ONE_CALL, HERMES)
    pieces = parser.feed(f"So: {CALL_F}\n{CALL_F} and more")
    assert parser.complete
    assert said(joined([*pieces, *parser.finish()])) == ("So:", [("f", F_ARGUMENTS)])


def test_why_an_answer_ended() -> None:
    parser = tool_parser(AUTO, HERMES)
    assert parser.finish_reason(FinishReason.STOP) == "stop"
    parser.feed(CALL_F)
    assert parser.finish_reason(FinishReason.STOP) == "tool_calls"
    assert parser.finish_reason(FinishReason.LENGTH) == "length"
    cut = tool_parser(AUTO, HERMES)
    cut.feed(CALL_F[: CALL_F.index("}")])
    cut.finish()
    assert cut.called
    assert cut.finish_reason(FinishReason.STOP) == "length"
    # Small models leave out the last brace: the arguments are whole.
    braceless = tool_parser(AUTO, HERMES)
    braceless.feed(CALL_F[: CALL_F.index("\n</")].removesuffix("}"))
    braceless.finish()
    assert braceless.finish_reason(FinishReason.STOP) == "tool_calls"
    named = tool_parser(NAMED, HERMES)
    named.feed("{}")
    assert named.finish_reason(FinishReason.STOP) == "stop"


def test_ids_are_such_as_the_models_templates_take() -> None:
    (call,) = parse(AUTO, MISTRAL, f"[TOOL_CALLS][{F}]").calls
    assert len(call.id) == 9
    assert call.id.isalnum()
    first, second = parse(AUTO, HERMES, CALL_F * 2).calls
    assert first.id != second.id


def test_white_space_is_held_back_only_so_far() -> None:
    parser = tool_parser(AUTO, HERMES)
    assert joined(parser.feed(" " * 1000)).content == " " * (1000 - HELD_BLANKS_MAX)


PARTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<tool_", "[TOOL_CALLS]", "[TOOL", "<|python_tag|>", "<|py"),
        *('{"name": "f", ', '"name"', '"f"', '"arguments": ', '"parameters": ', '{"a": "\\"}', '"}}', "{}"),
        *("{", "}", "[", "]", ",", ";", ":", " ", "\n", "\\", '"', "x", "é🙂", "null", "1", " " * 70),
        *(CALL_F, F, "y" * 70, '"' + "k" * 18, "[TOOL_CALLS]f[ARGS]", "[ARGS]", "[CALL_ID]a1", "f{"),
    ]
)


@given(
    text=st.lists(PARTS, max_size=14).map("".join),
    cuts=st.lists(st.integers(0, 400), max_size=8),
    tool_format=st.sampled_from(ToolFormat),
    use=st.sampled_from([AUTO, ONE_CALL, REQUIRED, NAMED]),
)
def test_cutting_changes_nothing(text: str, cuts: list[int], tool_format: ToolFormat, use: ToolUse) -> None:
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(borders)]
    whole = said(parse(use, tool_format, text))
    assert said(parse(use, tool_format, *pieces)) == whole
    assert said(parse(use, tool_format, *text)) == whole
    if not whole[1] and use is not REQUIRED:
        assert whole[0] == text, "where there is no call, and none was forced, nothing is lost"


@given(
    before=st.text(alphabet="ab <[\n", max_size=20),
    arguments=st.dictionaries(st.text(max_size=5), st.text(max_size=8) | st.integers(), max_size=3),
    tool_format=st.sampled_from([HERMES, MISTRAL]),
)
def test_every_call_is_found(before: str, arguments: dict[str, object], tool_format: ToolFormat) -> None:
    call = json.dumps({"name": "get_weather", "arguments": arguments}, ensure_ascii=False)
    form = f"<tool_call>{call}</tool_call>" if tool_format is HERMES else f"[TOOL_CALLS][{call}]"
    content, calls = read(tool_format, before + form)
    assert content == before.rstrip()
    assert [(name, json.loads(text)) for name, text in calls] == [("get_weather", arguments)]


@pytest.mark.parametrize(
    ("begin", "repeated"),
    [
        ("", "<tool_call>"),
        ("", " "),
        ("", "\n<tool_"),
        ("", '<tool_call>{"name": '),
        (CALL_F, " "),
        ('<tool_call>{"arguments": {', "["),
        ('<tool_call>{"arguments": {', '"'),
    ],
)
def test_hostile_text_takes_linear_time(begin: str, repeated: str) -> None:
    """Character by character. Four times as much would take sixteen times as long if what is held back, or
    taken for a call at first, were read again and again."""

    def cpu_s(chars: int) -> float:
        text = begin + repeated * (chars // len(repeated))
        parser = tool_parser(AUTO, HERMES)
        begun_s = time.process_time()
        pieces = [*itertools.chain.from_iterable(map(parser.feed, text)), *parser.finish()]
        took_s = time.process_time() - begun_s
        said = joined(pieces)
        assert said.calls or said.content == text
        return took_s

    few_s = min(cpu_s(5_000) for _ in range(3))
    many_s = min(cpu_s(20_000) for _ in range(3))
    assert many_s < 10 * few_s
