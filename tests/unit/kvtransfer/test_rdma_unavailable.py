"""A machine without pyverbs, or without a device: the transport says what is missing, others go on."""

import asyncio
import sys

import pytest

from kvtransfer import Endpoint, TransportKind, TransportUnavailable

pytestmark = pytest.mark.unit

SECRET = b"the secret that this cluster has"


def without_pyverbs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it was not installed: None in sys.modules makes an import fail."""
    for name in [name for name in sys.modules if name.startswith(("pyverbs", "kvtransfer.rdma."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyverbs", None)


async def test_without_pyverbs_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    without_pyverbs(monkeypatch)
    alone = Endpoint("alone", SECRET, transports=[TransportKind.RDMA])
    with pytest.raises(TransportUnavailable, match="pyverbs"):
        await alone.start()
    both = Endpoint("both", SECRET, transports=[TransportKind.RDMA, TransportKind.TCP])
    await both.start()
    assert "pyverbs" in both.unavailable[TransportKind.RDMA]
    assert '"rdma"' not in both.descriptor()
    await both.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}
