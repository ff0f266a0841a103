"""Names of the control plane's keys (DESIGN §6): the one place that spells them."""

from kvindex.core import InstanceId

PREFIX = "/moonpool/v1"

INSTANCES = f"{PREFIX}/instances/"
SEED = f"{PREFIX}/seed"
CONFIG = f"{PREFIX}/config"


def instance(instance: InstanceId) -> str:
    return f"{INSTANCES}{instance}"


def duty(name: str) -> str:
    """Who has the single-holder duty `name`."""
    return f"{PREFIX}/duty/{name}"
