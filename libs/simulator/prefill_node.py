"""The prefill side of an instance: queue, reservation at decode, prefix, compute, handover (DESIGN §3, 5-8).

KV goes to decode layer by layer while the next layer computes: of a part of a prompt, all layers but the last
are sent, as they come, while it is computed. Of the pool's blocks only those of prompts are known: what an
answer adds has no id in a trace. Messages go by name: who was gone when one came was not there to take it.
"""

from collections.abc import Mapping
from functools import partial
from math import inf

from kvindex.core import InstanceId
from policy.core import Placement
from policy.evict import BlockUse
from simulator.decode_node import DecodeDuty
from simulator.events import Events
from simulator.life import Lives
from simulator.links import Links
from simulator.node import Node, Prefilling
from simulator.prefill_job import PrefillJob
from simulator.prefix_reads import PrefixReads
from simulator.request import SimulatedRequest


class PrefillDuty:
    def __init__(
        self,
        node: Node,
        nodes: Mapping[InstanceId, Node],
        decodes: Mapping[InstanceId, DecodeDuty],
        events: Events,
        links: Links,
        ssds: Links,
        lives: Lives,
        message_s: float,
    ) -> None:
        """`nodes` and `decodes` are those that are there at any time."""
        self._node = node
        self._nodes = nodes
        self._decodes = decodes
        self._events = events
        self._links = links
        self._lives = lives
        self._message_s = message_s
        self._reads = PrefixReads(node, nodes, events, links, ssds, self._compute)

    def submit(self, request: SimulatedRequest, placement: Placement) -> None:
        node = self._node
        if len(node.queued) >= node.shape.queue_requests_max:
            self._lives.refused(request, placement.attempt, node.instance)
            return
        node.teller.before_change()
        node.queued.append(Prefilling(request, placement, placement.prefix_blocks))
        self.take_next()

    def drop(self, request: SimulatedRequest, attempt: int) -> bool:
        """Nobody wants that attempt any more. False where it is not here (any more)."""
        node = self._node
        here = (*node.active, *node.queued)
        for prefilling in here:
            if prefilling.request is request and prefilling.placement.attempt == attempt:
                self._drop(prefilling)
                return True
        return False

    def take_next(self) -> None:
        """First come, first served, while blocks last."""
        node = self._node
        while node.queued and len(node.active) < node.shape.prefill_requests_max:
            prefilling = node.queued[0]
            local = prefilling.decode == node.instance
            input_tokens, memory = prefilling.request.input_tokens, node.memory
            blocks = memory.reserved_blocks(input_tokens) if local else memory.blocks_of(input_tokens)
            if (
                blocks > memory.free
                or node.engine.waits_for_blocks
                or (local and node.holding >= node.shape.batch_requests_max)
            ):
                return
            node.teller.before_change()
            node.active.append(node.queued.popleft())
            memory.take(blocks)
            prefilling.blocks = blocks
            if local:
                node.holding += 1
                self._reads.bring(prefilling)
            else:
                self._events.after(self._message_s, partial(self._reserve, prefilling))

    def _reserve(self, prefilling: Prefilling) -> None:
        """At decode. It takes no attempt that was given up: its gateway has cancelled it there too."""
        decode, request = self._decodes.get(prefilling.decode), prefilling.request
        held_blocks = None
        if decode is not None and prefilling.placement.attempt == request.attempt:
            held_blocks = decode.reserve(request)
        if held_blocks is None:
            self._events.after(self._message_s, partial(self._refused, prefilling))
        else:
            prefilling.held_blocks = held_blocks
            self._events.after(self._message_s, partial(self._reserved, prefilling))

    def _refused(self, prefilling: Prefilling) -> None:
        if self._wanted(prefilling):
            self._drop(prefilling)
            self._lives.refused(prefilling.request, prefilling.placement.attempt, prefilling.decode)

    def _reserved(self, prefilling: Prefilling) -> None:
        if self._wanted(prefilling):
            self._reads.bring(prefilling)

    def _compute(self, prefilling: Prefilling) -> None:
        node, request = self._node, prefilling.request
        prefix_tokens = prefilling.prefix_blocks * request.block_tokens
        if not request.losses:
            request.cached_tokens = prefix_tokens
        node.cached_tokens += prefix_tokens
        prefilling.job = PrefillJob(
            request,
            new_tokens=request.input_tokens - prefix_tokens,
            prefix_tokens=prefix_tokens,
            load_s=prefilling.own_blocks * node.block_bytes / node.shape.host_bytes_per_s,
            done=partial(self._computed, prefilling),
        )
        if prefilling.decode != node.instance and request.output_tokens_left > 1:
            prefilling.job.part_began = partial(self._send_part, prefilling)
            prefilling.job.part_done = partial(self._part_computed, prefilling)
        node.engine.add_prefill(prefilling.job)

    def _send_part(self, prefilling: Prefilling, tokens: int, duration_s: float) -> None:
        """What decode lacks of it, and with the first part also of the prefix."""
        node, job = self._node, prefilling.job
        assert job is not None
        first = job.prefix_tokens
        flow = prefilling.flow
        if flow is None:
            decode = self._nodes.get(prefilling.decode)
            if decode is None:
                return
            flow = prefilling.flow = self._links.open(node.number, decode.number)
            first = 0
        held_tokens = prefilling.held_blocks * prefilling.request.block_tokens
        sent_tokens = max(0, job.prefix_tokens + tokens - max(first, held_tokens))
        sent_bytes = float(sent_tokens * node.shape.kv_bytes_per_token)
        layers = node.shape.layers
        with_compute_bytes = sent_bytes * (layers - 1) / layers
        rate = with_compute_bytes / duration_s if duration_s > 0.0 and with_compute_bytes > 0.0 else inf
        self._links.feed(flow, sent_bytes, rate)

    def _part_computed(self, prefilling: Prefilling) -> None:
        job = prefilling.job
        if job is not None and job.new_tokens and prefilling.flow is not None:
            self._links.feed(prefilling.flow, 0.0, inf)

    def _computed(self, prefilling: Prefilling) -> None:
        """A token is sampled, which nobody takes of an attempt that was given up. What was computed stays in
        the pool."""
        node, request = self._node, prefilling.request
        if prefilling.placement.attempt != request.attempt:
            return
        new_tokens = request.input_tokens - prefilling.prefix_blocks * request.block_tokens
        node.prefilled_tokens += new_tokens
        request.recomputed_tokens += new_tokens if request.losses else 0
        node.pool.use(request.block_ids, BlockUse(request.priority))
        self._release_own(prefilling)
        request.token_sampled(self._events.now_s)
        local = prefilling.decode == node.instance
        if request.output_tokens_left == 1:
            if local:
                node.holding -= 1
                node.end(request, request.attempt, request.output_tokens)
            else:
                release = partial(self._release_at_decode, prefilling)
                self._events.after(self._message_s, release)
            self._lives.finished(request)
            self._leave(prefilling)
        elif local:
            blocks, prefilling.blocks = prefilling.blocks, 0
            self._decodes[node.instance].decode(request, blocks)
            self._leave(prefilling)
        elif prefilling.flow is not None:
            self._links.close(prefilling.flow, partial(self._handed_over, prefilling))

    def _release_at_decode(self, prefilling: Prefilling) -> None:
        decode, request = self._decodes.get(prefilling.decode), prefilling.request
        if decode is not None:
            decode.release(request, prefilling.placement.attempt, request.output_tokens)

    def _handed_over(self, prefilling: Prefilling) -> None:
        self._leave(prefilling)
        self._events.after(self._message_s, partial(self._commit, prefilling))

    def _commit(self, prefilling: Prefilling) -> None:
        """At decode, which may not be there, or be another process that knows nothing of it."""
        decode, request, attempt = (
            self._decodes.get(prefilling.decode),
            prefilling.request,
            prefilling.placement.attempt,
        )
        if attempt == request.attempt and (decode is None or not decode.commit(request)):
            failed = partial(self._lives.lost, request, attempt, prefilling.decode)
            self._events.after(self._message_s, failed)

    def _drop(self, prefilling: Prefilling) -> None:
        node = self._node
        node.teller.before_change()
        prefilling.dropped = True
        if prefilling.flow is not None:
            self._links.cancel(prefilling.flow)
        if prefilling.job is not None:
            node.engine.drop(prefilling.job)
        self._release_own(prefilling)
        node.end(prefilling.request, prefilling.placement.attempt, None)
        if prefilling in node.active:
            self._leave(prefilling)
        else:
            node.queued.remove(prefilling)

    def _release_own(self, prefilling: Prefilling) -> None:
        own, prefilling.own = prefilling.own, None
        if own is not None:
            self._node.pool.release(own)

    def _leave(self, prefilling: Prefilling) -> None:
        node = self._node
        node.teller.before_change()
        node.active.remove(prefilling)
        node.memory.give(prefilling.blocks)
        node.engine.wake()
        self.take_next()

    def _wanted(self, prefilling: Prefilling) -> bool:
        return self._node.alive and not prefilling.dropped
