"""The links of one pair: made when they are needed, given up when they fail, moved up when a better is back.

Owns which link a call takes, as `choice` says. Knows nothing of what a call moves.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from collections.abc import Set as AbstractSet
from copy import copy

from kvtransfer.choice import NONE, Dial, Ladder, Use
from kvtransfer.errors import AuthError, PeerLostError, TransferError
from kvtransfer.kinds import TransportKind
from kvtransfer.limits import Limits
from kvtransfer.transport import Link

Dialler = Callable[[], Coroutine[None, None, Link]]
"""Makes a new link of one kind, in `handshake_s_max`. Raises what `Transport.dial` raises."""

_log = logging.getLogger(__name__)


class Line:
    """A link and the calls that run on it. One that is `retired` ends with the last of them. On one that is
    `unsettled` a write was given up: its bytes may still be on their way."""

    __slots__ = ("kind", "link", "retired", "running", "unsettled")

    def __init__(self, kind: TransportKind, link: Link) -> None:
        self.kind = kind
        self.link = link
        self.running = 0
        self.retired = False
        self.unsettled = False


class Lines:
    """At most one link of each kind that calls may take, and one dial of each kind at a time.

    Dials are tasks of their own: a call whose time ends does not end the dial that others wait for.

    What a write left behind on one transport must not land after a newer write on another. So where calls
    leave a link on which a write is not settled, a new era begins (see `eras`): no link of before takes a
    call any more, and the owner ends them all before it welcomes the next.
    """

    def __init__(
        self,
        peer: str,
        diallers: Mapping[TransportKind, Dialler],
        limits: Limits,
        uniform: Callable[[], float],
        begin_era: Callable[[], None],
    ) -> None:
        """`diallers` in the order of preference, at least one. They dial links of the present era;
        `begin_era` begins the next."""
        self._peer = peer
        self._diallers = diallers
        self._begin_era = begin_era
        self._eras = 0
        self._ladder = Ladder(tuple(diallers), limits, uniform)
        self._loop = asyncio.get_running_loop()
        self._up: dict[TransportKind, Line] = {}
        self._left: set[Line] = set()
        self._best: Line | None = None
        self._better_due_s = 0.0
        self._dials: dict[TransportKind, asyncio.Task[Line | TransferError]] = {}
        self._reasons: dict[TransportKind, str] = {}
        self._closed = False

    @property
    def kinds(self) -> tuple[TransportKind, ...]:
        """In the order of preference."""
        return self._ladder.kinds

    def take_now(self, now_s: float) -> Line | None:
        """The line that most calls take, without a look at anything else; None says to `take` one."""
        line = self._best
        if line is None or now_s >= self._better_due_s or line.link.closed:
            return None
        line.running += 1
        return line

    async def take(self, deadline_s: float, unfit: AbstractSet[TransportKind] = NONE) -> Line:
        """The best line that is not `unfit`, dialled if need be.

        `release`, `carried` or `failed` gives it back. Each transport that is due is tried once. Raises what
        the last of them raised; PeerLostError if the next one is due after `deadline_s` (of the loop's
        clock), which says when.
        """
        tried: set[TransportKind] = set()
        error: TransferError | None = None
        while True:
            if self._closed:
                raise self._given_up()
            now_s = self._loop.time()
            choice = self._ladder.choose(now_s, self._live(now_s), unfit | tried)
            if isinstance(choice, Use):
                if choice.probe is not None:
                    self._dial(choice.probe)
                return self._taken(self._up[choice.kind])
            if isinstance(choice, Dial):
                tried.add(choice.kind)
                era = self._eras
                outcome = await self._dialled(choice.kind)
                if isinstance(outcome, Line) or era != self._eras:
                    tried.discard(choice.kind)  # it is up, lost since, or left: the ladder knows
                else:
                    error = outcome
            elif error is not None:
                raise copy(error) from error
            elif choice.until_s > deadline_s:
                raise self._not_due(choice.until_s - now_s)
            else:
                await asyncio.sleep(choice.until_s - now_s)

    def release(self, line: Line) -> None:
        """No call was made on it."""
        line.running -= 1
        self._end_if_idle(line)

    def carried(self, line: Line) -> None:
        """The call went through."""
        line.running -= 1
        self._ladder.carried(line.kind, self._loop.time())
        if line.retired:
            self._end_if_idle(line)

    def failed(self, line: Line, error: BaseException, *, distrusted: bool, settled: bool) -> None:
        """The call did not. A link that it closed is lost; one that is `distrusted` takes no more calls.
        Nothing lands any more of one that is `settled`: a read, or a write that the owner refused."""
        line.running -= 1
        line.unsettled = line.unsettled or not settled
        if line.link.closed or distrusted:
            self._lose(line, error)
        elif line.unsettled and line is not self._best:
            self._leave_all()
        self._end_if_idle(line)

    def close(self) -> None:
        """End the links, whose calls fail, and the dials. Again is harmless."""
        self._closed = True
        self._begin_era()
        for task in self._dials.values():
            task.cancel()
        for line in (*self._up.values(), *self._left):
            line.link.close()
        self._up.clear()
        self._left.clear()
        self._best = None

    async def wait_closed(self) -> None:
        """After `close`: until the dials that it cancelled are gone."""
        await asyncio.gather(*self._dials.values(), return_exceptions=True)

    def _taken(self, line: Line) -> Line:
        line.retired = False
        line.running += 1
        return line

    def _live(self, now_s: float) -> AbstractSet[TransportKind]:
        """The kinds whose link is up; those found closed are lost."""
        for line in [line for line in self._up.values() if line.link.closed]:
            self._lose(line, PeerLostError("the link was closed between calls"))
        return self._up.keys()

    async def _dialled(self, kind: TransportKind) -> Line | TransferError:
        """Raises AuthError: another transport would not do better."""
        task = self._dial(kind)
        await asyncio.wait((task,))
        if task.cancelled():
            raise self._given_up()
        outcome = task.result()
        if isinstance(outcome, AuthError):
            raise copy(outcome) from outcome
        return outcome

    def _dial(self, kind: TransportKind) -> "asyncio.Task[Line | TransferError]":
        task = self._dials.get(kind)
        if task is None:
            task = self._loop.create_task(self._make(kind), name=f"kvtransfer dials {self._peer} by {kind}")
            self._dials[kind] = task
        return task

    async def _make(self, kind: TransportKind) -> Line | TransferError:
        era = self._eras
        try:
            link = await self._diallers[kind]()
        except TransferError as error:
            # A wrong secret moves no call to another transport, but is not tried over and over beside one.
            if self._up or not isinstance(error, AuthError):
                self._note_failure(kind, error)
            return error
        except Exception as error:
            # Whatever it is, it must neither reach a call untyped nor have the next call dial at once.
            _log.exception("dialling %s by %s fails on a defect of our own", self._peer, kind)
            lost = PeerLostError(f"no connection to {self._peer}: {error!r}")
            self._note_failure(kind, lost)
            return lost
        finally:
            del self._dials[kind]
        if era != self._eras:
            link.close()
            return PeerLostError(f"the links to {self._peer} are made anew")
        line = Line(kind, link)
        self._up[kind] = line
        self._reasons.pop(kind, None)
        self._move_up()
        return line

    def _lose(self, line: Line, error: BaseException) -> None:
        """Once per line, however many calls fail with it."""
        if self._up.get(line.kind) is not line:
            return
        del self._up[line.kind]
        line.retired = True
        self._left.add(line)
        self._note_failure(line.kind, error)
        if line.unsettled or line.running:
            self._leave_all()
        self._move_up()
        self._end_if_idle(line)

    def _move_up(self) -> None:
        """Calls take the best line that is up from now on; the one they took ends when it is idle."""
        before = self._best
        self._best = next((self._up[kind] for kind in self._ladder.kinds if kind in self._up), None)
        self._set_better_due()
        if before is not None and before is not self._best:
            before.retired = True
            if before.unsettled:
                self._leave_all()
            self._end_if_idle(before)

    def _leave_all(self) -> None:
        """A new era: the links of this one end with the calls that run on them, or before."""
        if len(self._diallers) == 1:
            return  # a transport keeps its own order
        self._eras += 1
        self._begin_era()
        left, self._up, self._best = list(self._up.values()), {}, None
        for line in left:
            line.retired = True
            self._left.add(line)
            self._end_if_idle(line)

    def _note_failure(self, kind: TransportKind, error: BaseException) -> None:
        wait_s = self._ladder.failed(kind, self._loop.time())
        self._reasons[kind] = str(error)
        self._set_better_due()
        if not self._closed:
            _log.info("%s to %s failed, next try in %.2f s: %s", kind, self._peer, wait_s, error)

    def _set_better_due(self) -> None:
        if self._best is not None:
            self._better_due_s = self._ladder.better_due_s(self._best.kind)

    def _end_if_idle(self, line: Line) -> None:
        if line.retired and not line.running:
            line.link.close()
            self._left.discard(line)
            if self._up.get(line.kind) is line:
                del self._up[line.kind]

    def _given_up(self) -> PeerLostError:
        return PeerLostError(f"this connection to {self._peer} was given up; connect again")

    def _not_due(self, wait_s: float) -> PeerLostError:
        reasons = "; ".join(f"{kind}: {text}" for kind, text in self._reasons.items())
        return PeerLostError(
            f"{self._peer} is tried again in {wait_s:.2f} s ({reasons or 'no transport fits'})"
        )
