"""An instance's place in the registry: put under a lease, kept, and put again when it was lost.

An outage of the control plane changes nothing here: whether the lease is gone is known only when the
servers answer again. Who was away for so long that another process has its name leaves it to that one.
"""

import asyncio
from collections.abc import Callable

from cluster import keys
from cluster.control import ControlPlane, Lease
from cluster.errors import DisconnectedError, LeaseLostError, ProtocolError
from cluster.logs import Logger
from cluster.messages import InstanceRecord
from cluster.metrics import ServiceMetrics
from cluster.wire import decode_record, encode_record

KEEP_ALIVES_PER_TTL = 3


class Registration:
    """For the event loop's thread. Registers from `start` on, until `close`."""

    def __init__(
        self,
        record: InstanceRecord,
        control: ControlPlane,
        metrics: ServiceMetrics,
        log: Logger,
        *,
        ttl_s: float,
        on_taken: Callable[[], None],
    ) -> None:
        """`on_taken()`: another process registered by the name while this one was away."""
        self._record = record
        self._control = control
        self._metrics = metrics
        self._log = log
        self._ttl_s = ttl_s
        self._on_taken = on_taken
        self._lease: Lease | None = None
        self._was_registered = False
        self._task: asyncio.Task[None] | None = None

    @property
    def registered(self) -> bool:
        """As far as is known: true through an outage, false once the lease is known to be gone."""
        return self._lease is not None

    def start(self) -> None:
        """Register, and go on trying where the control plane is away."""
        self._task = asyncio.create_task(self._keep())

    async def close(self) -> None:
        """Leave the registry now; where the control plane is away the lease ends by itself."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        lease, self._lease = self._lease, None
        self._metrics.registered.set(0)
        if lease is not None:
            try:
                await lease.revoke()
            except DisconnectedError as error:
                self._log.warning("not deregistered, the lease will end", error=error)

    async def _register(self) -> None:
        lease = await self._control.grant_lease(self._ttl_s)
        key = keys.instance(self._record.instance)
        await self._control.put(key, encode_record(self._record), lease)
        self._lease = lease
        self._was_registered = True
        self._metrics.registered.set(1)
        self._log.info("registered", ttl_s=lease.ttl_s)

    async def _keep(self) -> None:
        while True:
            try:
                if self._lease is not None and not await self._lease.keep_alive():
                    self._lost()
                if self._lease is None:
                    if self._was_registered and await self._taken():
                        self._on_taken()
                        return
                    await self._register()
            except (DisconnectedError, LeaseLostError) as error:
                self._log.warning("control plane away, registration as it was", error=error)
            except Exception as error:
                self._log.exception("registration failed", error)
            await asyncio.sleep(self._ttl_s / KEEP_ALIVES_PER_TTL)

    async def _taken(self) -> bool:
        """Whether a later process has the name by now."""
        value = await self._control.get(keys.instance(self._record.instance))
        if value is None:
            return False
        try:
            return decode_record(value, InstanceRecord).incarnation > self._record.incarnation
        except ProtocolError:
            return False

    def _lost(self) -> None:
        self._lease = None
        self._metrics.registered.set(0)
        self._metrics.lease_losses.inc()
        self._log.warning("lease lost, registering again")
