"""A handover over a pair whose transports fail: writes are made again, in the end all bytes are there."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from tests.support.transfer import Side, no_leaks, pattern, side

from cluster.messages import Reserved
from engine.layout import KVLayout
from kvhash import BLOCK_TOKENS
from kvtransfer import GrantError, Peer, PeerLostError, Transferred, TransferTimeout
from policy.core import RequestId
from worker.handover import WRITE_TRIES_MAX, Handover, Source

pytestmark = pytest.mark.unit

LAYOUT = KVLayout(layers=4, kv_heads=2, block_tokens=BLOCK_TOKENS, head_dim=8, dtype_name="float32")
BLOCKS = 6
TOKENS = BLOCKS * BLOCK_TOKENS
LOCAL_IDS, REMOTE_IDS = [7, 3, 5, 1, 0, 2], [2, 4, 6, 0, 1, 3]
ARENA_BYTES = 8 * LAYOUT.block_bytes


@dataclass
class UnreliablePeer:
    """Loses what `fails` says, by number of the write, before or after its bytes landed."""

    peer: Peer
    fails: Callable[[int], Exception | None]
    after: bool
    writes: int = 0
    timeouts_s: list[float] = field(default_factory=list)

    async def write(self, *arguments: object, timeout_s: float) -> Transferred:
        self.writes += 1
        self.timeouts_s.append(timeout_s)
        error = self.fails(self.writes)
        if error is not None and not self.after:
            raise error
        done = await self.peer.write(*arguments, timeout_s=timeout_s)
        if error is not None:
            raise error
        return done


@pytest.fixture
async def sides() -> AsyncIterator[tuple[Side, Side]]:
    async with (
        no_leaks(),
        side("tcp", "prefill", pattern(ARENA_BYTES)) as prefill,
        side("tcp", "decode", np.zeros(ARENA_BYTES, np.uint8)) as decode,
    ):
        yield prefill, decode


async def handover(
    sides: tuple[Side, Side],
    fails: Callable[[int], Exception | None],
    *,
    after: bool,
    write_bytes_min: int = 1,
) -> tuple[Handover, UnreliablePeer]:
    """With all writes begun, layer by layer, in two chunks."""
    prefill, decode = sides
    grant = decode.grant([(0, ARENA_BYTES)], "prefill")
    packed = np.asarray(REMOTE_IDS, "<i4").tobytes()
    reserved = Reserved(RequestId("r"), 0, 1, 0, packed, grant.token, 10.0)
    peer = UnreliablePeer(await prefill.connect(decode), fails, after)
    source = Source(
        prefill.endpoint, prefill.region, LAYOUT, checksums=False, write_bytes_min=write_bytes_min
    )
    running = Handover(source, peer, reserved, LOCAL_IDS, TOKENS)
    for tokens in (TOKENS // 2, TOKENS):
        for layer in range(LAYOUT.layers):
            running.layer_done(layer, tokens, layer == LAYOUT.layers - 1)
    return running, peer


def assert_handed_over(prefill: Side, decode: Side) -> None:
    for local, remote in zip(LOCAL_IDS, REMOTE_IDS, strict=True):
        size = LAYOUT.block_bytes
        there = decode.memory[remote * size : (remote + 1) * size]
        assert np.array_equal(there, prefill.memory[local * size : (local + 1) * size])


@pytest.mark.parametrize("after", [False, True])
async def test_writes_that_fail_are_made_again(sides: tuple[Side, Side], after: bool) -> None:
    prefill, decode = sides
    running, peer = await handover(sides, lambda n: PeerLostError("cut") if n % 3 == 1 else None, after=after)
    done = await running.finish()
    assert (done.blocks_written, done.bytes_written) == (BLOCKS, BLOCKS * LAYOUT.block_bytes)
    assert peer.writes > 2 * LAYOUT.layers
    assert_handed_over(prefill, decode)


@pytest.mark.parametrize(("layers", "writes"), [(1, 8), (2, 4), (3, 4), (4, 2), (100, 2)])
async def test_layers_are_gathered_until_they_are_worth_a_write(
    sides: tuple[Side, Side], layers: int, writes: int
) -> None:
    prefill, decode = sides
    enough_bytes = layers * LAYOUT.layer_bytes * (BLOCKS // 2)
    running, peer = await handover(sides, lambda n: None, after=False, write_bytes_min=enough_bytes)
    done = await running.finish()
    assert (done.blocks_written, done.bytes_written) == (BLOCKS, BLOCKS * LAYOUT.block_bytes)
    assert peer.writes == writes
    assert_handed_over(prefill, decode)


@pytest.mark.parametrize("error", [PeerLostError("gone"), TransferTimeout("late")])
async def test_not_for_ever(sides: tuple[Side, Side], error: Exception) -> None:
    running, peer = await handover(sides, lambda n: error, after=False)
    with pytest.raises(type(error)):
        await running.finish()
    await running.abort()
    assert peer.writes <= 2 * LAYOUT.layers * WRITE_TRIES_MAX
    assert max(peer.timeouts_s) <= 60.0


async def test_a_refusal_is_final(sides: tuple[Side, Side]) -> None:
    running, peer = await handover(sides, lambda n: GrantError("revoked"), after=False)
    with pytest.raises(GrantError):
        await running.finish()
    await running.abort()
    assert peer.writes == 2 * LAYOUT.layers
