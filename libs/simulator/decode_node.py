"""The decode side of an instance: reservations, commits, and what is kept when an answer is whole."""

from collections.abc import Callable

from policy.evict import BlockUse
from policy.load_sums import DecodeLoad
from policy.second_admission import joined_step_s
from simulator.batch import Decoding
from simulator.life import Lives
from simulator.node import Node
from simulator.node_pool import HeldPrefix
from simulator.request import SimulatedRequest


class DecodeDuty:
    def __init__(self, node: Node, lives: Lives, tbt_s_max: float, on_room: Callable[[], None]) -> None:
        self._node = node
        self._lives = lives
        self._tbt_s_max = tbt_s_max
        self._on_room = on_room
        """Called when blocks came free."""
        self._held: dict[SimulatedRequest, HeldPrefix] = {}
        """The prefix in this pool that need not be sent, kept while the request is here."""

    def reserve(self, request: SimulatedRequest) -> int | None:
        """How many blocks of its prompt are here already, or None where it is refused: second admission, as
        load may have changed since it was placed."""
        node = self._node
        blocks = node.memory.reserved_blocks(request.input_tokens)
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
        usable = request.usable_block_ids
        held_blocks = node.pool.memory_hits(usable)
        self._held[request] = node.pool.hold(usable[:held_blocks])
        return held_blocks

    def commit(self, request: SimulatedRequest) -> bool:
        """All its KV is here: it decodes from its first token on. False where nothing is reserved for it."""
        if request not in self._node.reserved:
            return False
        self._node.teller.before_change()
        self.decode(request, self._node.reserved.pop(request))
        return True

    def decode(self, request: SimulatedRequest, blocks: int) -> None:
        """Its KV is here, in so many blocks taken for it."""
        request.decoding = True
        decoding = Decoding(
            request,
            self._node.memory,
            kv_tokens=request.input_tokens,
            left=request.output_tokens_left - 1,
            blocks=blocks,
            token_at_s=request.last_token_s,
        )
        self._node.engine.add_decoding(decoding)

    def release(self, request: SimulatedRequest, attempt: int, output_tokens: int | None) -> None:
        """What is reserved for it, if anything: its first token was its last, or nobody waits for it any more
        (None)."""
        node = self._node
        if request in node.reserved:
            node.teller.before_change()
            node.memory.give(node.reserved.pop(request))
            self._leave(request, attempt, output_tokens)
            node.engine.wake()
            self._on_room()

    def finished(self, decoding: Decoding) -> None:
        """Its blocks are free again; what is cached of its prompt stays in the pool for the next turn."""
        request = decoding.request
        self._node.pool.use(request.block_ids, BlockUse(request.priority))
        self._leave(request, request.attempt, request.output_tokens)
        self._lives.finished(request)
        self._on_room()

    def _leave(self, request: SimulatedRequest, attempt: int, output_tokens: int | None) -> None:
        node = self._node
        node.end(request, attempt, output_tokens)
        node.holding -= 1
        held = self._held.pop(request, None)
        if held is not None:
            node.pool.release(held)

    def _step_with_s(self, request: SimulatedRequest) -> float:
        node = self._node
        here = [decoding.kv_tokens for decoding, _ in node.engine.decoding(node.engine.now_s)]
        coming = [reserved.input_tokens for reserved in node.reserved]
        present = DecodeLoad(len(here) + len(coming), sum(here) + sum(coming))
        return joined_step_s(node.cost, present, request.input_tokens)
