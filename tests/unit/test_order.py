"""How tests are dealt out to several workers."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from order import SHARED, dealt

FILES = [
    f"tests/{folder}/test_{i}.py"
    for folder in ("slurm", "kubernetes", "cluster", "unit/a")
    for i in range(4)
]


@given(st.lists(st.sampled_from(FILES)), st.integers(2, 4))
def test_each_test_is_dealt_out_once(paths: list[str], num_workers: int) -> None:
    tests = [(path, (path, i)) for i, path in enumerate(paths)]
    assert Counter(dealt(tests, num_workers)) == Counter(test for _, test in tests)


def test_parts_begin_with_what_takes_long_and_end_with_unit_tests() -> None:
    tests = [(path, path) for path in FILES for _ in range(1 if "unit" not in path else 30)]
    order = dealt(tests, 2)
    half = len(order) // 2
    for part in (order[:half], order[half:]):
        kinds = ["unit" not in path for path in part]
        assert kinds == sorted(kinds, reverse=True)
        assert any(kinds)
        assert not kinds[-1]
    for folder in SHARED:
        assert {i < half for i, path in enumerate(order) if path.startswith(folder)} in (
            {True},
            {False},
        )
