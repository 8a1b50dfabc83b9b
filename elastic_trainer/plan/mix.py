"""Which corpus of a mix each sample is of: a function of the weights and the sample's index. Pure.

Turns repeat with a period of at most `MAX_PERIOD` samples. Within it they are Tijdeman's schedule
("The chairman assignment problem", Discrete Mathematics 32, 1980): after any number of samples each
of K sources has had its share of them to within 1 - 1 / (2 K - 2) samples.
"""

from __future__ import annotations

import heapq
import math
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

MAX_PERIOD: Final = 1 << 16


def shares_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Return how many samples of a period each source gives, at least 1; their sum is the period.

    Exactly in proportion to the weights, each above 0, as they are written in decimals, where a
    period of `MAX_PERIOD` can be so; otherwise to the nearest sample of that.
    """
    exact = [Fraction(repr(weight)) for weight in weights]
    parts = [each / sum(exact) for each in exact]
    period = min(math.lcm(*(each.denominator for each in parts)), MAX_PERIOD)
    shares = [max(1, math.floor(each * period)) for each in parts]
    while (left := period - sum(shares)) != 0:  # at most a turn a source
        step = 1 if left > 0 else -1
        able = [at for at, share in enumerate(shares) if share + step >= 1]
        able.sort(key=lambda at: step * (shares[at] - parts[at] * period))
        for at in able[: abs(left)]:
            shares[at] += step
    return tuple(shares)


class Turns:
    """The source of each sample, with `shares` of each in a period."""

    def __init__(self, shares: Sequence[int]) -> None:
        self._shares, self._period = shares, sum(shares)
        self._order = array("H", _tijdeman(shares))
        self._places = [array("H") for _ in shares]
        """By source: its places in a period, rising."""
        for at, source in enumerate(self._order):
            self._places[source].append(at)

    def turn(self, sample: int) -> tuple[int, int]:
        """Return the source of global sample `sample`, and which of the source's samples it is."""
        source = self._order[sample % self._period]
        return source, self.taken(source, sample)

    def taken(self, source: int, stop: int) -> int:
        """Return how many of global samples [0, `stop`) are of `source`: its samples [0, that)."""
        periods, rest = divmod(stop, self._period)
        return periods * self._shares[source] + bisect_left(self._places[source], rest)


def _tijdeman(shares: Sequence[int]) -> list[int]:
    """Return the sources of one period.

    With d = 1 / (2 K - 2) and w its share of the samples, a source's sample j (from 1) may come
    from time (j - 1 + d) / w on and is due by (j - d) / w; of those that may the first due comes.
    """
    period, twice = sum(shares), max(2, 2 * len(shares) - 2)

    def release(source: int, number: int) -> int:
        return -(-((number - 1) * twice + 1) * period // (twice * shares[source]))

    def due(source: int, number: int) -> tuple[int, int, int]:
        return ((number * twice - 1) * period // (twice * shares[source]), source, number)

    waiting = [(release(source, 1), source, 1) for source in range(len(shares))]
    heapq.heapify(waiting)
    ready: list[tuple[int, int, int]] = []
    order = []
    for time in range(1, period + 1):
        while waiting and waiting[0][0] <= time:
            _, source, number = heapq.heappop(waiting)
            heapq.heappush(ready, due(source, number))
        _, source, number = heapq.heappop(ready)
        order.append(source)
        if number < shares[source]:
            heapq.heappush(waiting, (release(source, number + 1), source, number + 1))
    return order
