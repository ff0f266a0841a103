"""The decode instance that a request was placed on, as its prefill speaks to it.

Owns how a message is asked again and how long its answer may take; what follows from an answer is
`prefill_request`'s.
"""

import asyncio
from dataclasses import replace

from cluster import subjects
from cluster.errors import DisconnectedError, MoonpoolError, NoResponderError, ProtocolError
from cluster.messages import (
    Accepted,
    Commit,
    PromptPart,
    Refused,
    Release,
    Renew,
    Reserve,
    Reserved,
    Submit,
    Work,
)
from cluster.tracing import TraceContext
from kvtransfer import Peer
from protocol import parts
from worker.node import Node

ANSWER_S_MAX = 5.0
"""How long decode may take to answer a message."""
AWAY_S_MAX = 2.0
"""How long a message is offered again where nobody is there to take it."""
AWAY_PAUSE_S = 0.2
CONNECT_S_MAX = 5.0
RELEASE_TRIES_MAX = 3
"""A release nobody answers is given up after this; the reservation then ends by its time."""
DEADLINE_S_MIN = 0.001
"""A deadline travels as remaining time, which is above 0."""


class PlacedDecode:
    """Every method raises as `Bus.request` does, and ProtocolError where an answer makes no sense."""

    def __init__(self, node: Node, submit: Submit, trace: TraceContext | None) -> None:
        self._node = node
        self._work = submit.work
        self._tbt_ms_max = submit.tbt_ms_max
        self._trace = trace
        self.instance = submit.decode

    async def reserve(self, prompt: bytes, ends_at_s: float) -> Reserved | Refused:
        """Blocks for the prompt, which goes ahead in parts where it is long; all until `ends_at_s`."""
        work = await self._send_parts(prompt)
        work = replace(work, deadline_s=max(DEADLINE_S_MIN, ends_at_s - self._node.now_s()))
        reserve = Reserve(work, self._node.context.instance, self._ttl_s(), self._tbt_ms_max)
        answer = await self._ask(reserve)
        if not isinstance(answer, Reserved | Refused):
            raise ProtocolError(f"reserve was answered by {type(answer).__name__}")
        return answer

    async def connect(self) -> Peer:
        """The peer to write to. Raises TransferError as well."""
        record = self._node.context.registry.instances.get(self.instance)
        if record is None or record.transfer is None:
            raise ProtocolError("the instance is not registered with a transfer endpoint")
        return await self._node.endpoint.connect(record.transfer, timeout_s=CONNECT_S_MAX)

    async def renew(self, generation: int) -> object:
        work = self._work
        return await self._ask(Renew(work.request_id, work.attempt, generation, self._ttl_s()))

    async def commit(self, commit: Commit) -> object:
        return await self._ask(commit)

    async def release(self, generation: int) -> None:
        """Asked RELEASE_TRIES_MAX times; raises nothing."""
        work = self._work
        for _ in range(RELEASE_TRIES_MAX):
            try:
                await self._ask(Release(work.request_id, work.attempt, generation))
                return
            except MoonpoolError as error:
                self._node.context.log.info(
                    "release unanswered",
                    request_id=work.request_id,
                    attempt=work.attempt,
                    detail=str(error),
                )

    async def _send_parts(self, prompt: bytes) -> Work:
        """The work as decode gets it: without what went ahead."""
        work = self._work
        prompt_parts = parts.split(prompt)
        for index, token_ids in enumerate(prompt_parts):
            part = PromptPart(work.request_id, work.attempt, index, len(prompt_parts), token_ids)
            answer = await self._ask(part)
            if not isinstance(answer, Accepted):
                raise ProtocolError(f"part {index} of the prompt was not accepted: {answer}")
        inline = b"" if prompt_parts else prompt
        return replace(work, prompt_token_ids=inline, prompt_parts=len(prompt_parts))

    async def _ask(self, body: object) -> object:
        """Where the bus or decode is away it may be reconnecting: asked again for AWAY_S_MAX, so that one
        short outage does not use up all tries."""
        away_until_s = self._node.now_s() + AWAY_S_MAX
        trace = self._trace.child() if self._trace else None
        while True:
            try:
                return await self._node.context.bus.request(
                    subjects.instance(self.instance), body, timeout_s=ANSWER_S_MAX, trace=trace
                )
            except (DisconnectedError, NoResponderError):
                if self._node.now_s() >= away_until_s:
                    raise
            await asyncio.sleep(AWAY_PAUSE_S)

    def _ttl_s(self) -> float:
        return self._node.config.reservation_ttl_s
