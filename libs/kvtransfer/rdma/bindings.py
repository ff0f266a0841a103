"""What is used of pyverbs, imported in one place; ImportError, which says what is missing, without it.

pyverbs has no types; `verbs` and `sendring` give it some.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _importing() -> Iterator[None]:
    """pyverbs configures the root logger when it is imported, which is for a program to do."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"rdma needs the Python package pyverbs of rdma-core, which does not import: {error}"
        ) from error
    root.handlers[:] = handlers
    root.setLevel(level)


with _importing():
    import pyverbs.enums as enums
    from pyverbs.addr import GID, AHAttr, GlobalRoute
    from pyverbs.cq import CQ, CompChannel, cqe_status_to_str
    from pyverbs.device import Context, get_device_list
    from pyverbs.mr import MR, DmaBufMR
    from pyverbs.pd import PD
    from pyverbs.pyverbs_error import PyverbsError
    from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
    from pyverbs.wr import SGE, RecvWR, SendWR

__all__ = [
    "CQ",
    "GID",
    "MR",
    "PD",
    "QP",
    "SGE",
    "AHAttr",
    "CompChannel",
    "Context",
    "DmaBufMR",
    "GlobalRoute",
    "PyverbsError",
    "QPAttr",
    "QPCap",
    "QPInitAttr",
    "RecvWR",
    "SendWR",
    "cqe_status_to_str",
    "enums",
    "get_device_list",
]
