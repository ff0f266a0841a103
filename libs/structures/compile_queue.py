"""Specs that are compiled one after the other on a thread of its own, and what is remembered of them.

Specs come from clients: what waits and what is remembered is bounded. Knows nothing of what compiling is.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from policy.core import StructureSpec
from structures.errors import StructureBusyError, StructureError
from structures.explanation import shortened

WAITING_MAX = 32
"""Different structures that wait to be compiled."""
COMPILE_STACK_BYTES = 256 * 1024 * 1024
"""llguidance recurses from rule to rule: a text of STRUCTURE_BYTES_MAX overflows the usual stack, and the
process is gone. What it compiles to is flat: masks need no such stack."""

ResultT = TypeVar("ResultT")


class CompileQueue(Generic[ResultT]):
    """Methods may be called from any thread."""

    def __init__(
        self,
        compile_new: Callable[[StructureSpec], ResultT],
        *,
        remembered_max: int,
        worn_out: Callable[[ResultT], bool],
    ) -> None:
        """`compile_new` runs on the queue's thread. `remembered_max` results are remembered, those of specs
        that do not compile included; the least recently used goes first. What is `worn_out` is made anew."""
        self._compile_new = compile_new
        self._remembered_max = remembered_max
        self._worn_out = worn_out
        self._remembered: OrderedDict[StructureSpec, Future[ResultT] | StructureError] = OrderedDict()
        self._waiting: dict[StructureSpec, Future[ResultT]] = {}
        self._lock = threading.Lock()
        self._executor = _one_thread(COMPILE_STACK_BYTES)

    def prepare(self, work: Callable[[], object]) -> "Future[object]":
        """Run `work` on the queue's thread before what is asked for later."""
        return self._executor.submit(work)

    def close(self) -> None:
        """What waits is not compiled any more; does not wait for what is being compiled."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def compile(self, spec: StructureSpec) -> "Future[ResultT]":
        """Done at once where the spec is remembered. Fails with StructureError where no answer can be held
        to it. Raises StructureBusyError where WAITING_MAX others wait."""
        with self._lock:
            known = self._known(spec)
            if known is not None:
                return known
            waiting = self._waiting.get(spec)
            if waiting is None:
                if len(self._waiting) >= WAITING_MAX:
                    raise StructureBusyError(f"{WAITING_MAX} structures wait to be compiled already")
                waiting = self._executor.submit(self._compile, spec)
                self._waiting[spec] = waiting
            return waiting

    def _known(self, spec: StructureSpec) -> "Future[ResultT] | None":
        known = self._remembered.get(spec)
        if known is None or (isinstance(known, Future) and self._worn_out(known.result())):
            return None
        self._remembered.move_to_end(spec)
        return _failed(known) if isinstance(known, StructureError) else known

    def _compile(self, spec: StructureSpec) -> ResultT:
        result: Future[ResultT] | StructureError
        try:
            result = _done(self._compile_new(spec))
        except StructureError as error:
            result = error
        except Exception as error:
            result = StructureError(f"cannot be compiled: {shortened(repr(error))}")
        with self._lock:
            del self._waiting[spec]
            self._remembered[spec] = result
            self._remembered.move_to_end(spec)
            if len(self._remembered) > self._remembered_max:
                self._remembered.popitem(last=False)
        return (_failed(result) if isinstance(result, StructureError) else result).result()


def _one_thread(stack_bytes: int) -> ThreadPoolExecutor:
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="structures")
    # The size is the process's: a thread that is started meanwhile elsewhere merely gets more than it needs.
    before = threading.stack_size(stack_bytes)
    try:
        executor.submit(int).result()  # starts the thread
    finally:
        threading.stack_size(before)
    return executor


def _done(result: ResultT) -> "Future[ResultT]":
    future: Future[ResultT] = Future()
    future.set_result(result)
    return future


def _failed(error: StructureError) -> "Future[ResultT]":
    """With an error of its own: each that is raised collects its traceback."""
    future: Future[ResultT] = Future()
    future.set_exception(StructureError(*error.args))
    return future
