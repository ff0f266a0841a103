"""In-memory bus and control plane for tests, held to the same contract suites as the real ones.

Both can be cut off and joined again, one client at a time.
"""

from cluster.testing.bus import FakeBroker, FakeBus
from cluster.testing.control import FakeControlPlane, FakeStore

__all__ = ["FakeBroker", "FakeBus", "FakeControlPlane", "FakeStore"]
