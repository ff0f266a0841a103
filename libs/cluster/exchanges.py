"""Who says what to whom on the bus: the table from which the AsyncAPI document is made (`cluster.asyncapi`).

Owns which message goes on which subject and what answers it; spells no subject (`cluster.subjects`) and no
shape (`cluster.messages`).
"""

from dataclasses import dataclass
from enum import StrEnum

from cluster import subjects
from cluster.messages import (
    Accepted,
    BlockEvents,
    Cancel,
    Commit,
    Decision,
    Describe,
    Finish,
    HandlerFailed,
    InventoryChunk,
    InventoryRequest,
    MatchReply,
    MatchRequest,
    PinRefused,
    PinReleased,
    PrefixHeats,
    PromptPart,
    ReadPin,
    ReadPinned,
    Refused,
    Release,
    ReleasePin,
    Renew,
    Replicate,
    Replicated,
    Reserve,
    Reserved,
    Resume,
    StreamBatch,
    Submit,
)
from kvindex.core import InstanceId
from policy.core import LoadSnapshot, Placement, Rejection, ScheduleRequest

INSTANCE_PARAMETER = "instance"
ANY_INSTANCE = InstanceId(f"{{{INSTANCE_PARAMETER}}}")
"""Stands in a subject for the name of an instance."""


class Action(StrEnum):
    """What the one does whom a subject belongs to: takes what others send, or tells everybody."""

    RECEIVE = "receive"
    SEND = "send"


@dataclass(frozen=True, slots=True)
class Exchange:
    """One kind of message on a subject, and what it is answered with."""

    message: type
    replies: tuple[type, ...] = ()
    """Any of these; HandlerFailed as well. Empty: nobody waits for an answer."""
    replies_many: bool = False
    """The answer is a run of them, in order."""


@dataclass(frozen=True, slots=True)
class Channel:
    name: str
    subject: str
    action: Action
    summary: str
    exchanges: tuple[Exchange, ...]
    queue: str = ""
    """The queue group that shares what comes; empty: each subscriber gets everything."""
    everyone: str = ""
    """The pattern by which one follows the subjects of all instances."""


def _asked(message: type, *replies: type) -> Exchange:
    return Exchange(message, (*replies, HandlerFailed))


_PLACEMENT = (_asked(ScheduleRequest, Placement, Rejection),)

CHANNELS = (
    Channel(
        "schedule",
        subjects.SCHEDULE,
        Action.RECEIVE,
        "gateway → conductor: a placement is asked for. An external scheduler takes over by answering here, "
        "with the conductors started as --standby.",
        _PLACEMENT,
        queue=subjects.CONDUCTOR_QUEUE,
    ),
    Channel(
        "scheduleStandby",
        subjects.SCHEDULE_STANDBY,
        Action.RECEIVE,
        "gateway → standby conductor: the same question, where nobody answers on the first subject.",
        _PLACEMENT,
        queue=subjects.CONDUCTOR_QUEUE,
    ),
    Channel(
        "decision",
        subjects.DECISION,
        Action.SEND,
        "conductor → everyone: each placement and rejection with its inputs. Conductors book what others "
        "placed, until a load snapshot shows it.",
        (Exchange(Decision),),
    ),
    Channel(
        "load",
        subjects.load(ANY_INSTANCE),
        Action.SEND,
        "instance → everyone: the whole of its load, every second and soon after a change, at most ten times "
        "a second.",
        (Exchange(LoadSnapshot),),
        everyone=subjects.LOAD_ALL,
    ),
    Channel(
        "blockEvents",
        subjects.kv_events(ANY_INSTANCE),
        Action.SEND,
        "worker → kvmeta: numbered changes of the blocks it holds. Who misses one asks for the inventory.",
        (Exchange(BlockEvents),),
        everyone=subjects.KV_EVENTS_ALL,
    ),
    Channel(
        "inventory",
        subjects.kv_inventory(ANY_INSTANCE),
        Action.RECEIVE,
        "kvmeta → worker: all blocks held, as of one event's number.",
        (Exchange(InventoryRequest, (InventoryChunk, HandlerFailed), replies_many=True),),
    ),
    Channel(
        "match",
        subjects.KVMETA_MATCH,
        Action.RECEIVE,
        "conductor → kvmeta: how long a prefix of a prompt each instance holds, and in which tiers.",
        (_asked(MatchRequest, MatchReply),),
        queue=subjects.KVMETA_QUEUE,
    ),
    Channel(
        "heat",
        subjects.KVMETA_HEAT,
        Action.SEND,
        "kvmeta → kvmetas: which prefixes were asked for, for the one that has the duty of replication.",
        (Exchange(PrefixHeats),),
    ),
    Channel(
        "instance",
        subjects.instance(ANY_INSTANCE),
        Action.RECEIVE,
        "anyone → instance: everything that is asked of one instance. Each answer is idempotent.",
        (
            _asked(Describe, LoadSnapshot),
            _asked(PromptPart, Accepted, Refused),
            _asked(Submit, Accepted, Refused),
            _asked(Reserve, Reserved, Refused),
            _asked(Renew, Accepted, Refused),
            _asked(Commit, Accepted, Refused),
            _asked(Release, Accepted, Refused),
            _asked(Finish, Accepted, Refused),
            _asked(Cancel, Accepted),
            _asked(Resume, Accepted, Refused),
            _asked(ReadPin, ReadPinned, PinRefused),
            _asked(ReleasePin, PinReleased),
            _asked(Replicate, Replicated),
        ),
    ),
    Channel(
        "stream",
        subjects.stream(ANY_INSTANCE),
        Action.RECEIVE,
        "worker → gateway: tokens, progress and ends of its requests, one message a step of the engine.",
        (Exchange(StreamBatch),),
    ),
)
