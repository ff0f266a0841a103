"""What a request must fulfil before an instance touches it: pure checks that name field and limit."""

import math
from dataclasses import dataclass

from cluster.messages import TOKEN_ID_BYTES, Commit, RefusalReason, Work
from kvhash import BLOCK_TOKENS
from policy.sampling_limits import LOGPROBS_MAX, sampling_problem
from protocol.parts import PartBuffer, PartsError


class WorkError(ValueError):
    """This instance cannot do the work; the message names the field and the limit."""

    def __init__(self, reason: RefusalReason, detail: str, retry_after_s: float = 0.0) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class WorkLimits:
    """What this instance's model and pool can hold."""

    fingerprint: str
    vocab_size: int
    context_tokens_max: int
    blocks: int


def checked_prompt(work: Work, parts: PartBuffer, limits: WorkLimits) -> bytes:
    """The prompt's token ids, whether they came with `work` or in parts before it. Raises WorkError."""
    try:
        prompt_token_ids = parts.prompt_of(work)
    except PartsError as error:
        raise _bad(str(error)) from error
    _check_work(work, prompt_token_ids, limits)
    return prompt_token_ids


def _check_work(work: Work, prompt_token_ids: bytes, limits: WorkLimits) -> None:
    """Raises WorkError where `work` is malformed or does not fit."""
    if work.fingerprint != limits.fingerprint:
        raise WorkError(RefusalReason.WRONG_MODEL, f"fingerprint is {work.fingerprint[:64]!r}, not ours")
    if work.attempt < 0:
        raise _bad(f"attempt is {work.attempt}, must be at least 0")
    if not (math.isfinite(work.deadline_s) and work.deadline_s > 0):
        raise _bad(f"deadline_s is {work.deadline_s}, must be a positive number")
    if work.prompt_tokens < 1 or len(prompt_token_ids) != work.prompt_tokens * TOKEN_ID_BYTES:
        raise _bad(
            f"prompt_tokens is {work.prompt_tokens}, prompt_token_ids has {len(prompt_token_ids)} bytes"
        )
    if len(work.output_token_ids) % TOKEN_ID_BYTES:
        raise _bad(f"output_token_ids has {len(work.output_token_ids)} bytes, not a multiple of 4")
    _check_sampling(work, limits.vocab_size)
    _check_size(work, limits)
    _check_samples(work, limits)
    _check_token_ids("prompt_token_ids", prompt_token_ids, limits.vocab_size)
    _check_token_ids("output_token_ids", work.output_token_ids, limits.vocab_size)


def check_commit(commit: Commit, limits: WorkLimits) -> None:
    """Raises WorkError for a first token that is none: it would fail the steps of all who decode here; and
    for what no gateway could tell a client of it."""
    if not 0 <= commit.first_token_id < limits.vocab_size:
        raise _bad(f"first_token_id is {commit.first_token_id}, must be 0 to {limits.vocab_size - 1}")
    if not 0 <= commit.cached_tokens <= limits.context_tokens_max:
        raise _bad(f"cached_tokens is {commit.cached_tokens}, must be 0 to {limits.context_tokens_max}")
    logprobs = commit.first_token_logprobs
    if logprobs is not None and len(logprobs.top) > LOGPROBS_MAX:
        raise _bad(f"first_token_logprobs.top has {len(logprobs.top)} entries, at most {LOGPROBS_MAX}")
    if logprobs is not None and not all(0 <= token_id < limits.vocab_size for token_id, _ in logprobs.top):
        raise _bad(f"first_token_logprobs.top names a token outside 0 to {limits.vocab_size - 1}")


def _check_sampling(work: Work, vocab_size: int) -> None:
    sampling = work.sampling
    output_tokens = len(work.output_token_ids) // TOKEN_ID_BYTES
    if sampling.output_tokens_max <= output_tokens:
        raise _bad(
            f"sampling.output_tokens_max is {sampling.output_tokens_max}, must be above the "
            f"{output_tokens} tokens of output so far"
        )
    problem = sampling_problem(sampling, vocab_size)
    if problem is not None:
        raise _bad(f"sampling.{problem}")


def _check_size(work: Work, limits: WorkLimits) -> None:
    """The context's last position may be sampled but needs no KV."""
    tokens = work.prompt_tokens + len(work.output_token_ids) // TOKEN_ID_BYTES
    if tokens >= limits.context_tokens_max:
        raise _bad(f"{tokens} tokens leave no room in the context of {limits.context_tokens_max}")
    most = min(work.prompt_tokens + work.sampling.output_tokens_max, limits.context_tokens_max)
    if most // BLOCK_TOKENS + 1 > limits.blocks:
        raise WorkError(
            RefusalReason.NO_BLOCKS,
            f"{most} tokens need more than all {limits.blocks} blocks of this instance",
        )


def _check_samples(work: Work, limits: WorkLimits) -> None:
    """Each sample alone must fit (`_check_size`), and at the start all of them, with a block of their own."""
    samples = work.sampling.samples
    if samples > 1 and work.output_token_ids:
        raise _bad(
            f"output_token_ids has {len(work.output_token_ids)} bytes, must be empty where "
            f"sampling.samples is {samples}: they are drawn again from the start"
        )
    if samples > 1 and -(-work.prompt_tokens // BLOCK_TOKENS) + samples > limits.blocks:
        raise WorkError(
            RefusalReason.NO_BLOCKS,
            f"{samples} samples of {work.prompt_tokens} tokens need more than all {limits.blocks} blocks of "
            "this instance",
        )


def _check_token_ids(field: str, packed: bytes, vocab_size: int) -> None:
    if not packed:
        return
    token_ids = memoryview(packed).cast("i")
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        raise _bad(f"{field} holds {low if low < 0 else high}, must be 0 to {vocab_size - 1}")


def _bad(detail: str) -> WorkError:
    return WorkError(RefusalReason.BAD_REQUEST, detail)
