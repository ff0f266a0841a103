"""What the view says about the near future: how long prefills are busy, and what comes to each decode when.

What has to be added up for it is kept by the view's board. Times are seconds from now.
"""

from dataclasses import dataclass

from kvindex.core import InstanceId
from policy.board import Board
from policy.load_sums import DecodeLoad
from policy.second_admission import joined_step_s
from policy.view import ClusterView, InstanceView


@dataclass(frozen=True, slots=True)
class PrefillBacklog:
    """Work before a new request's first chunk."""

    requests: int = 0
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request on its way to a decode, which has reserved nothing for it yet."""

    reserves_s: float
    """When its prefill begins."""
    at_s: float
    """When its prefill is done."""
    kv_tokens: int
    samples: int
    output_tokens_expected: int | None
    blocks: int
    """Of its reservation."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """The view at one moment, as decisions read it; valid until the next one is made."""

    now_s: float
    board: Board

    @property
    def priority_max(self) -> int:
        """Of all requests that the cluster is busy with; at least 0, which is a request's that names none."""
        return self.board.priority_max

    def backlog(self, prefill: InstanceId) -> PrefillBacklog:
        queue = self.board.queue(prefill)
        return PrefillBacklog(queue.requests, max(0.0, queue.free_at_s - self.now_s))

    def load(self, decode: InstanceId) -> DecodeLoad:
        """Of a known instance, once all that is on its way there has come."""
        return self.board.load(decode)

    def arrivals(self, decode: InstanceId) -> list[Arrival]:
        return [
            Arrival(
                max(0.0, begins_s - self.now_s),
                max(0.0, done_s - self.now_s),
                request.kv_tokens,
                request.samples,
                request.output_tokens_expected,
                request.blocks,
            )
            for begins_s, done_s, request in self.board.arriving(decode)
        ]


def outlook(view: ClusterView, now_s: float) -> Outlook:
    view.board.move_to(view)
    return Outlook(now_s, view.board)


def step_with_s(instance: InstanceView, load: DecodeLoad, kv_tokens: int, samples: int = 1) -> float:
    """Time of a step at `instance` once a request of `kv_tokens` a sample has joined `load`."""
    return joined_step_s(instance.cost, load, kv_tokens, samples)


def present_load(instance: InstanceView) -> DecodeLoad:
    """Running and reserved, as its snapshot says; nothing of what is on its way."""
    return instance.sums.present


def room_blocks(instance: InstanceView, load: DecodeLoad) -> int:
    """Blocks that a further reservation can take; negative where more is on its way than fits."""
    return instance.free_blocks - load.blocks_pending
