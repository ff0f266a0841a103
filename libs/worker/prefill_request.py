"""The life of one request at prefill: the shell around `protocol.prefill` (DESIGN §3 steps 5 to 8)."""

import asyncio
from collections.abc import Callable

import numpy as np

from cluster.errors import MoonpoolError
from cluster.messages import (
    TOKEN_ID_BYTES,
    Commit,
    FailedEntry,
    FinishEntry,
    ProgressEntry,
    RefusalReason,
    Refused,
    Reserved,
    Submit,
    TokensEntry,
)
from cluster.tracing import TraceContext, log_fields
from kvhash import BLOCK_TOKENS
from kvpool import NoBlocksError
from kvtransfer import Peer, TransferError
from policy.core import FinishReason, QueuedRequest, RequestId
from protocol import prefill
from worker.handover import Handover
from worker.node import Node
from worker.placed_decode import PlacedDecode
from worker.placed_prefix import PlacedPrefix
from worker.prefix_fetch import Fetched
from worker.sequence import Sequence


class PrefillRequest:
    """Hears its sequence as its owner. `left(request)` is called when nothing is held here any more."""

    def __init__(
        self,
        node: Node,
        submit: Submit,
        prompt: bytes,
        sequence: Sequence,
        trace: TraceContext | None,
        adopt: Callable[[Sequence, int], bool] | None,
        left: Callable[["PrefillRequest"], None],
        *,
        alone: bool,
    ) -> None:
        """`alone`: nobody was before it when it came."""
        self.sequence = sequence
        self._node = node
        self._work = submit.work
        self._trace = trace
        self._prefix = PlacedPrefix(node, sequence, submit)
        self._decode = PlacedDecode(node, submit, trace)
        self._prompt = prompt
        self._adopt = adopt
        self._left = left
        now_s = node.now_s()
        self._ends_at_s = now_s + submit.work.deadline_s
        self._asked_at_s = now_s - submit.waited_s
        self._teaches_first_token = alone
        local = submit.decode == node.context.instance
        self._state = prefill.Prefill(local=local)
        self._peer: Peer | None = None
        self._handover: Handover | None = None

    # What the duty sees.

    def is_for(self, request_id: RequestId, attempt: int) -> bool:
        return (self._work.request_id, self._work.attempt) == (request_id, attempt)

    def queued(self) -> QueuedRequest:
        """What will be brought in counts as cached, as long as that is what will be tried; what the step
        under way is thought to have done by now, as computed."""
        sequence = self.sequence
        prompt_tokens = len(sequence.token_ids)
        if sequence.output_tokens > len(self._work.output_token_ids) // TOKEN_ID_BYTES:
            context_tokens = prompt_tokens  # of which the last is the first token that was sampled
        elif sequence.block_ids:
            context_tokens = sequence.context_tokens + self._node.steps.tokens_under_way(sequence)
        else:
            plan = self._prefix.plan()
            context_tokens = max(plan.held_blocks, plan.target_blocks) * BLOCK_TOKENS
        return QueuedRequest(
            self._work.request_id,
            self._work.attempt,
            self._decode.instance,
            prompt_tokens - context_tokens,
            context_tokens,
            self._work.sampling.output_tokens_max,
            samples=self._work.sampling.samples,
            priority=self._work.priority,
            output_tokens_expected=sequence.output_tokens_expected,
        )

    def blocks_to_take(self) -> int:
        """Of the available blocks, how many this request will still take before it leaves; decoded here it
        takes one more for each further sample, when those begin."""
        further_samples = self._work.sampling.samples - 1 if self._state.local else 0
        if self.sequence.block_ids:
            return further_samples
        blocks = self.sequence.blocks_to_take(self._node.pool) - self._prefix.coming_blocks
        return max(0, blocks) + further_samples

    def take(self) -> None:
        """It is its turn."""
        self.feed(prefill.Taken(fetches=self._prefix.plan().brings))

    def time_passed(self) -> None:
        if self._node.now_s() >= self._ends_at_s:
            self.feed(prefill.CancelAsked())
        else:
            self.feed(prefill.TimePassed())

    def feed(self, event: prefill.Event) -> None:
        """One event through the machine; its effects are carried out or begun when this returns."""
        self._state, effects = prefill.step(self._state, event, self._node.now_s())
        for effect in effects:
            self._carry_out(effect)

    # What the step loop tells.

    def layer_done(self, layer: int, computed_tokens: int, last_layer: bool) -> None:
        if self._handover is not None:
            self._handover.layer_done(layer, computed_tokens, last_layer)

    def chunk_done(self, computed_tokens: int) -> None:
        work = self._work
        cached_tokens = self.sequence.cached_prompt_tokens
        self._tell(ProgressEntry(work.request_id, work.attempt, computed_tokens, cached_tokens))

    def token_sampled(self, token_id: int, ending: FinishReason | None) -> None:
        if self._teaches_first_token:
            cached_tokens = self.sequence.cached_tokens
            new_tokens = self.sequence.context_tokens - cached_tokens
            elapsed_s = self._node.now_s() - self._asked_at_s
            self._node.cost_meter.first_token(new_tokens, cached_tokens, elapsed_s)
        # With more samples the others begin now, whatever the first one's token was: decode tells that end.
        self.feed(prefill.Computed(token_id, ending if self._work.sampling.samples == 1 else None))

    def tokens_forced(self, token_ids: tuple[int, ...], ending: FinishReason | None) -> None:
        """Decode's: it follows from the first token."""

    def failed(self, detail: str) -> None:
        self.feed(prefill.Failed(detail))

    def refused(self, detail: str) -> None:
        self.feed(prefill.Failed(detail, reason=RefusalReason.BAD_REQUEST))

    # Effects.

    def _carry_out(self, effect: prefill.Effect) -> None:
        match effect:
            case prefill.AskReserve():
                self._node.spawn(self._reserve(), "reserve", self.failed)
            case prefill.Fetch():
                self._teaches_first_token = False
                bringing = self._prefix.begin(self._ends_at_s)
                self._node.spawn(self._fetch(bringing), "fetch", self.failed)
            case prefill.Compute(reserved):
                self._compute(reserved)
            case prefill.SendRenew(generation):
                self._node.spawn(self._renew(generation), "renew")
            case prefill.TellFirstToken(token_id):
                self._tell_first_token(token_id)
            case prefill.TellFinish(reason):
                work = self._work
                tokens = self.sequence.output_tokens
                self._tell(FinishEntry(work.request_id, work.attempt, 0, tokens, reason))
            case prefill.FinishHandover():
                self._node.spawn(self._finish_handover(), "handover", self.failed)
            case prefill.SendCommit(generation, first_token_id, handover):
                commit = self._commit(generation, first_token_id, handover)
                self._node.spawn(commit, "commit", self.failed)
            case prefill.CommitLocally():
                self._commit_locally()
            case prefill.SendRelease(generation):
                self._node.spawn(self._decode.release(generation), "release")
            case prefill.TellFailed(detail, at_decode, reason):
                self._node.context.log.warning("prefill failed", **self._log_fields(detail))
                culprit = self._decode.instance if at_decode else None
                work = self._work
                # What decode refuses another may take; what is wrong here is wrong everywhere.
                retryable = at_decode or reason is not RefusalReason.BAD_REQUEST
                self._tell(FailedEntry(work.request_id, work.attempt, retryable, detail, culprit, reason))
            case prefill.Free():
                self._begin_free()

    async def _fetch(self, bringing: asyncio.Task[Fetched]) -> None:
        await asyncio.wait({bringing})
        if bringing.cancelled():
            return
        error = bringing.exception()
        if error is not None:
            self._node.context.log.exception("fetch broke", error, **self._log_fields(repr(error)))
        self.feed(prefill.FetchDone())

    async def _reserve(self) -> None:
        decode = self._decode
        try:
            answer = await decode.reserve(self._prompt, self._ends_at_s)
        except MoonpoolError as error:
            self.feed(prefill.Failed(f"reserve at {decode.instance}: {error}", at_decode=True))
            return
        if isinstance(answer, Refused):
            self.feed(prefill.ReserveRefused(answer.reason, answer.detail))
            return
        try:
            self._peer = await decode.connect()
        except (MoonpoolError, TransferError) as error:
            self.feed(prefill.Failed(f"connect to {decode.instance}: {error}", at_decode=True))
            await decode.release(answer.generation)
            return
        self.feed(prefill.ReserveAccepted(answer))

    def _compute(self, reserved: Reserved | None) -> None:
        """Blocks first; then what is cached leaves at once, and what is computed as its layers are done."""
        sequence = self.sequence
        try:
            sequence.take_blocks(self._node.pool)
        except NoBlocksError as error:
            self.feed(prefill.Failed(str(error)))
            return
        finally:
            self._prefix.release()
        self._node.prefix_reused(sequence.cached_tokens)
        if reserved is not None:
            assert self._peer is not None
            self._handover = Handover(
                self._node.source, self._peer, reserved, sequence.block_ids, len(sequence.token_ids)
            )
            self._handover.send_cached(sequence.stored_blocks)
        sequence.owner = self
        sequence.streams_layers = reserved is not None
        sequence.goes_on = reserved is None
        self._node.steps.add(sequence)

    async def _renew(self, generation: int) -> None:
        try:
            answer = await self._decode.renew(generation)
        except MoonpoolError as error:
            self._node.context.log.info("renew unanswered", **self._log_fields(str(error)))
            return
        if isinstance(answer, Refused):
            self.feed(prefill.RenewRefused(f"{answer.reason} {answer.detail}"))

    def _tell_first_token(self, token_id: int) -> None:
        work = self._work
        index = self.sequence.output_tokens - 1
        packed = np.asarray([token_id], "<i4").tobytes()
        cached_tokens = self.sequence.cached_prompt_tokens
        logprobs = self.sequence.logprobs_of(index, index + 1)
        self._tell(TokensEntry(work.request_id, work.attempt, 0, index, packed, cached_tokens, logprobs))

    async def _finish_handover(self) -> None:
        assert self._handover is not None
        started_s = self._node.now_s()
        try:
            done = await self._handover.finish()
        except TransferError as error:
            self.feed(prefill.Failed(f"handover to {self._decode.instance}: {error}", at_decode=True))
            return
        self._node.metrics.handover_wait_s.observe(self._node.now_s() - started_s)
        self._node.metrics.handover_bytes.inc(done.bytes_written)
        self.feed(done)

    async def _commit(self, generation: int, first_token_id: int, handover: prefill.HandoverDone) -> None:
        work = self._work
        commit = Commit(
            work.request_id,
            work.attempt,
            generation,
            handover.blocks_written,
            handover.bytes_written,
            handover.checksum,
            first_token_id,
            self.sequence.cached_prompt_tokens,
            next(iter(self.sequence.logprobs_of(self.sequence.output_tokens - 1)), None),
        )
        try:
            answer = await self._decode.commit(commit)
        except MoonpoolError as error:
            self.feed(prefill.CommitUnanswered(str(error)))
            return
        if isinstance(answer, Refused):
            self.feed(prefill.CommitRefused(answer.reason, answer.detail))
        else:
            self.feed(prefill.CommitAccepted())

    def _commit_locally(self) -> None:
        assert self._adopt is not None, "a request was placed on itself at an instance that cannot decode"
        assert self._state.first_token_id is not None
        if self._adopt(self.sequence, self._state.first_token_id):
            self._leave()
        else:
            self._begin_free()

    def _begin_free(self) -> None:
        self._node.steps.leave(self.sequence)
        self._node.spawn(self._free(), "free")

    async def _free(self) -> None:
        """No fetch, step or write uses the blocks any more; then they go back, the full ones cached."""
        await self._prefix.end()
        await self._node.steps.remove(self.sequence)
        if self._handover is not None:
            await self._handover.abort()
        self.sequence.give_back(self._node.pool)
        self._node.pool_changed()
        self._leave()

    def _leave(self) -> None:
        assert self._state.result is not None
        self._node.metrics.prefills.labels(self._state.result).inc()
        if self._state.result is not prefill.Result.HANDED_OVER:
            finished = self._state.result is prefill.Result.FINISHED
            self._node.ended.add(self.sequence, self.sequence.output_tokens if finished else None)
        self._left(self)

    def _tell(self, entry: ProgressEntry | TokensEntry | FinishEntry | FailedEntry) -> None:
        self._node.outbox.put(self._work.gateway, entry)

    def _log_fields(self, detail: str) -> dict[str, object]:
        work = self._work
        return {
            "request_id": work.request_id,
            "attempt": work.attempt,
            "detail": detail,
            **log_fields(self._trace),
        }
