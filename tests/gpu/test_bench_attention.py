"""The benchmark runs, on its small cases: that its figures are good is for whoever reads them."""

import json

import pytest

from moonpool.__main__ import main

pytestmark = pytest.mark.gpu


def test_it_measures(capsys: pytest.CaptureFixture[str]) -> None:
    cases = ["decode_32_ragged", "prefill_1x2048", "prefill_1024_on_8192"]
    flags = [flag for case in cases for flag in ("--case", case)]
    assert main(["bench", "attention", "--json", "--repeats", "1", *flags]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["case"].split("/")[0] for line in lines} == {"copy", *cases}
    assert all(line["value"] > 0 for line in lines)
