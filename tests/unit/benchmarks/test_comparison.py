import pytest
from benchmarks.comparison import rotated

pytestmark = pytest.mark.unit


def test_turns_begin_with_another_one_each_time() -> None:
    assert [list(rotated("abc", number)) for number in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]
