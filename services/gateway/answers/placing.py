"""One request to the cluster: asking a conductor for a place, submitting to prefill, resuming at decode.

Each is a question and its answer, as an event of `protocol.answer`; who asks again, and when, is decided
there.
"""

import asyncio
import random
from dataclasses import dataclass, field

from cluster import subjects
from cluster.bus import Bus
from cluster.errors import DeadlineError, DisconnectedError, MoonpoolError, NoResponderError
from cluster.messages import (
    MATCH_BLOCKS_MAX,
    TOKEN_ID_BYTES,
    Accepted,
    PromptPart,
    Refused,
    Resume,
    Submit,
    Work,
)
from cluster.tracing import TraceContext
from gateway.api.urgency import Urgency
from gateway.text_model import Prompt
from kvhash import BLOCK_TOKENS, HASH_BYTES, BlockHash, Namespace, extend
from kvindex.core import InstanceId
from policy.core import Placement, Rejection, RejectReason, RequestId, SamplingParams, ScheduleRequest
from policy.evict import slo_class
from protocol.answer import (
    AskPlacement,
    AskResume,
    NotPlaced,
    Placed,
    ResumeRefused,
    SubmitAccepted,
    SubmitRefused,
    SubmitUnanswered,
    Unscheduled,
)
from protocol.parts import split

FIRST_ANSWER_SHARE = 0.2
"""Of the time that conductors get for an answer: one that has not answered then may have died with the
question, and another one is asked. To place a request twice does no harm."""
BUSY_RETRY_AFTER_S = 1.0
RESUME_TRIES_MAX = 5
RESUME_BACKOFF_S = 0.2
BLOCK_BYTES = BLOCK_TOKENS * TOKEN_ID_BYTES


@dataclass(frozen=True, slots=True)
class Order:
    """What one client asked for, checked and tokenised: all that the cluster needs to know of it."""

    request_id: RequestId
    model: str
    fingerprint: str
    namespace: Namespace
    prompt: Prompt
    sampling: SamplingParams
    trace: TraceContext
    structure_param: str | None = None
    """What the client called `sampling.structure`."""
    urgency: Urgency = field(default_factory=Urgency)
    tenant: str = ""
    salt: str = ""
    """What `namespace` was made with beside model and cluster."""
    answers: int = 1
    """Those to this prompt that the cluster is asked for with this one."""


def schedule_request(
    order: Order, ask: AskPlacement, output_token_ids: bytes, *, waited_s: float, deadline_s: float
) -> ScheduleRequest:
    """The question for a placement; after a loss the output so far counts as prompt. Of the time to the
    first token `waited_s` is gone already."""
    ttft_ms_max = order.urgency.ttft_ms_max
    output_tokens = len(output_token_ids) // TOKEN_ID_BYTES
    return ScheduleRequest(
        request_id=order.request_id,
        attempt=ask.attempt,
        model=order.model,
        fingerprint=order.fingerprint,
        prompt_tokens=order.prompt.tokens + output_tokens,
        output_tokens_max=order.sampling.output_tokens_max - output_tokens,
        block_hashes=_all_hashes(order, output_token_ids)[: MATCH_BLOCKS_MAX * HASH_BYTES],
        deadline_s=deadline_s,
        priority=order.urgency.priority,
        ttft_ms_max=None if ttft_ms_max is None else max(0.0, ttft_ms_max - waited_s * 1e3),
        tbt_ms_max=order.urgency.tbt_ms_max,
        excluded=ask.excluded,
        resumed=ask.resumed,
        tenant=order.tenant,
        # Once it streams, the others have been let in and are orders of their own.
        samples=1 if ask.resumed else order.answers,
    )


def conductors_busy(order: Order, attempt: int) -> Rejection:
    """For a request that had no turn to ask in time: others wait for the conductors already."""
    detail = "the conductors are busy with the placements of other requests"
    return Rejection(order.request_id, attempt, RejectReason.OVERLOADED, detail, BUSY_RETRY_AFTER_S)


async def ask_placement(
    bus: Bus, question: ScheduleRequest, trace: TraceContext, timeout_s: float
) -> Placed | NotPlaced | Unscheduled:
    """The answer of a conductor, or of a standby conductor where none answers."""
    try:
        answer = await _ask_conductors(bus, question, trace, timeout_s)
    except MoonpoolError as error:
        return Unscheduled(question.attempt, f"no conductor answered: {error}")
    if not isinstance(answer, Placement | Rejection):
        return Unscheduled(question.attempt, f"a conductor answered with {type(answer).__name__}")
    if (answer.request_id, answer.attempt) != (question.request_id, question.attempt):
        # As an answer it would be out of date, and no other would ever come.
        kind = type(answer).__name__
        return Unscheduled(question.attempt, f"a conductor answered with the {kind} of another attempt")
    return Placed(answer) if isinstance(answer, Placement) else NotPlaced(answer)


async def _ask_conductors(
    bus: Bus, question: ScheduleRequest, trace: TraceContext, timeout_s: float
) -> object:
    first_s = timeout_s * FIRST_ANSWER_SHARE
    for try_s in (first_s, timeout_s - first_s):
        try:
            return await bus.request(subjects.SCHEDULE, question, timeout_s=try_s, trace=trace)
        except DeadlineError:
            continue
        except NoResponderError:
            break
    return await bus.request(subjects.SCHEDULE_STANDBY, question, timeout_s=timeout_s, trace=trace)


async def submit(
    bus: Bus,
    order: Order,
    placement: Placement,
    output_token_ids: bytes,
    *,
    gateway: InstanceId,
    deadline_s: float,
    waited_s: float,
    timeout_s: float,
) -> SubmitAccepted | SubmitRefused | SubmitUnanswered:
    """Hand the request to prefill: first the parts of a long prompt, then the submit itself. `waited_s` is
    how long ago its placement was asked for."""
    parts = split(order.prompt.token_ids)
    work = Work(
        request_id=order.request_id,
        attempt=placement.attempt,
        gateway=gateway,
        fingerprint=order.fingerprint,
        sampling=order.sampling,
        prompt_tokens=order.prompt.tokens,
        prompt_token_ids=b"" if parts else order.prompt.token_ids,
        prompt_parts=len(parts),
        output_token_ids=output_token_ids,
        deadline_s=deadline_s,
        tenant_salt=order.salt,
        tenant=order.tenant,
        priority=order.urgency.priority,
        slo=slo_class(order.urgency.ttft_ms_max, order.urgency.tbt_ms_max),
        output_tokens_expected=placement.output_tokens_expected,
    )
    messages: list[PromptPart | Submit] = [
        PromptPart(order.request_id, placement.attempt, part, len(parts), token_ids)
        for part, token_ids in enumerate(parts)
    ]
    messages.append(
        Submit(
            work,
            placement.decode,
            placement.source,
            placement.prefix_blocks,
            waited_s,
            placement.tbt_ms_max,
        )
    )
    subject = subjects.instance(placement.prefill)
    for message in messages:
        try:
            answer = await bus.request(subject, message, timeout_s=timeout_s, trace=order.trace)
        except MoonpoolError as error:
            return SubmitUnanswered(placement.attempt, f"{placement.prefill} did not answer: {error}")
        if isinstance(answer, Refused):
            return SubmitRefused(placement.attempt, answer.reason, answer.detail, answer.retry_after_s)
        if not isinstance(answer, Accepted):
            return SubmitUnanswered(
                placement.attempt, f"{placement.prefill} answered with {type(answer).__name__}"
            )
    return SubmitAccepted(placement.attempt)


async def resume(bus: Bus, order: Order, ask: AskResume, timeout_s: float) -> ResumeRefused | None:
    """Ask decode to send again what is missing; None where it will, or where it is our own bus that is
    away: its return asks again."""
    message = Resume(order.request_id, ask.attempt, 0, ask.from_index)
    subject = subjects.instance(ask.instance)
    failure = ""
    for attempt in range(RESUME_TRIES_MAX):
        if attempt:
            # After an outage the instance may come back later than we did.
            await asyncio.sleep(RESUME_BACKOFF_S * 2**attempt * random.uniform(0.5, 1.0))
        try:
            answer = await bus.request(subject, message, timeout_s=timeout_s, trace=order.trace)
        except DisconnectedError:
            return None
        except MoonpoolError as error:
            failure = str(error)
            continue
        if isinstance(answer, Accepted):
            return None
        reason = answer.detail or answer.reason if isinstance(answer, Refused) else type(answer).__name__
        return ResumeRefused(ask.attempt, ask.instance, f"{ask.instance} cannot resume: {reason}")
    return ResumeRefused(ask.attempt, ask.instance, f"{ask.instance} did not answer a resume: {failure}")


def _all_hashes(order: Order, output_token_ids: bytes) -> bytes:
    """The chain goes on behind the prompt's last full block."""
    hashes = order.prompt.block_hashes
    if not output_token_ids:
        return hashes
    parent = BlockHash(hashes[-HASH_BYTES:]) if hashes else None
    hashed_bytes = len(hashes) // HASH_BYTES * BLOCK_BYTES
    rest = order.prompt.token_ids[hashed_bytes:] + output_token_ids
    return hashes + extend(parent, order.namespace, rest)
