"""An instance's place in the registry: put under a lease, kept, and put again when it was lost.

An outage of the control plane changes nothing here: whether the lease is gone is known only when the
servers answer again. Who was away for so long that another process has its name leaves it to that one.
Who does not fit those that are registered (`cluster.compatibility`) does not register, or leaves at once.
"""

import asyncio
import contextlib
from collections.abc import Callable

from cluster import keys
from cluster.compatibility import Mismatch, mismatch, older
from cluster.control import ControlPlane, Lease
from cluster.errors import ConfigError, DisconnectedError, LeaseLostError, ProtocolError
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
        on_refused: Callable[[ConfigError], None],
    ) -> None:
        """`on_taken()`: another process registered by the name while this one was away.
        `on_refused(why)`: those that are registered serve the same model in another way."""
        self._record = record
        self._control = control
        self._metrics = metrics
        self._log = log
        self._ttl_s = ttl_s
        self._on_taken = on_taken
        self._on_refused = on_refused
        self._lease: Lease | None = None
        self._was_registered = False
        self._compared = True
        self._task: asyncio.Task[None] | None = None

    @property
    def registered(self) -> bool:
        """As far as is known: true through an outage, false once the lease is known to be gone."""
        return self._lease is not None

    def start(self) -> None:
        """Register, and go on trying where the control plane is away."""
        self._task = asyncio.create_task(self._keep())

    def appeared(self, other: InstanceRecord) -> None:
        """The registry has `other` since now: where the two do not fit and it is the older one, we go."""
        if self.registered and older(other, self._record):
            self._refuse_over(mismatch(self._record, (other,)))

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
        self._compared = False
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
                    # Who serves already is not sent away by one that only starts, however old either is.
                    if await self._refused(by_younger=not self._was_registered):
                        return
                    await self._register()
                if not self._compared:
                    # Two that came at once saw nobody before; of the two, the younger one sees the other now.
                    if await self._refused(by_younger=False):
                        return
                    self._compared = True
            except (DisconnectedError, LeaseLostError) as error:
                self._log.warning("control plane away, registration as it was", error=error)
            except Exception as error:
                self._log.exception("registration failed", error)
            await asyncio.sleep(self._ttl_s / KEEP_ALIVES_PER_TTL)

    async def _refused(self, *, by_younger: bool) -> bool:
        """Whether it does not fit one that is registered; then that was told."""
        others = await self._others()
        if not by_younger:
            others = [other for other in others if older(other, self._record)]
        return self._refuse_over(mismatch(self._record, others))

    def _refuse_over(self, found: Mismatch | None) -> bool:
        if found is None:
            return False
        self._on_refused(ConfigError(str(found)))
        return True

    async def _others(self) -> list[InstanceRecord]:
        """All that is registered and can be read."""
        records = []
        for value in (await self._control.get_prefix(keys.INSTANCES)).values():
            with contextlib.suppress(ProtocolError):
                records.append(decode_record(value, InstanceRecord))
        return records

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
