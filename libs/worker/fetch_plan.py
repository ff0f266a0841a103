"""How much of a cached prefix is worth bringing to where it is computed on, and how long that may take."""

from dataclasses import dataclass

from kvhash import BLOCK_TOKENS
from policy.core import CostCoefficients
from policy.cost import prefill_s, ssd_read_s, transfer_s

FETCH_S_MAX = 30.0
"""Of one fetch, waiting for others who bring the same included."""
FETCH_S_MIN = 5.0
"""Granted to every fetch, however quickly its blocks could be computed."""
FETCH_PATIENCE = 2.0
"""A fetch that takes so many times as long as to compute its blocks is given up."""


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """Of a chain, as counts of leading blocks: `held_blocks` can be computed on now, up to `rise_blocks` are
    to come from the lower tiers here, from there up to `read_blocks` from the source."""

    held_blocks: int
    rise_blocks: int
    read_blocks: int

    @property
    def target_blocks(self) -> int:
        """Held when all went well."""
        return max(self.rise_blocks, self.read_blocks)

    @property
    def brings(self) -> bool:
        return self.target_blocks > self.held_blocks


def worthwhile(plan: FetchPlan, ssd_blocks: int, cost: CostCoefficients, block_bytes: int) -> FetchPlan:
    """The part of the plan by which the first token comes soonest: all of it, what rises alone, or nothing.
    `ssd_blocks` of what rises lie on SSD; what lies in memory rises for nothing that is worth counting."""
    rise_s = ssd_read_s(cost, ssd_blocks * block_bytes)
    rise_gain_s = computed_s(plan.held_blocks, plan.rise_blocks, cost) - rise_s
    rises = FetchPlan(plan.held_blocks, plan.rise_blocks, 0)
    best_gain_s, best = max((0.0, FetchPlan(plan.held_blocks, 0, 0)), (rise_gain_s, rises), key=_gain)
    if plan.read_blocks > plan.rise_blocks:
        read_s = transfer_s(cost, (plan.read_blocks - plan.rise_blocks) * block_bytes)
        gain_s = computed_s(plan.held_blocks, plan.read_blocks, cost) - rise_s - read_s
        if gain_s > best_gain_s:
            return plan
    return best


def computed_s(first_block: int, end_block: int, cost: CostCoefficients) -> float:
    """How much sooner the first token comes where these blocks need not be computed."""
    tokens = max(0, end_block - first_block) * BLOCK_TOKENS
    return prefill_s(cost, tokens, first_block * BLOCK_TOKENS) - cost.prefill_fixed_s


def patience_s(plan: FetchPlan, cost: CostCoefficients) -> float:
    """How long the fetch may take before it would have been better to compute."""
    worth_s = FETCH_PATIENCE * computed_s(plan.held_blocks, plan.target_blocks, cost)
    return min(FETCH_S_MAX, max(FETCH_S_MIN, worth_s))


def _gain(choice: tuple[float, FetchPlan]) -> float:
    return choice[0]
