"""The forms that answers are held to, as a request meets them: compiled before anything is placed.

Owns how long a request waits for it and what a refusal says; compiling is the engine's.
"""

import asyncio

import numpy as np

from cluster.messages import RefusalReason
from policy.core import STRUCTURE_FIELD, StructureSpec
from structures.compiler import StructureCompiler
from structures.errors import StructureBusyError, StructureError
from structures.matcher import CompiledStructure, Matcher
from worker.intake import WorkError

COMPILE_WAIT_S_MAX = 3.0
"""Less than whoever asks waits for the answer. What takes longer is remembered when it is done."""
RETRY_AFTER_S = 1.0


async def compiled(compiler: StructureCompiler, spec: StructureSpec | None) -> CompiledStructure | None:
    """The structure of a request, None where it has none. Raises WorkError saying what is wrong with it."""
    if spec is None:
        return None
    what = f"{STRUCTURE_FIELD}: {spec.kind}"
    try:
        future = compiler.compile(spec)
        # Shielded: others may wait for the same.
        return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), COMPILE_WAIT_S_MAX)
    except StructureError as error:
        raise WorkError(RefusalReason.BAD_REQUEST, f"{what}: {error}") from error
    except StructureBusyError as error:
        raise WorkError(RefusalReason.QUEUE_FULL, f"{what}: {error}", RETRY_AFTER_S) from error
    except TimeoutError as error:
        if future.running() and compiler.prepared:
            detail = f"{what}: takes more than {COMPILE_WAIT_S_MAX:.0f} s to compile"
            raise WorkError(RefusalReason.BAD_REQUEST, detail) from error
        detail = f"{what}: was not compiled within {COMPILE_WAIT_S_MAX:.0f} s"
        raise WorkError(RefusalReason.QUEUE_FULL, detail, RETRY_AFTER_S) from error


def resumed(structure: CompiledStructure | None, output_token_ids: bytes) -> Matcher | None:
    """The state after what earlier attempts streamed. Raises WorkError where that does not fit."""
    if structure is None:
        return None
    matcher = structure.matcher()
    try:
        matcher.replay(np.frombuffer(output_token_ids, "<i4").tolist())
    except StructureError as error:
        detail = f"output_token_ids does not fit {STRUCTURE_FIELD}: {error}"
        raise WorkError(RefusalReason.BAD_REQUEST, detail) from error
    if matcher.ended:
        raise WorkError(RefusalReason.BAD_REQUEST, "output_token_ids is a complete answer already")
    return matcher
