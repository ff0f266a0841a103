"""The placement limits as they are in force: what the process was started with, and what changed since.

The one place that puts them together; everything else asks `current` anew for each decision.
"""

from policy.choice import PlacementLimits


class PolicyLimits:
    """One event loop's; what is in force is replaced as a whole, never changed."""

    def __init__(self, base: PlacementLimits) -> None:
        self._current = base

    def current(self) -> PlacementLimits:
        """In force now; one decision uses one answer."""
        return self._current
