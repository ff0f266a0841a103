"""How limits tune themselves while requests come: from how long queues are, and from what became of answers.

Three things are tuned, each toward more requests within their targets and each back to what is configured as
soon as nothing presses:

- `work_price` and with it `compute_weight`: what a second of prefill work costs, the dual price of the queue.
  It rises while queues fill more than PRESSURE_HIGH of the target for the first token, falls below
  PRESSURE_LOW, and holds in between. Where work has a price, a request may wait the less the more it costs
  (`policy.admit`), and `joint` rather waits than computes again (`policy.strategies`).
- `target_share`: how much of a target predictions may use. It falls with each admitted request that missed,
  and recovers with those that did not, so that about MISSED_SHARE of them miss.
- `kvcache_balancing_threshold`: where requests are lost, one step up or down is tried for a while, and kept
  where more met their targets than chance explains.

Everything is frozen: a fold gives the next state, and time is an argument. Owns no I/O and no request; who
counts answers, and when, is the caller's.
"""

from dataclasses import dataclass, field, replace
from math import exp, log, sqrt

from policy.choice import PlacementLimits
from policy.view import ClusterView

PRESSURE_HIGH = 0.5
"""Queue as a share of the target, above which the price rises."""
PRESSURE_LOW = 0.2
"""Below which it falls. In between there is work for everybody, and room for a burst."""
PRICE_GAIN = 3.0
"""Of the price's logarithm, within one target's time at a pressure of one above the bound."""
PRESSED_SHARE_MAX = 0.1
NO_PRICE = 1.0
WORK_PRICE_MAX = 1000.0
COMPUTE_WEIGHT_ADDED_MAX = 1.0
TARGET_MS_MIN, TARGET_MS_MAX = 1.0, 3.6e6
"""Of a target for the first token that is learnt from: of a shorter one most is over already, and between
any two of these a quotient is a number."""
TARGET_LEARNED_SHARE = 1 / 64
"""Of the way to the latest request's target, where the cluster has none."""

MISSED_SHARE = 0.02
"""Of what was admitted, that may miss a target."""
MISS_HOLDS_BACK = 0.002
"""Of the target, with each miss."""
HELD_BACK_MAX = 0.15
HELD_BACK_HALF_LIFE_S = 30.0
"""Of what is held back, while queues are short: what is turned away for it teaches nothing."""

CLIMB_FACTOR = 2.0
"""Between two steps of a threshold."""
CLIMB_STEPS_MAX = 3
"""Up or down from what is configured."""
CLIMB_SETTLE_S = 30.0
"""What is answered so soon after a step was decided before it."""
CLIMB_ANSWERED_MIN = 300
"""Answers that a step is judged by."""
CLIMB_RESTS_MAX = 8
"""Judgements that pass after tries that failed, before the next one: 1, 2, 4 and so on."""
CLIMB_GOOD_SHARE = 0.98
"""With so many in their targets nothing is tried."""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What became of requests: each is one of the three."""

    in_targets: int = 0
    missed: int = 0
    """Admitted, and not within both targets."""
    rejected: int = 0

    @property
    def answered(self) -> int:
        return self.in_targets + self.missed + self.rejected

    def __add__(self, other: "Outcomes") -> "Outcomes":
        return Outcomes(
            self.in_targets + other.in_targets, self.missed + other.missed, self.rejected + other.rejected
        )


NO_OUTCOMES = Outcomes()


@dataclass(frozen=True, slots=True)
class Climb:
    """One threshold on a ladder: where it stands, and what was seen there."""

    steps: int = 0
    """Up from what is configured."""
    direction: int = 1
    """Of the next try, or of the one under way."""
    since_s: float | None = None
    seen: Outcomes = NO_OUTCOMES
    """Since then, once it had settled."""
    before: Outcomes | None = None
    """On the step that a try left; None while none is under way."""
    failed: int = 0
    """Tries, since one was kept."""
    rests: int = 0
    """Judgements still to pass before the next try."""


@dataclass(frozen=True, slots=True)
class Adaptation:
    work_price: float = NO_PRICE
    """How many times a request's work counts against the time that it may wait; 1: not at all."""
    pressed_at_s: float | None = None
    target_s: float | None = None
    """For the first token, as the cluster has it or requests name it; None: nobody has one."""
    held_back: float = 0.0
    """Share of the targets that predictions may not use, beside what is configured."""
    balancing: Climb = field(default_factory=Climb)


def pressure(view: ClusterView, target_s: float, now_s: float) -> float:
    """How much of the target the queues of those that prefill take up, in the mean: as the snapshots say, the
    same for every conductor that heard them."""
    view.board.move_to(view)
    queues_s = view.board.told_queues_s(now_s)
    return sum(queues_s) / len(queues_s) / target_s if queues_s else 0.0


def asked(adaptation: Adaptation, ttft_ms_max: float | None, limits: PlacementLimits) -> Adaptation:
    """A request came with this target of its own. The cluster's target goes before it: one client cannot
    set the price for all."""
    ttft_ms = ttft_ms_max if limits.ttft_ms_default is None else limits.ttft_ms_default
    if ttft_ms is None or not TARGET_MS_MIN <= ttft_ms <= TARGET_MS_MAX:
        return adaptation
    known_s, ttft_s = adaptation.target_s, ttft_ms / 1e3
    if known_s is not None and limits.ttft_ms_default is None:
        ttft_s = known_s * (ttft_s / known_s) ** TARGET_LEARNED_SHARE
    return adaptation if ttft_s == known_s else replace(adaptation, target_s=ttft_s)


def pressed(adaptation: Adaptation, view: ClusterView, now_s: float) -> Adaptation:
    """As long as the queues in the view are, they were since the last time. For the price to rise, a longer
    silence than PRESSED_SHARE_MAX of the target's time counts as that: one look says little of much time. For
    it to fall all counts, else it would outlast the traffic that it came from."""
    since_s, target_s = adaptation.pressed_at_s, adaptation.target_s
    if target_s is None:
        return adaptation
    if since_s is None:
        return replace(adaptation, pressed_at_s=now_s)
    passed_s = max(0.0, now_s - since_s)
    passed, found = passed_s / target_s, pressure(view, target_s, now_s)
    held_back = adaptation.held_back
    if found < PRESSURE_LOW:
        move = passed * (found - PRESSURE_LOW)
        held_back *= 0.5 ** (passed_s / HELD_BACK_HALF_LIFE_S)
    else:
        move = min(PRESSED_SHARE_MAX, passed) * min(1.0, max(0.0, found - PRESSURE_HIGH))
    price = adaptation.work_price * exp(PRICE_GAIN * move)
    return replace(
        adaptation,
        work_price=min(max(price, NO_PRICE), WORK_PRICE_MAX),
        held_back=held_back,
        pressed_at_s=max(now_s, since_s),
    )


def observed(adaptation: Adaptation, outcomes: Outcomes, now_s: float) -> Adaptation:
    """`outcomes` came in since the last time."""
    recovered = outcomes.in_targets * MISS_HOLDS_BACK * MISSED_SHARE / (1.0 - MISSED_SHARE)
    held_back = adaptation.held_back + outcomes.missed * MISS_HOLDS_BACK - recovered
    return replace(
        adaptation,
        held_back=min(max(held_back, 0.0), HELD_BACK_MAX),
        balancing=_climbed(adaptation.balancing, outcomes, now_s),
    )


def tuned(limits: PlacementLimits, adaptation: Adaptation) -> PlacementLimits:
    """`limits` as they are to be used; unchanged where they are fixed, or nothing presses."""
    if not limits.adaptive:
        return limits
    threshold = limits.kvcache_balancing_threshold * CLIMB_FACTOR**adaptation.balancing.steps
    return replace(
        limits,
        work_price=limits.work_price * adaptation.work_price,
        compute_weight=limits.compute_weight + min(COMPUTE_WEIGHT_ADDED_MAX, log(adaptation.work_price)),
        target_share=limits.target_share - min(adaptation.held_back, limits.target_share / 2),
        kvcache_balancing_threshold=max(1.0, threshold),
    )


def _climbed(climb: Climb, outcomes: Outcomes, now_s: float) -> Climb:
    if climb.since_s is None:
        return replace(climb, since_s=now_s)
    if now_s - climb.since_s < CLIMB_SETTLE_S:
        return climb
    seen = climb.seen + outcomes
    if seen.answered < CLIMB_ANSWERED_MIN:
        return replace(climb, seen=seen)
    anew = replace(climb, since_s=now_s, seen=NO_OUTCOMES, before=None)
    if climb.before is not None:
        if _better(seen, climb.before):
            return replace(anew, failed=0)
        rests = min(CLIMB_RESTS_MAX, 2**climb.failed)
        back, failed = climb.steps - climb.direction, min(climb.failed + 1, CLIMB_RESTS_MAX)
        return replace(anew, steps=back, direction=-climb.direction, failed=failed, rests=rests)
    if climb.rests:
        return replace(anew, rests=climb.rests - 1)
    if _share(seen) >= CLIMB_GOOD_SHARE:
        return anew
    return _stepped(climb, seen, now_s)


def _stepped(climb: Climb, seen: Outcomes, now_s: float) -> Climb:
    """A try begins; at an end of the ladder it turns."""
    direction = climb.direction
    if abs(climb.steps + direction) > CLIMB_STEPS_MAX:
        direction = -direction
    return replace(
        climb,
        steps=climb.steps + direction,
        direction=direction,
        since_s=now_s,
        seen=NO_OUTCOMES,
        before=seen,
    )


def _better(seen: Outcomes, before: Outcomes) -> bool:
    """By more than one standard error of the difference."""
    share, share_before = _share(seen), _share(before)
    variance = share * (1 - share) / seen.answered + share_before * (1 - share_before) / before.answered
    return share - share_before > sqrt(variance)


def _share(outcomes: Outcomes) -> float:
    return outcomes.in_targets / outcomes.answered
