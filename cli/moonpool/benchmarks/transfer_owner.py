"""The other process of a transfer benchmark: memory that is granted, and what it holds in the end.

Driven by JSON lines (`line_process`): the first one starts its endpoint.
"""

import asyncio
import json
import sys
from typing import Any

from kvtransfer import Access, Endpoint, Grant, Region, TransportUnavailable, checksum
from moonpool.benchmarks.line_process import Json, own_the_output, reply
from moonpool.benchmarks.transfer_pair import BenchMemory, bench_endpoint
from moonpool.benchmarks.transfer_plan import answer


class Owner:
    """An endpoint with one region, and the grants that were asked for."""

    def __init__(self, endpoint: Endpoint, memory: BenchMemory) -> None:
        self._endpoint = endpoint
        self._memory = memory
        self._region: Region = endpoint.register(memory.buffer)
        self._grants: dict[str, Grant] = {}

    @classmethod
    async def start(cls, question: Json) -> "Owner":
        """Raises TransportUnavailable."""
        endpoint = bench_endpoint(question["name"], bytes.fromhex(question["secret"]), question["transport"])
        await endpoint.start()
        return cls(endpoint, BenchMemory.touched(question["memory_bytes"]))

    @property
    def descriptor(self) -> str:
        return self._endpoint.descriptor()

    async def close(self) -> None:
        await self._endpoint.close()

    async def answer(self, question: Json) -> Json:
        match question:
            case {"do": "grant", "peer": peer, "access": access, "ranges": ranges}:
                return {"token": self._grant(peer, Access(access), ranges)}
            case {"do": "revoke", "token": token}:
                await self._endpoint.revoke(self._grants.pop(token))
                return {}
            case {"do": "checksum", "ranges": ranges}:
                return {"checksum": await asyncio.to_thread(checksum, self._region, ranges)}
        return await asyncio.to_thread(answer, self._memory.array, question)

    def _grant(self, peer: str, access: Access, ranges: list[list[int]] | None) -> str:
        """Of the whole region where no ranges are given."""
        given = [[0, self._region.region_bytes]] if ranges is None else ranges
        grant = self._endpoint.grant(self._region, given, peer=peer, generation=1, access=access)
        self._grants[grant.token] = grant
        return grant.token


async def main() -> None:
    replies = own_the_output()
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    first: dict[str, Any] = json.loads(await lines.readline())
    try:
        owner = await Owner.start(first)
    except TransportUnavailable as error:
        reply(replies, {"unavailable": str(error)})
        return
    reply(replies, {"descriptor": owner.descriptor})
    try:
        async for line in lines:
            try:
                found = await owner.answer(json.loads(line))
            except Exception as error:
                found = {"error": repr(error)}
            reply(replies, found)
    finally:
        await owner.close()


if __name__ == "__main__":
    asyncio.run(main())
