"""Changes of holders along a prompt to what each instance holds of it: the answer of `Directory.match`.

Knows which instance has which place in the holders' integers; finds no changes itself.
"""

from dataclasses import dataclass, field

from kvhash import unpack
from kvindex.changes import Change, HoldersAt, all_changes
from kvindex.core import InstanceId, InstanceMatch, TierRun
from kvindex.holders import PLACE_BITS, PLACE_MASK, TIER_OF, places

ENDINGS_MAX = 4096
MATCHES_MAX = 16_384
"""Answers kept for one more use: to make a frozen one costs more than to find it."""


@dataclass(slots=True)
class _Ending:
    """A place whose blocks, all in one tier, come to their end."""

    instance: InstanceId
    code: int
    matches: dict[int, InstanceMatch] = field(default_factory=dict)
    """By their length."""


@dataclass(frozen=True, slots=True)
class _Endings:
    """What ends at one change: last names first, as the whole answer is turned round."""

    mask: int
    of_places: tuple[_Ending, ...]


class MatchBuilder:
    def __init__(self) -> None:
        self._instances: dict[int, InstanceId] = {}
        self._endings: dict[int, _Endings] = {}
        self._of_one: dict[tuple[int, int], _Ending] = {}
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
        found = self._of_endings(changes)
        if found is None:
            if not self._falls(changes):
                changes = all_changes(get, unpack(packed))
            found = self._of_runs(changes)
        return tuple(found)

    def _of_endings(self, changes: list[Change]) -> list[InstanceMatch] | None:
        """None where more changes than that places end."""
        found: list[InstanceMatch] = []
        known = self._endings.get
        for block, before, after in changes:
            endings = known(before ^ after)
            if endings is None:
                endings = self._endings_of(before ^ after)
            if after & endings.mask:
                return None
            for ending in endings.of_places:
                match = ending.matches.get(block)
                if match is None:
                    match = self._keep(ending, block)
                found.append(match)
        found.reverse()
        return found

    def _endings_of(self, difference: int) -> _Endings:
        """Of every place in `difference`, if it is what the places had before and nothing is there after."""
        mask, of_places = 0, []
        for place, code in places(difference):
            if place in self._instances:
                mask |= PLACE_MASK << PLACE_BITS * place
                of_places.append(self._ending(place, code))
        of_places.sort(key=lambda ending: ending.instance, reverse=True)
        endings = _Endings(mask, tuple(of_places))
        if len(self._endings) >= ENDINGS_MAX:
            self._endings.clear()
        self._endings[difference] = endings
        return endings

    def _ending(self, place: int, code: int) -> _Ending:
        ending = self._of_one.get((place, code))
        if ending is None:
            ending = self._of_one[place, code] = _Ending(self._instances[place], code)
        return ending

    def _keep(self, ending: _Ending, blocks: int) -> InstanceMatch:
        if self._matches_kept >= MATCHES_MAX:
            for other in self._of_one.values():
                other.matches.clear()
            self._matches_kept = 0
        match = InstanceMatch(ending.instance, blocks, (TierRun(TIER_OF[ending.code], blocks),))
        ending.matches[blocks] = match
        self._matches_kept += 1
        return match

    def _falls(self, changes: list[Change]) -> bool:
        """Whether every place's code only gets smaller, as along a chain it does."""
        return all(
            _code(after, place) < _code(before, place)
            for _, before, after in changes
            for place, _ in places(before ^ after)
            if place in self._instances
        )

    def _of_runs(self, changes: list[Change]) -> list[InstanceMatch]:
        """For any changes: a place counts from the first block on until it lacks one."""
        open_codes = dict(places(changes[0][1])) if changes and changes[0][0] else {}
        since = dict.fromkeys(open_codes, 0)
        runs: dict[int, list[TierRun]] = {place: [] for place in open_codes}
        lengths: dict[int, int] = {}
        for block, before, after in changes:
            for place, _ in places(before ^ after):
                code = open_codes.get(place, 0)
                if not code:
                    continue
                runs[place].append(TierRun(TIER_OF[code], block - since[place]))
                since[place] = block
                open_codes[place] = _code(after, place)
                if not open_codes[place]:
                    lengths[place] = block
        found = [
            InstanceMatch(instance, lengths[place], tuple(runs[place]))
            for place in lengths
            if (instance := self._instances.get(place)) is not None
        ]
        found.sort(key=lambda match: (-match.prefix_blocks, match.instance))
        return found

    def _forget(self) -> None:
        self._endings.clear()
        self._of_one.clear()
        self._matches_kept = 0


def _code(holders: int, place: int) -> int:
    return holders >> PLACE_BITS * place & PLACE_MASK
