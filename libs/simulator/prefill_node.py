"""The prefill side of an instance: queue, reservation at decode, prefix, compute, handover (DESIGN §3, 5-8).

A prefix in the instance's own DRAM is brought up beside the compute; one of another instance is read over
the network before it. KV goes to decode layer by layer while the next layer computes: of a part of a prompt,
all layers but the last are sent, as they come, while it is computed. Of the pool's blocks only those of
prompts are known: what an answer adds has no id in a trace.
"""

from collections.abc import Mapping
from functools import partial
from math import inf

from kvindex.core import InstanceId
from policy.evict import BlockUse
from simulator.decode_node import DecodeDuty
from simulator.engine import PrefillJob
from simulator.events import Events
from simulator.life import Lives
from simulator.links import Flow, Links
from simulator.node import Node, Prefilling
from simulator.request import SimulatedRequest


class PrefillDuty:
    def __init__(
        self,
        node: Node,
        nodes: Mapping[InstanceId, Node],
        decodes: Mapping[InstanceId, DecodeDuty],
        events: Events,
        links: Links,
        lives: Lives,
        message_s: float,
    ) -> None:
        self._node = node
        self._nodes = nodes
        self._decodes = decodes
        self._events = events
        self._links = links
        self._lives = lives
        self._message_s = message_s
        self._flows: dict[SimulatedRequest, Flow] = {}

    def submit(self, request: SimulatedRequest) -> None:
        node = self._node
        placement = request.placement
        assert placement is not None
        if len(node.queued) >= node.shape.queue_requests_max:
            self._lives.refused(request, node.instance)
            return
        node.teller.before_change()
        node.queued.append(Prefilling(request, placement.decode, placement.prefix_blocks))
        self.take_next()

    def take_next(self) -> None:
        """First come, first served, while blocks last."""
        node = self._node
        while node.queued and len(node.active) < node.shape.prefill_requests_max:
            prefilling = node.queued[0]
            local = prefilling.decode == node.instance
            prompt_tokens = prefilling.request.prompt_tokens
            memory = node.memory
            blocks = memory.reserved_blocks(prompt_tokens) if local else memory.blocks_of(prompt_tokens)
            if (
                blocks > node.memory.free
                or node.engine.waits_for_blocks
                or (local and node.holding >= node.shape.batch_requests_max)
            ):
                return
            node.teller.before_change()
            node.active.append(node.queued.popleft())
            node.memory.take(blocks)
            prefilling.blocks = blocks
            if local:
                node.holding += 1
                self._bring_prefix(prefilling)
            else:
                self._events.after(self._message_s, partial(self._reserve, prefilling))

    def _reserve(self, prefilling: Prefilling) -> None:
        held_blocks = self._decodes[prefilling.decode].reserve(prefilling.request)
        if held_blocks is None:
            self._events.after(self._message_s, partial(self._refused, prefilling))
        else:
            prefilling.held_blocks = held_blocks
            self._events.after(self._message_s, partial(self._bring_prefix, prefilling))

    def _refused(self, prefilling: Prefilling) -> None:
        self._leave(prefilling)
        self._node.end(prefilling.request, None)
        self._lives.refused(prefilling.request, prefilling.decode)

    def _bring_prefix(self, prefilling: Prefilling) -> None:
        """Its own as far as it reaches; what comes after from where it was placed to be read, if it still is
        there."""
        node, request = self._node, prefilling.request
        node.teller.before_change()
        placement = request.placement
        assert placement is not None
        source = None if placement.source is None else self._nodes[placement.source]
        usable = request.usable_block_ids
        own = usable[: node.pool.hits(usable)]
        node.pool.hold(own)
        prefilling.prefix_blocks = len(own)
        if source is None or source is node:
            self._compute(prefilling, own)
            return
        placed = usable[: placement.prefix_blocks]
        found = placed[: source.pool.hits(placed)]
        if len(found) <= len(own):
            self._compute(prefilling, own)
            return
        source.pool.hold(found)
        read_bytes = (len(found) - len(own)) * node.block_bytes
        came = partial(self._prefix_came, prefilling, own, source, found)
        send = partial(self._links.send, source.number, node.number, read_bytes, came)
        self._events.after(node.cost.transfer_fixed_s, send)

    def _prefix_came(
        self, prefilling: Prefilling, own: tuple[int, ...], source: Node, found: tuple[int, ...]
    ) -> None:
        self._node.teller.before_change()
        source.pool.release(found)
        prefilling.prefix_blocks = len(found)
        self._compute(prefilling, own)

    def _compute(self, prefilling: Prefilling, own: tuple[int, ...]) -> None:
        node, request = self._node, prefilling.request
        own_bytes = len(own) * node.block_bytes
        prefix_tokens = prefilling.prefix_tokens
        request.cached_tokens = prefix_tokens
        node.cached_tokens += prefix_tokens
        prefilling.job = PrefillJob(
            request,
            new_tokens=request.prompt_tokens - prefix_tokens,
            prefix_tokens=prefix_tokens,
            load_s=own_bytes / node.shape.host_bytes_per_s,
            done=partial(self._computed, prefilling, own),
        )
        if prefilling.decode != node.instance and request.output_tokens > 1:
            prefilling.job.part_began = partial(self._send_part, prefilling)
            prefilling.job.part_done = partial(self._part_computed, prefilling.job)
        node.engine.add_prefill(prefilling.job)

    def _send_part(self, prefilling: Prefilling, tokens: int, duration_s: float) -> None:
        """What decode lacks of it, and with the first part also of the prefix."""
        node, request, job = self._node, prefilling.request, prefilling.job
        assert job is not None
        first = job.prefix_tokens
        flow = self._flows.get(request)
        if flow is None:
            flow = self._links.open(node.number, self._nodes[prefilling.decode].number)
            self._flows[request] = flow
            first = 0
        held_tokens = prefilling.held_blocks * request.block_tokens
        sent_tokens = max(0, job.prefix_tokens + tokens - max(first, held_tokens))
        sent_bytes = float(sent_tokens * node.shape.kv_bytes_per_token)
        layers = node.shape.layers
        with_compute_bytes = sent_bytes * (layers - 1) / layers
        rate = with_compute_bytes / duration_s if duration_s > 0.0 and with_compute_bytes > 0.0 else inf
        self._links.feed(flow, sent_bytes, rate)

    def _part_computed(self, job: PrefillJob) -> None:
        if job.new_tokens:
            self._links.feed(self._flows[job.request], 0.0, inf)

    def _computed(self, prefilling: Prefilling, own: tuple[int, ...]) -> None:
        """The first token is sampled. What was computed stays in the pool."""
        node, request = self._node, prefilling.request
        node.prefilled_tokens += request.prompt_tokens - request.cached_tokens
        node.pool.use(request.block_ids, node.pool.hits(request.block_ids), BlockUse(request.priority))
        node.pool.release(own)
        request.first_token_s = self._events.now_s
        local = prefilling.decode == node.instance
        if request.output_tokens == 1:
            if local:
                node.holding -= 1
                node.end(request, 1)
            else:
                release = partial(self._decodes[prefilling.decode].release, request)
                self._events.after(self._message_s, release)
            self._lives.finished(request)
            self._leave(prefilling)
        elif local:
            blocks, prefilling.blocks = prefilling.blocks, 0
            self._decodes[node.instance].decode(request, blocks)
            self._leave(prefilling)
        else:
            self._links.close(self._flows.pop(request), partial(self._handed_over, prefilling))

    def _handed_over(self, prefilling: Prefilling) -> None:
        self._leave(prefilling)
        commit = partial(self._decodes[prefilling.decode].commit, prefilling.request)
        self._events.after(self._message_s, commit)

    def _leave(self, prefilling: Prefilling) -> None:
        node = self._node
        node.teller.before_change()
        node.active.remove(prefilling)
        node.memory.give(prefilling.blocks)
        node.engine.wake()
        self.take_next()
