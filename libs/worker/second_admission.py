"""Whether decode takes one more reservation, by its own load as it is now (DESIGN §3 step 5).

Load may have changed since the conductor placed the request. Decides nothing about blocks: whether there are
enough shows when they are taken.
"""

from cluster.messages import RefusalReason, Refused, Reserve
from policy.load_sums import decode_load
from policy.second_admission import missed_step_target
from worker.held_table import HeldTable
from worker.node import Node

HOLDS_MAX = 65_536
"""Requests remembered at once, tombstones included."""
HOLDING_PER_BATCH_MAX = 2
"""Samples of reserved and running requests, in batches: what waits for its turn already holds its blocks."""
RETRY_AFTER_S = 1.0
"""Told with a refusal for load: enough steps for some answers to end."""


def second_admission(node: Node, held: HeldTable, reserve: Reserve, *, draining: bool) -> Refused | None:
    """The refusal, or None where it is taken."""
    work = reserve.work
    reason = _refusal(node, held, work.sampling.samples, draining=draining)
    if reason is not None:
        return Refused(work.request_id, work.attempt, reason, retry_after_s=RETRY_AFTER_S)
    missed = _missed_target(node, held, reserve)
    if missed is not None:
        return Refused(work.request_id, work.attempt, RefusalReason.TBT, missed, RETRY_AFTER_S)
    return None


def _refusal(node: Node, held: HeldTable, samples: int, *, draining: bool) -> RefusalReason | None:
    if draining:
        return RefusalReason.DRAINING
    holding_max = HOLDING_PER_BATCH_MAX * node.config.batch_requests_max
    holding = sum(one.work.sampling.samples for one in held.holding() if one.work is not None)
    # One request alone is taken however many samples it wants: they take turns in the batch.
    if (holding and holding + samples > holding_max) or len(held) >= HOLDS_MAX:
        return RefusalReason.QUEUE_FULL
    if node.steps.preempted:
        # Who waits for blocks to come back goes first, or never would.
        return RefusalReason.NO_BLOCKS
    return None


def _missed_target(node: Node, held: HeldTable, reserve: Reserve) -> str | None:
    """How a step with it would miss its target. An answer that a client reads already goes on."""
    cost, work = node.cost_meter.announced, reserve.work
    if reserve.tbt_ms_max is None or cost is None or work.output_token_ids:
        return None
    present = decode_load([one.running() for one in held.holding()])
    return missed_step_target(
        cost, present, work.prompt_tokens, work.sampling.samples, reserve.tbt_ms_max / 1e3
    )
