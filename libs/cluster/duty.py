"""A duty that one process has at a time, under a lease of the control plane (DESIGN §6).

Whoever puts the duty's key first has it while it keeps the lease. It counts from when it asked for a
renewal, not from the answer, and with a margin: so it stops before the servers can give the duty to
another, also where they do not answer, and in an outage nobody acts. Sure as clocks are: a process that
was stopped between looking at `held` and acting on it acts late, so what a duty does must bear that.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from math import inf

from cluster import keys
from cluster.control import ControlPlane, Lease
from cluster.errors import DisconnectedError, LeaseLostError
from cluster.logs import Logger
from kvindex.core import InstanceId

TRIES_PER_TTL = 3
"""To take the duty, and to keep it."""
SURE_SHARE = 0.8
"""Of a lease's time, that its holder relies on."""
GIVE_BACK_S_MAX = 3.0
"""What giving the lease back may take; it ends by itself otherwise."""


class Duty:
    """One candidate for the duty `name`. For the event loop's thread."""

    def __init__(
        self, name: str, candidate: InstanceId, control: ControlPlane, log: Logger, *, ttl_s: float
    ) -> None:
        self._name = name
        self._key = keys.duty(name)
        self._candidate = candidate
        self._control = control
        self._log = log
        self._ttl_s = ttl_s
        self._lease: Lease | None = None
        self._sure_until_s = -inf

    @property
    def held(self) -> bool:
        """Whether no other process can have it now. Look at it just before you act."""
        return asyncio.get_running_loop().time() < self._sure_until_s

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Stand for the duty until cancelled, then give it back.

        `work()` runs whenever it is held, and is cancelled as soon as that is not sure any more: it must end
        at once then. Where it ends by itself the duty is given back for others to take.
        """
        try:
            while True:
                try:
                    if await self._taken():
                        await self._hold(work)
                    await self._give_back()
                except (DisconnectedError, LeaseLostError) as error:
                    self._log.info("duty not taken", duty=self._name, error=error)
                except Exception as error:
                    self._log.exception("duty failed", error, duty=self._name)
                await asyncio.sleep(self._ttl_s / TRIES_PER_TTL)
        finally:
            with contextlib.suppress(DisconnectedError, TimeoutError):
                async with asyncio.timeout(GIVE_BACK_S_MAX):
                    await self._give_back()

    async def _taken(self) -> bool:
        await self._give_back()
        if await self._control.get(self._key) is not None:
            return False
        asked_s = asyncio.get_running_loop().time()
        self._lease = await self._control.grant_lease(self._ttl_s)
        # Not our name alone: an earlier try that failed halfway would look like this one.
        value = f"{self._candidate}/{secrets.token_hex(8)}".encode()
        if await self._control.put_if_absent(self._key, value, self._lease) != value:
            return False
        self._sure_from(asked_s, self._lease)
        return self.held

    async def _hold(self, work: Callable[[], Awaitable[None]]) -> None:
        assert self._lease is not None, "taken with a lease"
        self._log.info("duty taken", duty=self._name)
        keeping = asyncio.create_task(self._keep(self._lease))
        working = asyncio.ensure_future(work())
        try:
            await asyncio.wait({keeping, working}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._sure_until_s = -inf
            keeping.cancel()
            working.cancel()
            ends = await asyncio.gather(keeping, working, return_exceptions=True)
            for error in ends:
                if isinstance(error, Exception):
                    self._log.exception("duty failed", error, duty=self._name)
            self._log.info("duty ended", duty=self._name)

    async def _keep(self, lease: Lease) -> None:
        """Return when the lease is lost, or may be."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout_at(self._sure_until_s):
                    await asyncio.sleep(self._ttl_s / TRIES_PER_TTL)
                    asked_s = loop.time()
                    with contextlib.suppress(DisconnectedError):
                        if not await lease.keep_alive():
                            return
                        self._sure_from(asked_s, lease)

    async def _give_back(self) -> None:
        """Nothing where there is no lease. DisconnectedError where it may still stand."""
        if self._lease is not None:
            await self._lease.revoke()
            self._lease = None

    def _sure_from(self, asked_s: float, lease: Lease) -> None:
        self._sure_until_s = asked_s + SURE_SHARE * lease.ttl_s
