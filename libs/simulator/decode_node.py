"""The decode side of an instance: reservations, commits, and what is kept when an answer is whole."""

from collections.abc import Callable

from policy.cost import step_s
from policy.evict import BlockUse
from simulator.batch import Decoding
from simulator.life import Lives
from simulator.node import Node
from simulator.request import SimulatedRequest


class DecodeDuty:
    def __init__(self, node: Node, lives: Lives, tbt_s_max: float, on_room: Callable[[], None]) -> None:
        self._node = node
        self._lives = lives
        self._tbt_s_max = tbt_s_max
        self._on_room = on_room
        """Called when blocks came free."""
        self._held: dict[SimulatedRequest, tuple[int, ...]] = {}
        """The prefix in this pool that need not be sent, kept while the request is here."""

    def reserve(self, request: SimulatedRequest) -> int | None:
        """How many blocks of its prompt are here already, or None where it is refused: second admission, as
        load may have changed since it was placed."""
        node = self._node
        blocks = node.memory.reserved_blocks(request.prompt_tokens)
        if (
            node.holding >= node.shape.batch_requests_max
            or blocks > node.memory.free
            or node.engine.waits_for_blocks
            or self._step_with_s(request) > self._tbt_s_max
        ):
            return None
        node.teller.before_change()
        node.memory.take(blocks)
        node.holding += 1
        node.reserved[request] = blocks
        held = request.usable_block_ids
        held = held[: node.pool.hits(held)]
        node.pool.hold(held)
        self._held[request] = held
        return len(held)

    def commit(self, request: SimulatedRequest) -> None:
        """All its KV is here: it decodes from its first token on."""
        self._node.teller.before_change()
        self.decode(request, self._node.reserved.pop(request))

    def decode(self, request: SimulatedRequest, blocks: int) -> None:
        """Its KV is here, in so many blocks taken for it."""
        assert request.first_token_s is not None
        decoding = Decoding(
            request,
            self._node.memory,
            kv_tokens=request.prompt_tokens,
            left=request.output_tokens - 1,
            blocks=blocks,
            token_at_s=request.first_token_s,
        )
        self._node.engine.add_decoding(decoding)

    def release(self, request: SimulatedRequest) -> None:
        """Its first token was its last."""
        self._node.teller.before_change()
        self._node.memory.give(self._node.reserved.pop(request))
        self._leave(request, 1)
        self._node.engine.wake()
        self._on_room()

    def finished(self, decoding: Decoding) -> None:
        """Its blocks are free again; what is cached of its prompt stays in the pool for the next turn."""
        request = decoding.request
        pool = self._node.pool
        pool.use(request.block_ids, pool.hits(request.block_ids), BlockUse(request.priority))
        self._leave(request, request.output_tokens)
        self._lives.finished(request)
        self._on_room()

    def _leave(self, request: SimulatedRequest, output_tokens: int) -> None:
        self._node.end(request, output_tokens)
        self._node.holding -= 1
        self._node.pool.release(self._held.pop(request, ()))

    def _step_with_s(self, request: SimulatedRequest) -> float:
        node = self._node
        here = [decoding.kv_tokens for decoding, _ in node.engine.decoding(node.engine.now_s)]
        coming = [reserved.prompt_tokens for reserved in node.reserved]
        kv_tokens = sum(here) + sum(coming) + request.prompt_tokens
        return step_s(node.cost, len(here) + len(coming) + 1, kv_tokens)
