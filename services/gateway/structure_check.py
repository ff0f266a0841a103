"""Whether the form that a client asks for can be met, asked before anything is placed.

Owns how long a request waits for it and what a refusal says. Compiling is `structures`', on a thread of its
own, and its outcomes are remembered there: what passes here an instance of the model takes.
"""

import asyncio
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from gateway.api.api_errors import OVERLOADED, ApiError, invalid
from gateway.api.structure import NamedStructure
from structures.compiler import StructureChecker
from structures.errors import StructureBusyError, StructureError

CHECK_WAIT_S_MAX = 2.0
"""Less than an instance gives it: what just passes here would not pass there. What takes longer is remembered
when it is done."""
READ_WAIT_S_MAX = 15.0
"""For the model's tokenizer to be read, which happens once, at the start."""
BUSY_REASON = "structures_full"
RETRY_AFTER_S = 1.0

ResultT = TypeVar("ResultT")


class StructureCheck:
    """For one model. Close it to end its thread."""

    def __init__(self, folder: Path, vocabulary_tokens: int, end_token_ids: tuple[int, ...]) -> None:
        """`end_token_ids`: those that instances hold answers to."""
        self._checker = StructureChecker(folder, vocabulary_tokens, end_token_ids)
        self._reading = self._checker.prepare()

    def close(self) -> None:
        self._checker.close()

    async def check(self, named: NamedStructure | None) -> None:
        """Raises ApiError: 400 naming the parameter where no answer can be held to it, 429 where too many
        others wait to be compiled."""
        if named is None:
            return
        if not self._reading.done():
            await _done_within(self._reading, READ_WAIT_S_MAX)
        try:
            future = self._checker.compile(named.spec)
            if future.done() or await _done_within(future, CHECK_WAIT_S_MAX):
                future.result()
                return
        except StructureError as error:
            raise invalid(named.param, f"{named.param}: {error}") from error
        except StructureBusyError as error:
            raise _busy(named, str(error)) from error
        if future.running() and self._checker.prepared:
            raise invalid(named.param, f"{named.param}: takes more than {CHECK_WAIT_S_MAX:g} s to compile")
        raise _busy(named, f"was not compiled within {CHECK_WAIT_S_MAX:g} s")


async def _done_within(future: Future[ResultT], timeout_s: float) -> bool:
    """Leaves the future as it is where it takes longer, or nobody waits any more: others may want it."""
    waited = asyncio.wrap_future(future)
    waited.add_done_callback(_retrieve)
    done, _ = await asyncio.wait({waited}, timeout=timeout_s)
    return bool(done)


def _retrieve(waited: "asyncio.Future[ResultT]") -> None:
    """An error that comes when nobody waits any more is no error of the loop's."""
    if not waited.cancelled():
        waited.exception()


def _busy(named: NamedStructure, message: str) -> ApiError:
    return ApiError(
        OVERLOADED,
        f"{named.param}: {message}",
        param=named.param,
        reason=BUSY_REASON,
        retry_after_s=RETRY_AFTER_S,
    )
