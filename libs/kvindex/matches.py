"""Changes of holders along a prompt to what each instance holds of it: the answer of `Directory.match`.

Knows which instance has which place in the holders' integers; finds no changes itself.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from kvhash import unpack
from kvindex.changes import Change, HoldersAt, all_changes
from kvindex.core import InstanceId, InstanceMatch, TierRun
from kvindex.holders import PLACE_BITS, PLACE_MASK, TIER_OF, code_at, places

STEPS_MAX = 4096
MATCHES_MAX = 16_384
"""Answers kept for one more use: to make a frozen one costs more than to find it."""

Runs: TypeAlias = tuple[tuple[int, int], ...]
"""(code, blocks) of each tier run."""


@dataclass(slots=True)
class _Ending:
    """A place whose blocks come to their end in one tier."""

    place: int
    instance: InstanceId
    code: int
    matches: dict[int, InstanceMatch] = field(default_factory=dict)
    """By their length, where all blocks are in this tier."""
    matches_in_runs: dict[Runs, InstanceMatch] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Step:
    """What one change means: who ends, and who goes on in a slower tier."""

    mask: int
    """Of the places that change."""
    ended: tuple[_Ending, ...]
    """Last names first, as the whole answer is turned round."""
    slowed: tuple[tuple[int, int], ...] = ()
    """(place, its code before)"""


class MatchBuilder:
    def __init__(self) -> None:
        self._instances: dict[int, InstanceId] = {}
        self._endings: dict[tuple[int, int], _Ending] = {}
        """By place and code."""
        self._steps_of_endings: dict[int, _Step] = {}
        """By what is in the holders before and not after."""
        self._steps: dict[tuple[int, int], _Step] = {}
        """By the holders before and after."""
        self._matches_kept = 0

    def show(self, place: int, instance: InstanceId) -> None:
        self._instances[place] = instance
        self._forget()

    def hide(self, place: int) -> None:
        self._instances.pop(place, None)
        self._forget()

    def matches(self, changes: list[Change], get: HoldersAt, packed: bytes) -> tuple[InstanceMatch, ...]:
        """Longest first, then by name. `changes` as found along `packed`; where they are none of a chain, it
        is looked at block by block, with `get`."""
        found = self._of_chain(changes)
        if found is None:
            found = self._of_anything(all_changes(get, unpack(packed)))
        return tuple(found)

    def _of_chain(self, changes: list[Change]) -> list[InstanceMatch] | None:
        """None where a place holds more again, or in a faster tier, which along a chain cannot be."""
        found: list[InstanceMatch] = []
        in_runs: dict[int, tuple[Runs, int]] = {}
        """Of places that go on in a slower tier: the runs before, and where this one began."""
        known = self._steps_of_endings.get
        for block, before, after in changes:
            step = known(before ^ after) or self._step_of_endings(before ^ after)
            if after & step.mask:
                slowing = self._step(before, after)
                if slowing is None:
                    return None
                step = slowing
                for place, code in step.slowed:
                    runs, since = in_runs.get(place, ((), 0))
                    in_runs[place] = (*runs, (code, block - since)), block
            if in_runs:
                found += [self._match_in_runs(ending, block, in_runs) for ending in step.ended]
                continue
            for ending in step.ended:
                match = ending.matches.get(block)
                if match is None:
                    match = ending.matches[block] = self._new(ending, ((ending.code, block),))
                found.append(match)
        found.reverse()
        return found

    def _match_in_runs(
        self, ending: _Ending, block: int, in_runs: dict[int, tuple[Runs, int]]
    ) -> InstanceMatch:
        runs, since = in_runs.get(ending.place, ((), 0))
        runs = (*runs, (ending.code, block - since))
        match = ending.matches_in_runs.get(runs)
        if match is None:
            match = ending.matches_in_runs[runs] = self._new(ending, runs)
        return match

    def _new(self, ending: _Ending, runs: Runs) -> InstanceMatch:
        if self._matches_kept >= MATCHES_MAX:
            for other in self._endings.values():
                other.matches.clear()
                other.matches_in_runs.clear()
            self._matches_kept = 0
        self._matches_kept += 1
        return _match(ending.instance, runs)

    def _step_of_endings(self, difference: int) -> _Step:
        """If every place in `difference` has there what it had before, and nothing after."""
        codes = {place: code for place, code in places(difference) if place in self._instances}
        step = _Step(_mask(codes), self._ended(codes))
        if len(self._steps_of_endings) >= STEPS_MAX:
            self._steps_of_endings.clear()
        self._steps_of_endings[difference] = step
        return step

    def _step(self, before: int, after: int) -> _Step | None:
        """None where a place holds more after than before."""
        step = self._steps.get((before, after))
        if step is None:
            changed = [place for place, _ in places(before ^ after) if place in self._instances]
            codes = {place: (code_at(before, place), code_at(after, place)) for place in changed}
            if any(new > old for old, new in codes.values()):
                return None
            ended = self._ended({place: old for place, (old, new) in codes.items() if not new})
            slowed = tuple((place, old) for place, (old, new) in codes.items() if new)
            step = _Step(_mask(changed), ended, slowed)
            if len(self._steps) >= STEPS_MAX:
                self._steps.clear()
            self._steps[before, after] = step
        return step

    def _ended(self, codes: Mapping[int, int]) -> tuple[_Ending, ...]:
        endings = [
            self._endings.setdefault((place, code), _Ending(place, self._instances[place], code))
            for place, code in codes.items()
        ]
        endings.sort(key=lambda ending: ending.instance, reverse=True)
        return tuple(endings)

    def _of_anything(self, changes: list[Change]) -> list[InstanceMatch]:
        """For any changes: a place counts from the first block on until it lacks one."""
        in_runs: dict[int, tuple[Runs, int]] = {}
        if changes:
            in_runs = {place: ((), 0) for place, _ in places(changes[0][1]) if place in self._instances}
        found: list[InstanceMatch] = []
        for block, before, after in changes:
            for place, _ in places(before ^ after):
                if place in in_runs:
                    runs, since = in_runs.pop(place)
                    runs = (*runs, (code_at(before, place), block - since))
                    if code_at(after, place):
                        in_runs[place] = runs, block
                    else:
                        found.append(_match(self._instances[place], runs))
        found.sort(key=lambda match: (-match.prefix_blocks, match.instance))
        return found

    def _forget(self) -> None:
        self._steps_of_endings.clear()
        self._steps.clear()
        self._endings.clear()
        self._matches_kept = 0


def _match(instance: InstanceId, runs: Runs) -> InstanceMatch:
    if len(runs) == 1:
        ((code, blocks),) = runs
        return InstanceMatch(instance, blocks, (TierRun(TIER_OF[code], blocks),))
    tier_runs = tuple(TierRun(TIER_OF[code], blocks) for code, blocks in runs)
    return InstanceMatch(instance, sum(blocks for _, blocks in runs), tier_runs)


def _mask(changed: Iterable[int]) -> int:
    return sum(PLACE_MASK << PLACE_BITS * place for place in changed)
