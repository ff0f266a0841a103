"""One request's tokens and blocks on this instance, between the duties and the step loop."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from cluster.messages import Work
from kvhash import BLOCK_TOKENS, BlockHash, Namespace, block_hashes, extend, unpack
from kvpool import BlockPool
from policy.core import FinishReason, RequestId


class Owner(Protocol):
    """The duty behind a sequence; called in the event loop, at most once a step each."""

    def layer_done(self, layer: int, computed_tokens: int, last_layer: bool) -> None:
        """KV of `layer` is in the arena for all tokens before `computed_tokens`."""

    def chunk_done(self, computed_tokens: int) -> None:
        """The prompt's KV is computed before `computed_tokens`, and more is to come."""

    def token_sampled(self, token_id: int, ending: FinishReason | None) -> None:
        """One more token; with `ending` the sequence has left the loop."""

    def failed(self, detail: str) -> None:
        """The engine could not go on; the sequence has left the loop."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens (prompt + output), the blocks that hold their KV, and how far it is computed.

    `context_tokens` tokens have KV. The first `stored_blocks` blocks were offered to the pool under
    their hash. `owner` None: nobody listens any more.
    """

    work: Work
    space: Namespace
    token_ids: list[int]
    hashes: list[BlockHash]
    context_tokens_max: int
    owner: Owner | None = None
    block_ids: list[int] = field(default_factory=list)
    unclear_block_ids: list[int] = field(default_factory=list)
    context_tokens: int = 0
    stored_blocks: int = 0
    cached_tokens: int = 0
    goes_on: bool = False
    """After its first token it stays in the batch; else the owner hands it over."""
    streams_layers: bool = False

    @classmethod
    def of(cls, work: Work, prompt_token_ids: bytes, space: Namespace, context_tokens_max: int) -> "Sequence":
        """A sequence of prompt and output so far; its hashes are computed here, whatever a gateway said."""
        packed = prompt_token_ids + work.output_token_ids
        token_ids = np.frombuffer(packed, "<i4").tolist()
        return cls(work, space, token_ids, unpack(block_hashes(space, packed)), context_tokens_max)

    @property
    def request_id(self) -> RequestId:
        return self.work.request_id

    @property
    def output_tokens(self) -> int:
        return len(self.token_ids) - self.work.prompt_tokens

    @property
    def cached_prompt_tokens(self) -> int:
        """What a client is told was cached: output of earlier attempts may be as well."""
        return min(self.cached_tokens, self.work.prompt_tokens)

    @property
    def new_tokens(self) -> int:
        """Tokens without KV: 1 while decoding."""
        return len(self.token_ids) - self.context_tokens

    @property
    def decodes(self) -> bool:
        return self.goes_on and self.new_tokens == 1 and self.context_tokens > 0

    @property
    def needs_block(self) -> bool:
        return self.context_tokens == len(self.block_ids) * BLOCK_TOKENS

    @property
    def reusable_hashes(self) -> list[BlockHash]:
        """Hashes a cached prefix may cover: the last token is always computed, never in a shared block."""
        return self.hashes[: (len(self.token_ids) - 1) // BLOCK_TOKENS]

    def blocks_needed(self) -> int:
        """Blocks for the KV of all tokens so far."""
        return -(-len(self.token_ids) // BLOCK_TOKENS)

    def take_blocks(self, pool: BlockPool, spare_blocks: int = 0) -> None:
        """Pin the cached prefix and allocate the rest, plus `spare_blocks`. Raises NoBlocksError, with
        nothing held."""
        assert not self.block_ids
        cached = pool.acquire(self.reusable_hashes)
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
        """Unpin every block; the stored ones stay cached. Twice is once."""
        pool.release(self.block_ids)
        self.block_ids = []
        self.unclear_block_ids = []
        self.stored_blocks = 0
        self.context_tokens = 0

    def store_full_blocks(self, pool: BlockPool) -> None:
        """Offer blocks that became full to the pool, parents first."""
        for index in range(self.stored_blocks, self.context_tokens // BLOCK_TOKENS):
            parent = self.hashes[index - 1] if index else None
            if index == len(self.hashes):
                block_token_ids = self.token_ids[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
                self.hashes.append(BlockHash(extend(parent, self.space, block_token_ids)))
            pool.store(self.block_ids[index], self.hashes[index], parent)
        self.stored_blocks = max(self.stored_blocks, self.context_tokens // BLOCK_TOKENS)

    def append(self, token_id: int) -> FinishReason | None:
        """Take a sampled token; the reason where it ends the answer."""
        self.token_ids.append(token_id)
        sampling = self.work.sampling
        if token_id in sampling.stop_token_ids and self.output_tokens > sampling.output_tokens_min:
            return FinishReason.STOP
        if self.output_tokens >= sampling.output_tokens_max or len(self.token_ids) >= self.context_tokens_max:
            return FinishReason.LENGTH
        return None
