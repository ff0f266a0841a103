"""What of a trace is sent, when, and how long: the plan of a replay, before anything is sent. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvhash import BLOCK_TOKENS
from simulator.trace import TRACE_BLOCK_TOKENS, TracedRequest

SCALE_MAX = float(TRACE_BLOCK_TOKENS)
"""Beyond it blocks of the trace would have no token, and different ones would be the same."""


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """`number` counts the trace's requests from 1; `due_s` counts from the first one that is to be sent."""

    number: int
    due_s: float
    block_ids: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """`requests` in the order in which they are due; `too_long` do not fit into the context: not sent."""

    requests: tuple[ScheduledRequest, ...]
    too_long: tuple[ScheduledRequest, ...]

    @property
    def window_s(self) -> float:
        """From the first request that is due to the last."""
        return self.requests[-1].due_s if self.requests else 0.0


def schedule(
    trace: Sequence[TracedRequest], *, speedup: float, scale: float, context_tokens_max: int
) -> Schedule:
    """The requests of `trace`, `speedup` times as fast, one token for `scale` tokens of the trace, but never
    none. A prompt and its answer have to fit into `context_tokens_max` together."""
    ordered = sorted(enumerate(trace, start=1), key=lambda entry: entry[1].arrived_ms)
    requests = [
        ScheduledRequest(
            number,
            traced.arrived_ms / 1e3 / speedup,
            traced.block_ids,
            max(1, _scaled(traced.input_tokens, scale)),
            max(1, _scaled(traced.output_tokens, scale)),
            traced.priority,
        )
        for number, traced in ordered
    ]
    fitting = [request for request in requests if _fits(request, context_tokens_max)]
    too_long = [request for request in requests if not _fits(request, context_tokens_max)]
    first_s = fitting[0].due_s if fitting else 0.0
    return Schedule(
        tuple(replace(request, due_s=request.due_s - first_s) for request in fitting), tuple(too_long)
    )


def block_ends(request: ScheduledRequest, scale: float) -> list[int]:
    """Where each of its blocks ends in the prompt as it is sent. All but the last end at the same place in
    every request, whatever its length: that is what makes equal blocks equal prefixes."""
    ends = [
        min(_scaled((index + 1) * TRACE_BLOCK_TOKENS, scale), request.prompt_tokens)
        for index in range(len(request.block_ids))
    ]
    ends[-1] = request.prompt_tokens
    return ends


def reusable_tokens(requests: Iterable[ScheduledRequest], scale: float) -> int:
    """Prompt tokens that an earlier request had at the same place, in whole blocks of the cluster's, all but
    the last token: what a cache that never gives up a block, and is filled at once, would find."""
    furthest: dict[int, int] = {}
    reusable = 0
    for request in requests:
        ends = block_ends(request, scale)
        seen = 0
        for block_id, end in zip(request.block_ids, ends, strict=True):
            seen = max(seen, min(end, furthest.get(block_id, 0)))
            if seen < end:
                break
        reusable += min(seen, request.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        for block_id, end in zip(request.block_ids, ends, strict=True):
            furthest[block_id] = max(end, furthest.get(block_id, 0))
    return reusable


def _fits(request: ScheduledRequest, context_tokens_max: int) -> bool:
    return request.prompt_tokens + request.output_tokens <= context_tokens_max


def _scaled(trace_tokens: int, scale: float) -> int:
    return int(trace_tokens / scale)
