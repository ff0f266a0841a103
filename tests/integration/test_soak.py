"""A small pool under a working set twenty times as large: sizes hold, nothing leaks, no token is wrong.

One minute by default; `make soak` gives it ten. The seed is printed, and taken from MOONPOOL_SOAK_SEED.
"""

import os
import random
from pathlib import Path

import pytest
from tests.support.scrape import metrics, pool
from tests.support.soak import Soak, SoakCounts
from tests.support.soak_script import Conversation, SoakShape, asks, conversations
from tests.support.soak_watch import (
    Limits,
    all_metrics,
    at_rest,
    check_pools,
    directory_differences,
    logged_errors,
    sizes_watched,
    tier_totals,
    worker_urls,
)
from tests.support.stack import RunningStack, running_stack

from engine.layout import KVLayout
from engine.model_folder import ModelConfig
from engine.tiny import make_tiny_model
from kvhash import BLOCK_TOKENS

SOAK_S = float(os.environ.get("MOONPOOL_SOAK_S", "60"))
SEED = int(os.environ.get("MOONPOOL_SOAK_SEED") or random.SystemRandom().randrange(2**31))

POOL_BYTES = 8 << 20
SSD_BYTES = 32 << 20
WORKING_SETS = 20
"""The working set, in pools."""
CLIENTS = 5
NEAR_TIES_SHARE_MAX = 0.01
REFUSED_SHARE_MAX = 0.05
CHAINS = 60
"""Conversations whose match is compared with what the instances hold."""

pytestmark = [pytest.mark.integration, pytest.mark.timeout(SOAK_S + 300)]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose blocks cost as much to compute, for their size, as those of real ones: else nothing
    would be worth reading from the SSD."""
    folder = tmp_path_factory.mktemp("models") / "soak"
    make_tiny_model(folder, hidden_size=256, intermediate_size=512, layers=6, heads=8, kv_heads=1)
    return folder


async def test_a_small_pool_under_a_large_working_set(home: Path, model_folder: Path) -> None:
    flags = ("--prefill", "2", "--pool-bytes", str(POOL_BYTES), "--ssd-bytes", str(SSD_BYTES))
    with running_stack(home, "soak", "--model", str(model_folder), *flags) as stack:
        try:
            await soak(stack)
        except BaseException:
            print(stack.logs())
            raise


async def soak(stack: RunningStack) -> None:
    model_folder = Path(stack.state.model_folder)
    block_bytes = KVLayout.of(ModelConfig.load(model_folder)).block_bytes
    working_set_tokens = WORKING_SETS * POOL_BYTES // block_bytes * BLOCK_TOKENS
    everything = conversations(SEED, SoakShape(working_set_tokens))
    print(f"seed {SEED}, {SOAK_S:g} s, {len(everything)} conversations of {working_set_tokens} tokens")
    with sizes_watched(stack, Limits(POOL_BYTES, SSD_BYTES)) as watch:
        with Soak(stack.api, stack.state.model, model_folder, asks(SEED, everything), CLIENTS) as load:
            load.run_for(SOAK_S)
        stack.wait_status(at_rest)
    report(stack, load.counts, watch.sizes.ssd_bytes)
    check_answers(load.counts, everything)
    assert watch.trouble == []
    assert watch.sizes.looks > 0
    check_pools(stack)
    assert logged_errors(stack) == []
    chains = [conversation.opening() for conversation in everything[:CHAINS]]
    assert await directory_differences(stack, chains) == []
    check_that_tiers_were_used(stack)


def check_answers(counts: SoakCounts, everything: list[Conversation]) -> None:
    assert counts.wrong == []
    assert counts.failed == []
    assert counts.answers > 0
    assert counts.cancelled > 0
    assert counts.refused <= REFUSED_SHARE_MAX * counts.requests
    assert counts.near_ties <= NEAR_TIES_SHARE_MAX * counts.answers
    assert len(counts.asked) > len(everything) // 3, "the load walked through the working set"


def check_that_tiers_were_used(stack: RunningStack) -> None:
    """Else the soak showed nothing."""
    pools = [pool(url) for url in worker_urls(stack).values()]
    for name in ("sunk_total", "risen_total", "evicted_total"):
        assert tier_totals(pools, name)["ssd"] > 0, name
    fetched = [one.by_label("moonpool_fetched_blocks_total", "source") for one in all_metrics(stack).values()]
    assert sum(by_source.get("remote", 0) for by_source in fetched) > 0


def report(stack: RunningStack, counts: SoakCounts, ssd_bytes: dict[str, int]) -> None:
    print(
        f"{counts.requests} requests: {counts.answers} answers, {counts.cancelled} cancelled, "
        f"{counts.refused} refused, {counts.near_ties} near ties; "
        f"{len(counts.asked)} conversations, {counts.prompt_tokens} prompt tokens"
    )
    seen = all_metrics(stack).values()
    reused = sum(one.value("moonpool_cached_tokens_total") for one in seen)
    computed = sum(one.value("moonpool_prefill_tokens_total") for one in seen)
    by_source = {
        source: BLOCK_TOKENS * sum(one.value("moonpool_fetched_blocks_total", source=source) for one in seen)
        for source in ("local_ssd", "remote")
    }
    shares = {"memory": reused - sum(by_source.values()), **by_source}
    print(
        "hits: " + ", ".join(f"{name} {tokens / (reused + computed):.1%}" for name, tokens in shares.items())
    )
    for reason in ("write", "read", "corrupt"):
        assert sum(one.value("moonpool_tier_failures_total", what=reason) for one in seen) == 0, reason
    for name, url in worker_urls(stack).items():
        told = pool(url)
        tiers = [f"{tier['tier']} {tier}" for tier in told.pop("tiers")]
        failures = metrics(url).by_label("moonpool_fetch_failures_total", "reason")
        print(
            f"{name}: {told}, {', '.join(tiers)}, fetch failures {failures}, {ssd_bytes[name]} bytes on SSD"
        )
