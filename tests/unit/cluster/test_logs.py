"""Logs: one JSON object a line, levels, bound fields, and no secret in them."""

import io
import json
import logging
import sys
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.context import ServiceConfig
from cluster.logs import FIELD_CHARS_MAX, Level, Logger, capture_standard_logging, render

pytestmark = pytest.mark.unit


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_lines_carry_their_fields_and_those_bound() -> None:
    stream = io.StringIO()
    log = Logger(Level.INFO, stream, service="decode", instance="d1")
    log.bind(request_id="r1", trace_id="t1").info("committed", blocks=3)
    log.debug("not shown")
    log.warning("slow", instance="d2")
    first, second = lines(stream)
    assert datetime.fromisoformat(str(first.pop("time"))).tzinfo is not None
    assert first == {
        "level": "info",
        "message": "committed",
        "service": "decode",
        "instance": "d1",
        "request_id": "r1",
        "trace_id": "t1",
        "blocks": 3,
    }
    assert (second["level"], second["instance"]) == ("warning", "d2")


def test_secrets_are_blanked() -> None:
    stream = io.StringIO()
    Logger(Level.INFO, stream, cluster_secret="s3cret").error(
        "no server at nats://me:s3cret@host:4222",
        url="tls://s3cret@host",
        error=OSError("http://u:s3cret@etcd:1 refused"),
        at_sign="nats://u:p@s3cret@h:1,nats://u:s3cret@i:2",
        authorization="Bearer s3cret",
        headers={"authorization": "Bearer s3cret", "host": ["http://u:s3cret@h"]},
        config=ServiceConfig(cluster_secret="s3cret", nats_url="nats://u:s3cret@h"),
        seed_name="kept",
    )
    text = stream.getvalue()
    assert "s3cret" not in text
    assert "nats://***@host:4222" in text
    assert "kept" in text
    assert "s3cret" not in repr(ServiceConfig(cluster_secret="s3cret"))


def test_exceptions_carry_their_traceback() -> None:
    stream = io.StringIO()
    log = Logger(Level.INFO, stream)
    try:
        raise ValueError("broken")
    except ValueError as error:
        log.exception("given", error)
        log.exception("current")
    for line in lines(stream):
        assert line["level"] == "error"
        assert "ValueError('broken')" in str(line["error"])
        assert "test_logs.py" in str(line["traceback"])


@given(
    st.text(),
    st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.integers(), inner, max_size=2),
            max_leaves=4,
        ),
        max_size=2,
    ),
)
def test_whatever_is_logged_makes_one_line_of_json(message: str, fields: dict[str, object]) -> None:
    line = render(Level.INFO, message, fields, datetime.now(UTC))
    assert line.endswith("\n")
    assert line.count("\n") == 1
    assert json.loads(line)["level"] == "info"


def test_long_text_is_cut_and_broken_text_is_written() -> None:
    line = json.loads(render(Level.INFO, "x" * 100_000, {"bad": "\ud800"}, datetime.now(UTC)))
    assert len(line["message"]) == FIELD_CHARS_MAX + 1
    assert line["bad"] == "?"


def test_a_value_that_cannot_be_shown_breaks_nothing() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise ValueError("no repr")

    stream = io.StringIO()
    Logger(Level.INFO, stream, service="decode").info("shown anyway", value=Broken())
    (line,) = lines(stream)
    assert (line["message"], line["service"]) == ("shown anyway", "decode")
    assert "no repr" in str(line["fields_lost"])


def test_a_closed_stream_ends_nothing() -> None:
    stream = io.StringIO()
    stream.close()
    Logger(Level.INFO, stream).info("nobody reads")


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


def test_what_libraries_log_becomes_lines_too(root_logger: logging.Logger) -> None:
    stream = io.StringIO()
    capture_standard_logging(Logger(Level.INFO, stream, service="decode"))
    library = logging.getLogger("some.package")
    library.info("chatter is left out")
    library.warning("it is %s", "late")
    try:
        raise OSError("gone")
    except OSError:
        library.critical("failed", exc_info=True)
    late, failed = lines(stream)
    assert (late["message"], late["logger"], late["service"], late["level"]) == (
        "it is late",
        "some.package",
        "decode",
        "warning",
    )
    assert failed["level"] == "error"
    assert "OSError: gone" in str(failed["traceback"])


def test_standard_error_is_where_lines_go(capsys: pytest.CaptureFixture[str]) -> None:
    Logger(Level.INFO).info("hello")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert json.loads(captured.err)["message"] == "hello"
    assert sys.stderr is not None
