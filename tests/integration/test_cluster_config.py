"""Settings that all services share are changed under a running stack; targets come by header as well."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from tests.support.scrape import metrics
from tests.support.stack import RunningStack

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

ANSWER_S_MAX = 60.0
TAKEN_OVER_S_MAX = 20.0
POLL_S = 0.1
BUSY_S_MAX = 60.0


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    error: dict[str, object]


def ask(stack: RunningStack, **headers: str) -> Reply:
    """One short answer, or why there is none."""
    body = json.dumps({"model": stack.state.model, "prompt": "hello", "max_tokens": 3}).encode()
    request = Request(
        f"{stack.state.url}/completions",
        body,
        {
            "Content-Type": "application/json",
            **{name.replace("_", "-"): text for name, text in headers.items()},
        },
    )
    try:
        with urlopen(request, timeout=ANSWER_S_MAX) as answer:
            return Reply(answer.status, {}, {})
    except HTTPError as refused:
        told = {name.lower(): text for name, text in refused.headers.items()}
        return Reply(refused.status, told, json.loads(refused.read())["error"])


def served(stack: RunningStack, **headers: str) -> Reply:
    """As a client that comes again where nobody was ready yet."""
    waited_s = 0.0
    while (reply := ask(stack, **headers)).status == 503 and waited_s < BUSY_S_MAX:
        threading.Event().wait(float(reply.headers["retry-after-ms"]) / 1e3)
        waited_s += float(reply.headers["retry-after-ms"]) / 1e3
    return reply


@pytest.fixture(scope="module")
def followers(tiny_stack: RunningStack) -> list[str]:
    """Where those that follow the configuration tell their metrics."""
    instances = tiny_stack.status()["instances"]
    urls = [one["http_url"] for one in instances if {"conductor", "kvmeta"} & {*one["roles"]}]
    assert len(urls) >= 2
    return urls


@dataclass(frozen=True)
class Shared:
    """A stack whose configuration is changed."""

    stack: RunningStack
    followers: list[str]

    def configure(self, *arguments: str) -> int:
        """Change it by the command, and wait until conductors and kvmetas tell that revision."""
        done = self.stack.command("config", *arguments, "--json", "--name", self.stack.name)
        assert done.returncode == 0, done.stderr
        revision: int = json.loads(done.stdout)["revision"]
        waited_s = 0.0
        while any(
            metrics(url).value("moonpool_cluster_config_revision") != revision for url in self.followers
        ):
            assert waited_s < TAKEN_OVER_S_MAX, f"revision {revision} was not taken over"
            # Another process's metric: there is nothing to wait on but time.
            threading.Event().wait(POLL_S)
            waited_s += POLL_S
        return revision


@pytest.fixture
def shared(tiny_stack: RunningStack, followers: list[str]) -> Iterator[Shared]:
    """Shared with others, who get it back as it was."""
    made = Shared(tiny_stack, followers)
    yield made
    made.configure("unset", "--all")


def test_a_target_is_set_and_unset_while_the_stack_runs(shared: Shared) -> None:
    assert served(shared.stack).status == 200
    first = shared.configure("set", "ttft_ms_default=0.001")
    refused = ask(shared.stack)
    assert refused.status == 429
    assert (refused.error["reason"], refused.error["code"]) == ("ttft", "rate_limit_exceeded")
    assert "first token predicted after" in str(refused.error["message"])
    retry_ms = float(refused.headers["retry-after-ms"])
    assert int(refused.headers["retry-after"]) == -(-retry_ms // 1000)
    # A request's own target goes before the cluster's.
    assert ask(shared.stack, x_slo_ttft_ms="3600000").status == 200
    assert shared.configure("set", "admission=none") > first
    assert ask(shared.stack).status == 200
    shared.configure("unset", "ttft_ms_default", "admission")
    assert ask(shared.stack).status == 200


def test_what_is_set_is_shown_and_a_bad_value_changes_nothing(shared: Shared) -> None:
    revision = shared.configure("set", "strategy=cache_aware", "replication_requests_min=50")
    bad = shared.stack.command("config", "set", "strategy=best", "--name", shared.stack.name)
    assert bad.returncode == 2
    assert "strategy: 'best' is not one of random, load_balance" in bad.stderr
    shown = shared.stack.command("config", "show", "--json", "--name", shared.stack.name)
    told = json.loads(shown.stdout)
    assert (told["revision"], told["not_valid"]) == (revision, {})
    assert told["settings"] == {"replication_requests_min": 50, "strategy": "cache_aware"}
    policies = [metrics(url).by_label("moonpool_conductor_policy", "strategy") for url in shared.followers]
    assert [policy for policy in policies if policy] == [{"cache_aware": 1.0}]


def test_a_target_in_a_header_is_held_to(shared: Shared) -> None:
    assert served(shared.stack, x_slo_ttft_ms="3600000", x_slo_tbt_ms="60000", x_priority="3").status == 200
    refused = ask(shared.stack, x_slo_tbt_ms="0.1")
    assert (refused.status, refused.error["reason"]) == (429, "tbt")
    bad = ask(shared.stack, x_priority="urgent")
    assert (bad.status, bad.error["param"]) == (400, "x-priority")


def test_decode_has_the_last_word_on_a_target(shared: Shared) -> None:
    """Without admission the conductor places it all the same; each decode that is tried refuses."""
    shared.configure("set", "admission=none")
    refused = ask(shared.stack, x_slo_tbt_ms="0.1")
    assert (refused.status, refused.error["reason"]) == (429, "tbt")
    assert "decode refused: tbt" in str(refused.error["message"])
    assert ask(shared.stack).status == 200
