from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.heat import HEATS_MAX, WINDOW_SLOTS, Asked, HeatCounter, HeatWindow

pytestmark = pytest.mark.unit

IDLE_S = 60.0
WINDOW_S = 12.0


def chain(blocks: int, salt: int = 0) -> bytes:
    return b"".join(salt.to_bytes(8) + number.to_bytes(8) for number in range(blocks))


class TestCounter:
    def test_a_prefix_is_where_the_match_ends(self):
        counter = HeatCounter()
        for prompt in (chain(5), chain(3) + b"x" * 16, chain(9)):
            counter.count(prompt, 3, 0.0)
        counter.count(chain(9), 4, 0.0)
        counter.count(chain(9), 4, 0.0)
        assert counter.take(0.0, IDLE_S) == (Asked(chain(3), 3), Asked(chain(4), 2))

    def test_what_was_told_is_not_told_again(self):
        counter = HeatCounter()
        for _ in range(3):
            counter.count(chain(2), 2, 0.0)
        assert counter.take(0.0, IDLE_S) == (Asked(chain(2), 3),)
        assert counter.take(0.0, IDLE_S) == ()
        counter.count(chain(2), 2, 1.0)
        assert counter.take(1.0, IDLE_S) == ()
        counter.count(chain(2), 2, 2.0)
        assert counter.take(2.0, IDLE_S) == (Asked(chain(2), 2),)

    def test_what_nobody_asks_for_is_forgotten(self):
        counter = HeatCounter()
        counter.count(chain(2), 2, 0.0)
        counter.count(chain(3), 3, 50.0)
        counter.take(61.0, IDLE_S)
        assert (len(counter), counter.chain_bytes) == (1, 48)

    def test_one_message_has_the_hottest(self):
        counter = HeatCounter()
        for salt in range(HEATS_MAX + 10):
            for _ in range(2 + salt):
                counter.count(chain(1, salt), 1, 0.0)
        told = counter.take(0.0, IDLE_S)
        assert [heat.requests for heat in told] == list(range(HEATS_MAX + 11, 11, -1))
        assert len(counter.take(0.0, IDLE_S)) == 10

    @given(
        asked=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 8), st.floats(0, 100)), max_size=60),
        prefixes_max=st.integers(1, 5),
        blocks_max=st.integers(8, 20),
    )
    def test_bounded_and_never_more_than_was_asked(self, asked, prefixes_max, blocks_max):
        counter = HeatCounter(prefixes_max, 16 * blocks_max)
        truth, told = Counter(), Counter()
        for step, (salt, blocks, now_s) in enumerate(sorted(asked, key=lambda ask: ask[2])):
            counter.count(chain(8, salt), blocks, now_s)
            truth[chain(blocks, salt)] += 1
            assert 1 <= len(counter) <= prefixes_max
            assert counter.chain_bytes <= 16 * blocks_max
            if step % 7 == 6:
                for heat in counter.take(now_s, IDLE_S):
                    told[heat.block_hashes] += heat.requests
        for heat in counter.take(1000.0, 1e9):
            told[heat.block_hashes] += heat.requests
        assert told <= truth
        counter.take(1e9, IDLE_S)
        assert (len(counter), counter.chain_bytes) == (0, 0)


class TestWindow:
    def test_sums_over_all_and_over_time(self):
        window = HeatWindow(WINDOW_S)
        for now_s in (0.5, 0.5, 5.0):
            window.add((Asked(chain(2), 3), Asked(chain(1), 1)), now_s)
        assert window.hot(3, 9, 6.0) == (Asked(chain(2), 9), Asked(chain(1), 3))
        assert window.hot(4, 9, 6.0) == (Asked(chain(2), 9),)
        assert window.hot(1, 1, 6.0) == (Asked(chain(2), 9),)
        assert window.hot(1, 9, 11.9) == (Asked(chain(2), 9), Asked(chain(1), 3))
        assert window.hot(1, 9, 12.0) == (Asked(chain(2), 3), Asked(chain(1), 1))
        assert window.hot(1, 9, 17.0) == ()
        assert (len(window), window.chain_bytes) == (0, 0)

    @given(
        told=st.lists(
            st.tuples(st.integers(0, 9), st.integers(1, 8), st.integers(1, 9), st.floats(0, 100)), max_size=60
        ),
        prefixes_max=st.integers(1, 5),
        blocks_max=st.integers(8, 20),
    )
    def test_bounded_and_right_to_a_part_of_the_window(self, told, prefixes_max, blocks_max):
        window = HeatWindow(WINDOW_S, prefixes_max, 16 * blocks_max)
        told.sort(key=lambda heat: heat[3])
        for salt, blocks, requests, now_s in told:
            window.add((Asked(chain(blocks, salt), requests),), now_s)
            assert 1 <= len(window) <= prefixes_max
            assert window.chain_bytes <= 16 * blocks_max
        end_s = told[-1][3] if told else 0.0

        def asked_since(hashes: bytes, start_s: float) -> int:
            same = (heat for heat in told if chain(heat[1], heat[0]) == hashes and heat[3] >= start_s)
            return sum(heat[2] for heat in same)

        hot = window.hot(1, 99, end_s)
        assert list(hot) == sorted(hot, key=lambda asked: (-asked.requests, asked.block_hashes))
        for asked in hot:
            assert 1 <= asked.requests <= asked_since(asked.block_hashes, end_s - WINDOW_S)
        if len({(heat[0], heat[1]) for heat in told}) <= prefixes_max and blocks_max * 16 >= sum(
            len(chain(blocks, salt)) for salt, blocks in {(heat[0], heat[1]) for heat in told}
        ):
            kept_s = end_s - WINDOW_S * (1 - 1 / WINDOW_SLOTS)
            counts = {asked.block_hashes: asked.requests for asked in hot}
            for salt, blocks in {(heat[0], heat[1]) for heat in told}:
                assert counts.get(chain(blocks, salt), 0) >= asked_since(chain(blocks, salt), kept_s)
