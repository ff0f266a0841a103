"""The two hosts of the tests: they come and go, and say why where there can be none."""

import subprocess
import sys
import time

import pytest
from tests.support.netns import PREFIX, STALE_S, Cut, HostPair, host_pair, stale

pytestmark = pytest.mark.integration

LISTED = ("ip", "netns", "list")


def listed() -> str:
    return subprocess.run(LISTED, capture_output=True, text=True, check=True).stdout


def answers(pair: HostPair) -> bool:
    """Whether the far host answers at all: it refuses a connection, as nobody listens there."""
    dial = f"import socket; socket.create_connection(({pair.far.address!r}, 9), 0.3)"
    command = (*pair.near.launcher, sys.executable, "-c", dial)
    return "ConnectionRefusedError" in subprocess.run(command, capture_output=True, text=True).stderr


@pytest.mark.parametrize("kind", list(Cut))
def test_a_cut_link_carries_nothing_until_it_is_restored(kind: Cut) -> None:
    with host_pair() as pair:
        assert answers(pair)
        pair.cut(kind)
        assert not answers(pair)
        pair.restore(kind)
        assert answers(pair)


def test_nothing_is_left_behind_by_this_run_or_a_crashed_one() -> None:
    crashed = f"{PREFIX}{int(time.time()) - STALE_S - 1}-abcdef-near"
    with host_pair() as first:
        subprocess.run(("ip", "netns", "add", crashed), check=True)
        try:
            with host_pair() as second:
                assert crashed not in listed()
                assert answers(first)
                assert answers(second)
        finally:
            if crashed in listed():
                subprocess.run(("ip", "netns", "del", crashed), check=True)
    for host in (first.near, first.far, second.near, second.far):
        assert host.namespace not in listed()


def test_only_old_names_of_ours_are_stale() -> None:
    old, young = f"{PREFIX}1000-ab-near", f"{PREFIX}2000-cd-far"
    names = [old, young, "1000-ab-near", f"{PREFIX}near", f"{PREFIX}x-ab-near"]
    assert stale(names, 1000.0 + STALE_S) == []
    assert stale(names, 1001.0 + STALE_S) == [old]


def test_a_machine_without_them_skips_or_fails_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("MOONPOOL_NETNS_REQUIRED", raising=False)
    with pytest.raises(pytest.skip.Exception, match="'ip' is not installed"), host_pair():
        pass
    monkeypatch.setenv("MOONPOOL_NETNS_REQUIRED", "1")
    with pytest.raises(pytest.fail.Exception, match="'ip' is not installed"), host_pair():
        pass
