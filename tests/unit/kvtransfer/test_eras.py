"""Which links of a peer an owner ends before it welcomes a new one."""

import asyncio

import pytest

from kvtransfer.eras import ERA_BYTES, PEERS_MAX, Eras

pytestmark = pytest.mark.unit


async def test_links_of_one_era_stand_beside_each_other_and_end_with_it() -> None:
    caller, owner = Eras(), Eras()
    ended: list[tuple[str, bytes]] = []

    async def end(peer: str, but: bytes) -> None:
        ended.append((peer, but))

    owner.watch(end)
    first, second = caller.link_id("owner"), caller.link_id("owner")
    assert first != second
    assert first[:ERA_BYTES] == second[:ERA_BYTES]
    assert await owner.admit("caller", first)
    assert await owner.admit("caller", second)
    caller.begin("owner")
    third = caller.link_id("owner")
    assert third[:ERA_BYTES] != first[:ERA_BYTES]
    assert await owner.admit("caller", third)
    assert ended == [("caller", link[:ERA_BYTES]) for link in (first, second, third)]
    # A dial of the era before that took its time does not end the newer links.
    assert not await owner.admit("caller", second)
    assert len(ended) == 3
    assert await owner.admit("another caller", second)


async def test_a_dial_that_took_longer_than_two_eras_is_not_taken_for_a_new_one() -> None:
    """Else the peer's links are ended, and its next ones are refused for good: their era seems to be over."""
    caller, owner = Eras(), Eras()
    late = caller.link_id("owner")
    for _ in range(3):
        caller.begin("owner")
        assert await owner.admit("caller", caller.link_id("owner"))
    assert not await owner.admit("caller", late)
    assert await owner.admit("caller", caller.link_id("owner"))
    assert await owner.admit("caller", Eras().link_id("owner"))  # the process was started anew
    assert not await owner.admit("caller", caller.link_id("owner"))


async def test_numbers_that_run_out_begin_anew() -> None:
    caller, owner = Eras(), Eras()
    caller._number = (1 << 24) - 2
    links = []
    for _ in range(3):
        caller.begin("owner")
        links.append(caller.link_id("owner"))
        assert len(links[-1]) == 16
        assert await owner.admit("caller", links[-1])
    assert not await owner.admit("caller", links[1])


async def test_an_era_that_ends_while_it_is_admitted() -> None:
    caller, owner = Eras(), Eras()
    gate = asyncio.Event()

    async def end(peer: str, but: bytes) -> None:
        await gate.wait()

    owner.watch(end)
    old = asyncio.create_task(owner.admit("caller", caller.link_id("owner")))
    await asyncio.sleep(0)
    caller.begin("owner")
    new = asyncio.create_task(owner.admit("caller", caller.link_id("owner")))
    await asyncio.sleep(0)
    gate.set()
    assert [await old, await new] == [False, True]


async def test_peers_remembered_are_bounded() -> None:
    eras = Eras()
    first = eras.link_id("0")
    second = eras.link_id("1")
    for number in range(PEERS_MAX):
        eras.link_id(str(number))
        assert await eras.admit(str(number), bytes(16))
    assert eras.link_id("0")[:ERA_BYTES] == first[:ERA_BYTES]
    eras.link_id("one more")
    assert eras.link_id("1")[:ERA_BYTES] != second[:ERA_BYTES]
