import platform
import resource

import pytest
import torch

from engine.native.allocator import keep_freed_memory

pytestmark = pytest.mark.unit

ROWS = 2048
WIDTHS = (960, 576, 576, 1536, 576)
STEP_PAGES = ROWS * sum(WIDTHS) * 4 // 4096
"""What the operations of one layer yield."""


def allocate_as_a_layer_does() -> None:
    for width in WIDTHS:
        torch.empty(ROWS, width).fill_(1.0)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_freed_memory_stays_and_is_used_again() -> None:
    assert keep_freed_memory()
    for _ in range(10):
        allocate_as_a_layer_does()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        allocate_as_a_layer_does()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < STEP_PAGES
