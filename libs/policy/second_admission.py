"""Second admission: a decode's own look at the target between tokens, when it is asked for blocks (DESIGN §3
step 5). Load may have changed since the conductor placed the request.

The same for live instances and simulated ones.
"""

from policy.core import CostCoefficients
from policy.cost import step_s
from policy.details import told_s
from policy.load_sums import DecodeLoad


def joined_step_s(cost: CostCoefficients, present: DecodeLoad, kv_tokens: int, samples: int = 1) -> float:
    """Time of a step once a request of `kv_tokens` a sample has joined what runs and is reserved."""
    return step_s(cost, present.sequences + samples, present.kv_tokens + samples * kv_tokens)


def missed_step_target(
    cost: CostCoefficients, present: DecodeLoad, kv_tokens: int, samples: int, tbt_s_max: float
) -> str | None:
    """How a step with the request misses its target; None where it does not."""
    step_with_s = joined_step_s(cost, present, kv_tokens, samples)
    if step_with_s <= tbt_s_max:
        return None
    return f"{told_s(step_with_s)} between tokens predicted, wanted within {told_s(tbt_s_max)}"
