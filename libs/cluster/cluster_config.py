"""The cluster's configuration: settings that services take over while they run (DESIGN §6).

One JSON object in the control plane, `{"ttft_ms_default": 500.0, ...}`. What is set there goes before the
setting of the same name that a process was started with; what is not set leaves that one alone. Owns which
settings there are, their limits and the document; all of it is pure, `cluster.config_watch` reads and
writes it. Knows no service.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import orjson

from cluster.config import SHOWN_CHARS_MAX, Setting, hint, settings_of
from cluster.errors import ConfigError, ProtocolError
from policy.choice import AdmissionMode, Strategy

DOCUMENT_BYTES_MAX = 64 * 1024

Document = Mapping[str, object]
"""What is set, by name. It may hold settings of a newer version: they are kept, and mean nothing here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """What the cluster sets. None: each process's own setting holds."""

    strategy: str | None = field(
        default=None, metadata={"help": "how instances are chosen", "choices": tuple(Strategy)}
    )
    admission: str | None = field(
        default=None,
        metadata={"help": "what is refused before any work is done for it", "choices": tuple(AdmissionMode)},
    )
    kvcache_balancing_threshold: float | None = field(
        default=None,
        metadata={
            "help": "kvcache_centric: another's prefix counts where it is this many times the own one",
            "min": 1.0,
            "max": 1e6,
        },
    )
    ttft_ms_default: float | None = field(
        default=None,
        metadata={
            "help": "target for the first token of requests that name none; 0: no target",
            "min": 0.0,
            "max": 3.6e6,
        },
    )
    tbt_ms_default: float | None = field(
        default=None,
        metadata={
            "help": "target between tokens of requests that name none; 0: no target",
            "min": 0.0,
            "max": 60_000.0,
        },
    )
    target_share: float | None = field(
        default=None,
        metadata={
            "help": "share of the targets that predictions are held to: the rest is for what takes longer "
            "than predicted",
            "min": 0.1,
            "max": 1.0,
        },
    )
    decode_horizon_s: float | None = field(
        default=None,
        metadata={"help": "how far ahead predictive admission looks", "min": 1.0, "max": 3600.0},
    )
    adaptive: bool | None = field(
        default=None,
        metadata={"help": "thresholds and weights of the strategy tune themselves toward goodput"},
    )
    replication_requests_min: int | None = field(
        default=None,
        metadata={"help": "requests in a window that make a prefix hot", "min": 2, "max": 1_000_000},
    )
    replication_window_s: float | None = field(
        default=None, metadata={"help": "window in which requests are counted", "min": 1.0, "max": 3600.0}
    )
    replication_copies_max: int | None = field(
        default=None, metadata={"help": "instances that hold a hot prefix in the end", "min": 1, "max": 1024}
    )


SETTINGS: Mapping[str, Setting] = settings_of(ClusterConfig)
_METADATA: Mapping[str, Mapping[Any, Any]] = {one.name: one.metadata for one in fields(ClusterConfig)}


def metadata_of(name: str) -> Mapping[Any, Any]:
    """Help and limits, for the setting of the same name that a process is started with."""
    return _METADATA[name]


def parse_document(data: bytes) -> Document:
    """ProtocolError where it is no JSON object or too long; its settings are not looked at."""
    if len(data) > DOCUMENT_BYTES_MAX:
        raise ProtocolError(f"configuration: {len(data)} bytes, at most {DOCUMENT_BYTES_MAX}")
    try:
        document: object = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ProtocolError(f"configuration: no JSON: {error}") from error
    if not isinstance(document, dict):
        raise ProtocolError(f"configuration: {type(document).__name__}, must be a JSON object")
    return document


def encode_document(document: Document) -> bytes:
    return orjson.dumps(document, option=orjson.OPT_SORT_KEYS)


def config_of(document: Document) -> ClusterConfig:
    """ConfigError that names setting and limit."""
    return ClusterConfig(
        **{
            name: SETTINGS[name].check(value, name)
            for name, value in document.items()
            if name in SETTINGS and value is not None
        }
    )


def faults(document: Document) -> dict[str, str]:
    """Why a setting's value is none that it can have, by name. With one of them services pass over all of the
    document."""
    found = {}
    for name, value in document.items():
        try:
            config_of({name: value})
        except ConfigError as error:
            found[name] = str(error).removeprefix(f"{name}: ")
    return found


def with_settings(document: Document, assignments: Mapping[str, str]) -> Document:
    """The document with these settings, from text. ConfigError names the setting and its limit."""
    changed = dict(document)
    for name, text in assignments.items():
        if name not in SETTINGS:
            raise _unknown(name, SETTINGS)
        changed[name] = SETTINGS[name].parse(text, name)
    config_of(changed)
    return changed


def without_settings(document: Document, names: Iterable[str]) -> Document:
    """The document without these; what is not set may be named. ConfigError where nobody knows a name."""
    removed = set(names)
    for name in sorted(removed):
        if name not in SETTINGS and name not in document:
            raise _unknown(name, SETTINGS.keys() | document.keys())
    left = {name: value for name, value in document.items() if name not in removed}
    config_of(left)
    return left


def differences(before: ClusterConfig, after: ClusterConfig) -> dict[str, object]:
    """What is set to another value than before, None where it is not set any more."""
    old, new = asdict(before), asdict(after)
    return {name: new[name] for name in SETTINGS if new[name] != old[name]}


def _unknown(name: str, known: Iterable[str]) -> ConfigError:
    names = sorted(known)
    advice = hint(name, names) or f": there are {', '.join(names)}"
    return ConfigError(f"{name[:SHOWN_CHARS_MAX]}: no such setting{advice}")
