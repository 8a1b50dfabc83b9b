"""Counts and sizes."""

from __future__ import annotations

import pytest

from elastic_trainer.plan.quantities import counted, scaled, sized


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 nodes"), (1, "1 node"), (2, "2 nodes"), (2048, "2,048 nodes")]
)
def test_counts(number, text):
    assert counted(number, "node") == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (10.24 * 2**20, "10.2 MiB"),
        (9070 * 2**30, "8.86 TiB"),
        (999.6 * 2**30, "1,000 GiB"),
        (1023.4 * 2**30, "1,023 GiB"),
        (1023.9 * 2**30, "1 TiB"),
        (5000 * 2**50, "5,000 PiB"),
    ],
)
def test_sizes_have_three_digits_and_no_exponent(num_bytes, text):
    assert sized(num_bytes) == text


@pytest.mark.parametrize(
    ("number", "text"), [(7, "7"), (999, "999"), (999_600, "1 M"), (8_030_261_248, "8.03 B")]
)
def test_other_units(number, text):
    assert scaled(number, ("", "K", "M", "B", "T"), 1000) == text
