"""Whether the form that a client asks for can be met, asked before anything is placed.

Owns how long a request waits for it and what a refusal says. Compiling is `structures`', on a thread of its
own, and its outcomes are remembered there: what passes here an instance of the model takes.
"""

import asyncio
from pathlib import Path

from gateway.api_errors import OVERLOADED, ApiError, invalid
from gateway.structure import NamedStructure
from structures.compiler import StructureChecker
from structures.errors import StructureBusyError, StructureError

CHECK_WAIT_S_MAX = 2.0
"""Less than an instance gives it: what just passes here would not pass there. What takes longer is remembered
when it is done."""
BUSY_REASON = "structures_full"
RETRY_AFTER_S = 1.0


class StructureCheck:
    """For one model. Close it to end its thread."""

    def __init__(self, folder: Path, vocabulary_tokens: int, end_token_ids: tuple[int, ...]) -> None:
        """`end_token_ids`: those that instances hold answers to."""
        self._checker = StructureChecker(folder, vocabulary_tokens, end_token_ids)

    def prepare(self) -> None:
        """Begin to read the tokenizer, which the first request would wait for."""
        self._checker.prepare()

    def close(self) -> None:
        self._checker.close()

    async def check(self, named: NamedStructure | None) -> None:
        """Raises ApiError: 400 naming the parameter where no answer can be held to it, 429 where too many
        others wait to be compiled."""
        if named is None:
            return
        try:
            future = self._checker.compile(named.spec)
            if future.done():
                future.result()
                return
            await _within(asyncio.wrap_future(future), CHECK_WAIT_S_MAX)
        except StructureError as error:
            raise invalid(named.param, f"{named.param}: {error}") from error
        except StructureBusyError as error:
            raise _busy(named, str(error)) from error
        except TimeoutError as error:
            if future.running() and self._checker.prepared:
                message = f"{named.param}: takes more than {CHECK_WAIT_S_MAX:g} s to compile"
                raise invalid(named.param, message) from error
            raise _busy(named, f"was not compiled within {CHECK_WAIT_S_MAX:g} s") from error


async def _within(future: "asyncio.Future[None]", timeout_s: float) -> None:
    """Leaves the future as it is where it takes longer: others may wait for the same."""
    future.add_done_callback(_retrieve)
    done, _ = await asyncio.wait({future}, timeout=timeout_s)
    if not done:
        raise TimeoutError
    future.result()


def _retrieve(future: "asyncio.Future[None]") -> None:
    """An error that comes when nobody waits any more is no error of the loop's."""
    if not future.cancelled():
        future.exception()


def _busy(named: NamedStructure, message: str) -> ApiError:
    return ApiError(
        OVERLOADED,
        f"{named.param}: {message}",
        param=named.param,
        reason=BUSY_REASON,
        retry_after_s=RETRY_AFTER_S,
    )
