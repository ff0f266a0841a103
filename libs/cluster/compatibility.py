"""Whether instances fit together: those that serve a model of one name must agree on what a block is.

Pure, over records. The rule is the same for everybody who looks: of two that do not agree the older process
stays, so that no two ever send each other away. Different names are different models and never compared.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cluster.messages import InstanceRecord, ModelInfo
from kvindex.core import InstanceId


@dataclass(frozen=True, slots=True)
class Mismatch:
    """What one field of `instance` says, where that of `other` says something else."""

    instance: InstanceId
    other: InstanceId
    model: str
    field: str
    value: str
    other_value: str

    def __str__(self) -> str:
        return (
            f"model {self.model!r}: {self.field} is {self.value}, but {self.other}, which is registered, has "
            f"{self.other_value}; instances of one model name exchange blocks and must agree. To change a "
            f"model, stop those that serve it first, or serve the new one under another name (--model-name)"
        )


def mismatch(record: InstanceRecord, others: Iterable[InstanceRecord]) -> Mismatch | None:
    """The first of `others` that serves the same model name in another way, and where they differ.

    A record of the instance's own name is its predecessor's and does not count.
    """
    if record.model is None:
        return None
    for other in others:
        if other.instance == record.instance or other.model is None or other.model.name != record.model.name:
            continue
        for (field, value), (_, other_value) in zip(
            _block_fields(record.model), _block_fields(other.model), strict=True
        ):
            if value != other_value:
                return Mismatch(record.instance, other.instance, record.model.name, field, value, other_value)
    return None


def older(record: InstanceRecord, other: InstanceRecord) -> bool:
    """Whether `record` stays where the two do not agree: the process that started first, or by name."""
    return (record.incarnation, record.instance) < (other.incarnation, other.instance)


def fitting(records: Mapping[InstanceId, InstanceRecord]) -> dict[InstanceId, InstanceRecord]:
    """The records without those that do not agree with an older one: a process that was refused may have
    forced its record in, or not be gone yet."""
    firsts: dict[str, InstanceRecord] = {}
    misfits = set()
    for record in sorted(records.values(), key=lambda record: (record.incarnation, record.instance)):
        if record.model is not None:
            first = firsts.setdefault(record.model.name, record)
            if mismatch(record, (first,)) is not None:
                misfits.add(record.instance)
    return {name: record for name, record in records.items() if name not in misfits}


def _block_fields(model: ModelInfo) -> tuple[tuple[str, str], ...]:
    """All that makes bytes of a block mean the same, with the likeliest reason of a difference in front:
    the fingerprint covers it too, but says nothing to a person."""
    return (
        ("dtype", model.dtype),
        ("block_tokens", str(model.block_tokens)),
        ("layers", str(model.layers)),
        ("block_bytes", str(model.block_bytes)),
        ("fingerprint", model.fingerprint),
    )
