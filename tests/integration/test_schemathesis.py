"""The live API held to its own OpenAPI document: what it takes, what it refuses, and what it says.

`tests/support/schemathesis.toml` says which checks are made; none of them may fail, and no answer may have a
status of 500 and above.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.stack import RunningStack

from gateway.api.operations import OPERATIONS

pytestmark = [pytest.mark.integration, pytest.mark.timeout(480)]

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "tests" / "support" / "schemathesis.toml"
RUN_S_MAX = 400.0
"""About 40 s of it are its own CPU; the rest is for machines that do other things as well."""
CASES_MIN = 150
HTTP_S_MAX = 20.0


def test_the_api_is_as_its_document_says(tiny_stack: RunningStack, tmp_path: Path) -> None:
    url = tiny_stack.state.url.removesuffix("/v1")
    before = answered(url)
    run = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "--no-color", "--config-file", str(CONFIG)),
            *("run", f"{url}/openapi.json"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    cases = re.search(r"(\d+) generated", run.stdout)
    assert cases is not None, run.stdout
    assert int(cases[1]) >= CASES_MIN
    answers = answered(url) - before
    for operation in OPERATIONS:
        assert answers[operation.name, 200] > 0, operation.name
        assert answers[operation.name, 400] > 0 or operation.method == "GET", operation.name
    assert not {(route, status) for route, status in answers if status >= 500}


def answered(url: str) -> Counter[tuple[str, int]]:
    """By route and status."""
    with urlopen(f"{url}/metrics", timeout=HTTP_S_MAX) as reply:
        families = text_string_to_metric_families(reply.read().decode())
        return Counter(
            {
                (sample.labels["route"], int(sample.labels["status"])): int(sample.value)
                for family in families
                for sample in family.samples
                if sample.name == "moonpool_gateway_requests_total"
            }
        )


def test_the_api_has_a_page_that_needs_nothing_else(tiny_stack: RunningStack) -> None:
    url = tiny_stack.state.url.removesuffix("/v1")
    with urlopen(f"{url}/docs", timeout=HTTP_S_MAX) as answer:
        page, headers = answer.read().decode(), answer.headers
    assert headers.get_content_type() == "text/html"
    assert "default-src 'none'; connect-src 'self'" in headers["content-security-policy"]
    assert 'fetch("openapi.json")' in page
    assert not re.findall(r"(?:src|href)=\"(?!openapi\.json)", page)
    assert "http://" not in page
    assert "https://" not in page
