"""One request's tokens and blocks on this instance, between the duties and the step loop."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cluster.messages import TOKEN_ID_BYTES, Work
from kvhash import BLOCK_TOKENS, BlockHash, Namespace, block_hashes, extend, unpack
from kvpool import BlockPool
from policy.core import FinishReason, RequestId, TokenLogprobs
from policy.evict import BlockUse
from structures.matcher import FORCED_TOKENS_MAX, Matcher
from worker.kept_logprobs import pack_logprobs, unpack_logprobs
from worker.owner import Owner

Int32Array = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens (prompt + output), the blocks that hold their KV, and how far it is computed.

    `context_tokens` tokens have KV. The first `stored_blocks` blocks were offered to the pool under
    their hash. `owner` None: nobody listens any more. The samples of one request are a sequence each.
    """

    work: Work
    space: Namespace
    token_ids: list[int]
    hashes: list[BlockHash]
    context_tokens_max: int
    matcher: Matcher | None = None
    """Where the answer is held to a structure: the state of it after the output tokens."""
    sample: int = 0
    owner: Owner | None = None
    block_ids: list[int] = field(default_factory=list)
    """A block may be another sequence's as well: `prepare_write` gives a copy before it is written."""
    unclear_block_ids: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(from, to) of blocks that the next step copies before anything is written. What is copied from stays
    pinned until then: nobody else may be left who uses it."""
    context_tokens: int = 0
    stored_blocks: int = 0
    cached_tokens: int = 0
    ending: FinishReason | None = None
    """Why no further token follows."""
    decodes: bool = False
    """Its prompt, or what is computed again after a preemption, is behind it."""
    goes_on: bool = False
    """After its first token it stays in the batch; else the owner hands it over."""
    streams_layers: bool = False
    """Its blocks are being read from outside: what they hold does not move."""
    broken: bool = False
    """The model made nonsense of its KV: nobody shall find these blocks again."""
    arrival: int = 0
    """Its place among all that came to the step loop."""
    last_step: int = 0
    """The number of the last step it was in, or of the last before it came."""
    turn: int = 0
    """Its place among all parts of all steps, when it was last in one."""
    kept_logprobs: list[bytes | None] = field(default_factory=list)
    """Where they are wanted, packed, of each token that this attempt appended; None where it was not
    drawn."""
    _prompt: Int32Array | None = None

    @classmethod
    def of(
        cls,
        work: Work,
        prompt_token_ids: bytes,
        space: Namespace,
        context_tokens_max: int,
        matcher: Matcher | None = None,
    ) -> "Sequence":
        """A sequence of prompt and output so far; its hashes are computed here, whatever a gateway said."""
        packed = prompt_token_ids + work.output_token_ids
        token_ids = np.frombuffer(packed, "<i4").tolist()
        hashes = unpack(block_hashes(space, packed))
        return cls(work, space, token_ids, hashes, context_tokens_max, matcher)

    @property
    def request_id(self) -> RequestId:
        return self.work.request_id

    @property
    def output_tokens_expected(self) -> int | None:
        """Of the whole answer; the placement says what was to come of it then."""
        expected = self.work.output_tokens_expected
        return None if expected is None else len(self.work.output_token_ids) // TOKEN_ID_BYTES + expected

    @property
    def output_tokens(self) -> int:
        return len(self.token_ids) - self.work.prompt_tokens

    @property
    def cached_prompt_tokens(self) -> int:
        """What a client is told was cached: output of earlier attempts may be as well."""
        return min(self.cached_tokens, self.work.prompt_tokens)

    @property
    def use(self) -> BlockUse:
        """What its blocks are worth to the pool, by the request as it is now."""
        left = 0 if self.ending else self.work.sampling.output_tokens_max - self.output_tokens
        return BlockUse(self.work.priority, self.work.slo, max(0, left))

    @property
    def new_tokens(self) -> int:
        """Tokens without KV: 1 while decoding, more where tokens were forced."""
        return len(self.token_ids) - self.context_tokens

    @property
    def reusable_hashes(self) -> list[BlockHash]:
        """Hashes a cached prefix may cover: the last token is always computed, never in a shared block."""
        return self.hashes[: (len(self.token_ids) - 1) // BLOCK_TOKENS]

    def blocks_needed(self) -> int:
        """Blocks for the KV of all tokens so far."""
        return blocks_of(len(self.token_ids))

    def blocks_to_take(self, pool: BlockPool) -> int:
        """What `take_blocks` will take from those that are available, cached ones that it pins counted."""
        return self.blocks_needed() - pool.match_in_use(self.reusable_hashes)

    def take_blocks(self, pool: BlockPool, spare_blocks: int = 0) -> None:
        """Pin the cached prefix and allocate the rest, plus `spare_blocks`. Raises NoBlocksError, with
        nothing held."""
        assert not self.block_ids
        cached = pool.acquire(self.reusable_hashes, self.use)
        try:
            fresh = pool.allocate(self.blocks_needed() - len(cached) + spare_blocks)
        except Exception:
            pool.release(cached)
            raise
        self.block_ids = cached + fresh
        self.unclear_block_ids = list(fresh)
        self.stored_blocks = len(cached)
        self.context_tokens = len(cached) * BLOCK_TOKENS
        self.cached_tokens = self.context_tokens

    def give_back(self, pool: BlockPool) -> None:
        """Unpin every block; the stored ones stay cached, unless what they hold is broken. Twice is once."""
        pool.release(self.block_ids, self.use)
        self._release_copied(pool)
        if self.broken:
            pool.forget(self.block_ids)
        self.block_ids = []
        self.unclear_block_ids = []
        self.stored_blocks = 0
        self.context_tokens = 0
        self.decodes = False

    def fork(self, pool: BlockPool, sample: int, tokens: int) -> "Sequence":
        """Another sample of the first `tokens` tokens, which have KV here. It shares their blocks, the
        partly filled last one too, and computes the last token again: that is what it samples from.

        Where this sequence holds more blocks than it needs one goes along, for the copy that the first
        write will take.
        """
        assert 0 < tokens <= self.context_tokens
        shared = self.block_ids[: blocks_of(tokens)]
        pool.retain(shared)
        spare = [self.block_ids.pop()] if len(self.block_ids) > self.blocks_needed() else []
        self._keep_unclear(excluded=spare)
        return Sequence(
            self.work,
            self.space,
            self.token_ids[:tokens],
            self.hashes[: tokens // BLOCK_TOKENS],
            self.context_tokens_max,
            self.matcher and self.matcher.restarted(),
            sample=sample,
            block_ids=shared + spare,
            unclear_block_ids=spare,
            context_tokens=tokens - 1,
            stored_blocks=(tokens - 1) // BLOCK_TOKENS,
            decodes=True,
            goes_on=True,
        )

    def blocks_to_allocate(self, pool: BlockPool, tokens: int) -> int:
        """Blocks `prepare_write` will take from the pool."""
        blocks = blocks_of(self.context_tokens + tokens)
        missing = blocks - len(self.block_ids)
        shared = not self._may_write_first(pool)
        return max(0, missing + shared)

    def prepare_write(self, pool: BlockPool, tokens: int) -> None:
        """From now on the next `tokens` tokens have slots that are this sequence's alone, and it holds no
        block beyond them. Raises NoBlocksError, with nothing changed."""
        fresh = pool.allocate(self.blocks_to_allocate(pool, tokens))
        self.block_ids += fresh
        self.unclear_block_ids += fresh
        if not self._may_write_first(pool):
            index = self.context_tokens // BLOCK_TOKENS
            shared, private = self.block_ids[index], self.block_ids.pop()
            self.block_ids[index] = private
            self.copies.append((shared, private))
        self._cut(pool, blocks_of(self.context_tokens + tokens))
        # What is copied over is not cleared: that would come after the copy.
        self._keep_unclear(excluded=[private for _, private in self.copies])

    def give_back_spare(self, pool: BlockPool) -> None:
        """Unpin the blocks beyond those for the tokens so far."""
        self._cut(pool, self.blocks_needed())
        self._keep_unclear()

    def written(self, pool: BlockPool, tokens: int) -> None:
        """A step has computed `tokens` more tokens, and with them done what was to be done first."""
        self.context_tokens += tokens
        self.unclear_block_ids = []
        self._release_copied(pool)

    def restored(self, context_tokens: int) -> None:
        """The KV of the first `context_tokens` tokens was copied back into its blocks."""
        self.context_tokens = context_tokens
        self.decodes = True
        self._keep_unclear(excluded=self.block_ids[: blocks_of(context_tokens)])

    def store_full_blocks(self, pool: BlockPool) -> None:
        """Offer blocks that became full to the pool, parents first. Where another sequence was first with
        one, that one is used from now on."""
        full_blocks = self.context_tokens // BLOCK_TOKENS
        if full_blocks <= self.stored_blocks:
            return
        use = self.use
        for index in range(self.stored_blocks, full_blocks):
            parent = self.hashes[index - 1] if index else None
            if index == len(self.hashes):
                block_token_ids = self.token_ids[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
                self.hashes.append(BlockHash(extend(parent, self.space, block_token_ids)))
            if self.streams_layers:
                pool.store(self.block_ids[index], self.hashes[index], parent, use)
            else:
                self.block_ids[index] = pool.store_or_share(
                    self.block_ids[index], self.hashes[index], parent, use
                )
        self.stored_blocks = full_blocks

    def append(self, token_id: int, logprobs: TokenLogprobs | None = None) -> FinishReason | None:
        """Take a sampled or forced token; the reason where it ends the answer. Raises StructureError where
        the answer's structure does not allow it."""
        self.token_ids.append(token_id)
        sampling = self.work.sampling
        if self.matcher is not None:
            self.matcher.accept(token_id)
        if sampling.logprobs is not None:
            self.kept_logprobs.append(None if logprobs is None else pack_logprobs(logprobs))
        stops = token_id in sampling.stop_token_ids and self.output_tokens > sampling.output_tokens_min
        if stops or (self.matcher is not None and self.matcher.ended):
            self.ending = FinishReason.STOP
        elif (
            self.output_tokens >= sampling.output_tokens_max or len(self.token_ids) >= self.context_tokens_max
        ):
            self.ending = FinishReason.LENGTH
        return self.ending

    def append_forced(self) -> tuple[int, ...]:
        """Take the tokens that follow whatever the model says, so that the next step computes them at once.
        None where logprobs are wanted, which the model has to say of each, and after the end. Raises as
        `append`."""
        if self.matcher is None or self.work.sampling.logprobs is not None:
            return ()
        taken: list[int] = []
        while len(taken) < FORCED_TOKENS_MAX and (forced := self.matcher.forced()):
            for token_id in forced:
                taken.append(token_id)
                if self.append(token_id) is not None:
                    return tuple(taken)
        return tuple(taken)

    def logprobs_of(self, first_index: int, end_index: int | None = None) -> tuple[TokenLogprobs | None, ...]:
        """Of the output tokens from `first_index` up to `end_index`; none at all where none are wanted."""
        if self.work.sampling.logprobs is None:
            return ()
        kept_from = self.output_tokens - len(self.kept_logprobs)
        end_index = self.output_tokens if end_index is None else end_index
        unknown = (None,) * max(0, min(kept_from, end_index) - first_index)
        kept = self.kept_logprobs[max(0, first_index - kept_from) : max(0, end_index - kept_from)]
        return unknown + tuple(None if packed is None else unpack_logprobs(packed) for packed in kept)

    def history(self) -> tuple[Int32Array, Int32Array]:
        """Prompt and output as arrays; the prompt's is made once."""
        if self._prompt is None:
            self._prompt = np.asarray(self.token_ids[: self.work.prompt_tokens], np.int32)
        return self._prompt, np.asarray(self.token_ids[self.work.prompt_tokens :], np.int32)

    def _release_copied(self, pool: BlockPool) -> None:
        pool.release([source for source, _ in self.copies])
        self.copies = []

    def _cut(self, pool: BlockPool, blocks: int) -> None:
        pool.release(self.block_ids[blocks:])
        del self.block_ids[blocks:]

    def _keep_unclear(self, excluded: Rows[int] = ()) -> None:
        """Only blocks that are still held are to be cleared."""
        if not self.unclear_block_ids:
            return
        held = set(self.block_ids).difference(excluded)
        self.unclear_block_ids = [block_id for block_id in self.unclear_block_ids if block_id in held]

    def _may_write_first(self, pool: BlockPool) -> bool:
        """Whether the block of the next token is this sequence's alone, or not there yet."""
        index = self.context_tokens // BLOCK_TOKENS
        return index >= len(self.block_ids) or pool.writable(self.block_ids[index])


def blocks_of(tokens: int) -> int:
    """Blocks that `tokens` tokens take, the last one partly filled."""
    return -(-tokens // BLOCK_TOKENS)
