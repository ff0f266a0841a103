"""`moonpool bench serve`: real processes lead requests to stub instances, and all of them are answered."""

import json

import pytest

from moonpool.__main__ import main

pytestmark = pytest.mark.integration


def test_the_control_path_answers_every_request(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--model", "tiny", "--seconds", "1", "--repeats", "1", "--prompt-words", "40", "--rate", "20")
    assert main(["bench", "serve", "--json", "--gateways", "2", *options]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    values = {(line["case"], line["metric"]): line["value"] for line in lines}
    for case in ("moonpool", "stub_worker"):
        assert values[case, "requests"] > 10
        assert values[case, "closed_failed"] == values[case, "open_failed"] == 0
    for process in ("gateway-0", "gateway-1", "conductor-0", "kvmeta-0", "nats", "stub_workers"):
        assert values["moonpool", f"closed_processor_{process}"] > 0
    assert not any(case == "sglang_router" for case, _ in values)
