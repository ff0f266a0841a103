"""The rows of one engine step: what each sequence computes in it, as the engine and the cost model see it.

Pure, but for looking at sequences; which rows there are is `step_loop`'s.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

from engine.engine import SequenceStep
from policy.cost import StepWork
from worker.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part in the step under way: its `tokens` tokens after `context_tokens`."""

    sequence: Sequence
    tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepUnderWay:
    rows: Rows[Row]
    work: StepWork
    started_s: float

    def tokens_done(self, sequence: Sequence, expected_s: float, now_s: float) -> int:
        """Of the tokens that it computes for `sequence`, how many are thought to be done, where the whole
        takes `expected_s` and all tokens take alike; none where 0 is expected."""
        row = next((row for row in self.rows if row.sequence is sequence), None)
        if row is None or expected_s <= 0:
            return 0
        return int(row.tokens * min(1.0, (now_s - self.started_s) / expected_s))


def step_work(rows: Rows[Row]) -> StepWork:
    """As the cost model sees the step, before its tokens count as computed. Tokens that were forced are
    computed like a chunk of a prompt."""
    decodes = kv_tokens = chunk_tokens = 0
    chunk_pairs = 0.0
    for row in rows:
        context_tokens = row.sequence.context_tokens
        if row.sequence.decodes and row.tokens == 1:
            decodes += 1
            kv_tokens += context_tokens + 1
        else:
            chunk_tokens += row.tokens
            chunk_pairs += row.tokens * (context_tokens + row.tokens / 2)
    return StepWork(decodes, kv_tokens, chunk_tokens, chunk_pairs)


def engine_step(row: Row) -> SequenceStep:
    sequence = row.sequence
    end = sequence.context_tokens + row.tokens
    sampling = sequence.work.sampling if row.samples else None
    history = sequence.history() if sampling is not None and sampling.needs_history else ((), ())
    return SequenceStep(
        token_ids=tuple(sequence.token_ids[sequence.context_tokens : end]),
        context_tokens=sequence.context_tokens,
        block_ids=tuple(sequence.block_ids),
        sampling=sampling,
        output_tokens=sequence.output_tokens,
        clear_block_ids=tuple(sequence.unclear_block_ids),
        sample=sequence.sample,
        copy_blocks=tuple(sequence.copies),
        prompt_token_ids=history[0],
        output_token_ids=history[1],
        allowed=sequence.matcher.allowed if sampling is not None and sequence.matcher is not None else None,
    )
