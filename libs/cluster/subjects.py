"""Names of the bus's subjects (DESIGN §5): the one place that spells them."""

from functools import lru_cache

from kvindex.core import InstanceId

PREFIX = "moonpool.v1"

SCHEDULE = f"{PREFIX}.schedule"
SCHEDULE_STANDBY = f"{PREFIX}.schedule.standby"
DECISION = f"{PREFIX}.decision"
KVMETA_MATCH = f"{PREFIX}.kvmeta.match"
KVMETA_HEAT = f"{PREFIX}.kvmeta.heat"

LOAD_ALL = f"{PREFIX}.load.*"
KV_EVENTS_ALL = f"{PREFIX}.kv.*"

CONDUCTOR_QUEUE = "conductor"
KVMETA_QUEUE = "kvmeta"
SUBJECTS_CACHED_MAX = 4096
"""Subjects whose family is remembered."""


def load(instance: InstanceId) -> str:
    return f"{PREFIX}.load.{instance}"


def kv_events(instance: InstanceId) -> str:
    return f"{PREFIX}.kv.{instance}"


def kv_inventory(instance: InstanceId) -> str:
    return f"{PREFIX}.kv_inventory.{instance}"


def instance(instance: InstanceId) -> str:
    return f"{PREFIX}.instance.{instance}"


def stream(gateway: InstanceId) -> str:
    return f"{PREFIX}.stream.{gateway}"


_FAMILIES = frozenset(
    {"schedule", "decision", "load", "kv", "kv_inventory", "kvmeta", "instance", "stream"},
)


@lru_cache(maxsize=SUBJECTS_CACHED_MAX)
def family(subject: str) -> str:
    """The kind of subject without its instance, as metrics label it: a bounded set of words."""
    word = subject.removeprefix(f"{PREFIX}.").split(".", 1)[0]
    return word if subject.startswith(f"{PREFIX}.") and word in _FAMILIES else "other"
