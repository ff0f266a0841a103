"""The ways to a first token: who computes, and from whose cached prefix it starts. `policy.strategies`
chooses among them.

The cheapest way of an instance is one of three: compute everything; start from its own prefix; bring up its
own prefix and read what comes after it from one other instance, of any role and any tier. A prefix is
used as far as a tier reaches, never less: inside a tier each further block costs the same to move and
saves a little more than the one before, since later tokens attend to more; so the time is least at an
end of it. Where not even a whole tier pays, it is left out: that is where moving and computing break even.

All prefills are looked at in one go, column by column: a prefix to start from is a row of numbers, one for
each prefill, and the cheapest way is the least in each column.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from kvindex.core import InstanceId
from policy.choice import PlacementLimits, turn_of
from policy.columns import Bools, Floats, Ints, PrefillColumns, Table
from policy.core import ScheduleRequest
from policy.cost import prefill_s, ssd_read_s, transfer_s
from policy.predict import Outlook, PrefillBacklog
from policy.prefixes import HeldPrefixes, Source, sources_of
from policy.view import ClusterView, InstanceView


@dataclass(frozen=True, slots=True)
class PrefillCandidate:
    """One way to the first token: who computes, and whose cached prefix it starts from."""

    instance: InstanceView
    backlog: PrefillBacklog
    source: InstanceId | None
    """The instance itself where it needs nobody else's blocks."""
    prefix_blocks: int
    """Its own blocks and the source's together."""
    fetch_s: float
    """Time to bring them where it computes."""
    compute_s: float

    @property
    def ttft_s(self) -> float:
        fixed_s = self.instance.cost.first_token_fixed_s
        return self.backlog.wait_s + self.fetch_s + self.compute_s + fixed_s


@dataclass(frozen=True, slots=True)
class Ways:
    """One way to the first token for each of some prefills: PrefillCandidates in columns."""

    names: Sequence[InstanceId]
    requests: Floats
    wait_s: Floats
    """Both of the backlog."""
    fetch_s: Floats
    compute_s: Floats
    fixed_s: Floats
    """What a first token takes besides."""
    prefix_blocks: Floats
    readers_of: Ints
    """Whose blocks each reads: a place in `sources`."""
    sources: Sequence[InstanceId | None]
    """None: nobody else's."""

    @property
    def ttft_s(self) -> Floats:
        return self.wait_s + self.fetch_s + self.compute_s + self.fixed_s

    def take(self, places: Ints) -> "Ways":
        return Ways(
            [self.names[place] for place in places.tolist()],
            self.requests[places],
            self.wait_s[places],
            self.fetch_s[places],
            self.compute_s[places],
            self.fixed_s[places],
            self.prefix_blocks[places],
            self.readers_of[places],
            self.sources,
        )

    def taken(self, place: int) -> "Ways":
        """With one more request like this before the one at `place`."""
        requests, wait_s = self.requests.copy(), self.wait_s.copy()
        requests[place] += 1
        wait_s[place] += self.compute_s[place]
        return replace(self, requests=requests, wait_s=wait_s)


@dataclass(frozen=True, slots=True)
class PrefillQuestion:
    """Where should `request` be prefilled? What a strategy answers with one PrefillCandidate."""

    request: ScheduleRequest
    prefills: Table[PrefillColumns]
    """At least one."""
    block_tokens: int
    wait_s: Floats
    """Of each prefill's backlog."""
    own: HeldPrefixes
    """Of each prefill, without the block of the prompt's last token: that one is always computed."""
    sources: Sequence[Source]
    """Longest prefix first, without that block too."""
    ahead: Outlook
    limits: PlacementLimits
    ttft_s_max: float
    turn: int
    """See `policy.choice.turn_of`."""
    tbt_s_max: float = inf


def prefill_question(
    prefills: Table[PrefillColumns],
    block_tokens: int,
    view: ClusterView,
    request: ScheduleRequest,
    held: HeldPrefixes,
    holders: Ints,
    ahead: Outlook,
    limits: PlacementLimits,
    ttft_s_max: float,
    tbt_s_max: float = inf,
) -> PrefillQuestion:
    """`held` by row of the board; `holders` are the rows where it is more than nothing."""
    usable = held.upto((request.prompt_tokens - 1) // block_tokens)
    return PrefillQuestion(
        request,
        prefills,
        block_tokens,
        np.maximum(0.0, prefills.columns.free_at_s - ahead.now_s),
        usable.of(prefills.rows),
        sources_of(ahead.board, request, usable, holders, limits, ahead.now_s),
        ahead,
        limits,
        ttft_s_max,
        turn_of(request.request_id, view, ahead.now_s),
        tbt_s_max,
    )


def ways_alone(question: PrefillQuestion) -> Ways:
    """The cheapest with nobody's help: compute everything, or start from its own prefix."""
    return _cheapest(question, _own_starts(question))


def ways_with(question: PrefillQuestion, looks_further: Bools | None = None) -> Ways:
    """The cheapest of all: alone, or with blocks of one other instance. `looks_further`: only for those, the
    others alone."""
    starts = _own_starts(question) + [
        _start_from(question, source, end_blocks, looks_further)
        for source in question.sources
        for end_blocks in source.ends
    ]
    return _cheapest(question, starts)


def way_at(question: PrefillQuestion, ways: Ways, place: int) -> PrefillCandidate:
    name, prefix_blocks = ways.names[place], int(ways.prefix_blocks[place])
    source = ways.sources[ways.readers_of[place]] if prefix_blocks else None
    return PrefillCandidate(
        question.ahead.board.instance(name),
        question.ahead.backlog(name),
        name if prefix_blocks and source is None else source,
        prefix_blocks,
        float(ways.fetch_s[place]),
        float(ways.compute_s[place]),
    )


@dataclass(frozen=True, slots=True)
class _Start:
    """A prefix that prefills may start from, by prefill."""

    source: InstanceId | None
    """Whose blocks are read; None: nobody else's."""
    blocks: Floats
    """In all, its own before them."""
    fetch_s: Floats
    """Infinite where this is none for it."""


def _cheapest(question: PrefillQuestion, starts: Sequence[_Start]) -> Ways:
    """Of equally fast ways the one that moves less: the first of them."""
    prefills, columns = question.prefills, question.prefills.columns
    blocks = np.array([start.blocks for start in starts])
    fetch_s = np.array([start.fetch_s for start in starts])
    prefix_tokens = blocks * question.block_tokens
    compute_s = prefill_s(columns, question.request.prompt_tokens - prefix_tokens, prefix_tokens)
    least = (fetch_s + compute_s).argmin(axis=0)
    at = (least, np.arange(len(least)))
    return Ways(
        prefills.names,
        columns.requests,
        question.wait_s,
        fetch_s[at],
        compute_s[at],
        columns.first_token_fixed_s,
        blocks[at],
        least,
        [start.source for start in starts],
    )


def _own_starts(question: PrefillQuestion) -> list[_Start]:
    """From nothing, from what it has in memory, from all that it has."""
    own, nothing = question.own, np.zeros(len(question.wait_s))
    starts = [_Start(None, nothing, nothing), _Start(None, own.memory_blocks, nothing)]
    if own.on_ssd:
        starts.append(_Start(None, own.blocks, _rise_s(question)))
    return starts


def _start_from(
    question: PrefillQuestion, source: Source, end_blocks: int, looks_further: Bools | None
) -> _Start:
    """Its own blocks and, after them, the source's up to `end_blocks`."""
    own, cost, block_bytes = question.own, source.cost, question.prefills.columns.block_bytes
    fetch_s: Floats | float = _rise_s(question) if own.on_ssd else 0.0
    if end_blocks > source.memory_blocks:
        ssd_blocks = end_blocks - np.maximum(own.blocks, source.memory_blocks)
        fetch_s = fetch_s + ssd_read_s(cost, ssd_blocks * block_bytes)
    read_blocks = end_blocks - own.blocks
    fetch_s = fetch_s + transfer_s(cost, read_blocks * block_bytes)
    useful = read_blocks > 0 if looks_further is None else looks_further & (read_blocks > 0)
    return _Start(source.name, np.full(len(read_blocks), float(end_blocks)), np.where(useful, fetch_s, inf))


def _rise_s(question: PrefillQuestion) -> Floats:
    """Time to read what each has on its own SSD."""
    own, columns = question.own, question.prefills.columns
    return ssd_read_s(columns, (own.blocks - own.memory_blocks) * columns.block_bytes)
