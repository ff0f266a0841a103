"""The form of a trace that docs/simulator.md tells is the one that is read."""

import re

import pytest
from tests.support.documents import prose

from simulator.trace import LINE_BYTES_MAX, LINES_MAX, TRACE_BLOCK_TOKENS, parse_trace

pytestmark = pytest.mark.unit

DOCUMENT = prose("docs/simulator.md")


def test_the_example_is_a_request() -> None:
    (line,) = re.findall(r"^    (\{.*\})$", DOCUMENT, re.MULTILINE)
    (request,) = parse_trace([line.encode()], "docs/simulator.md")
    assert (request.arrived_ms, request.input_tokens, request.output_tokens) == (27482, 1300, 52)
    assert request.block_ids == (46, 47, 2353)


def test_the_bounds_are_those_of_the_reader() -> None:
    assert f"for each {TRACE_BLOCK_TOKENS} tokens of the prompt" in DOCUMENT
    assert f"at most {LINES_MAX:,} lines of at most {LINE_BYTES_MAX >> 20} MiB" in DOCUMENT
