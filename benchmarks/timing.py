"""Times that compare on a shared machine: the sides take turns, and medians are taken."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

Work = Callable[[], object]


def seconds(work: Work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def in_turns(sides: Sequence[Work], rounds: int, warm_up: int = 1) -> list[list[float]]:
    """Return the time of each side in each round; the first `warm_up` rounds do not count."""
    took = [[seconds(side) for side in sides] for _ in range(warm_up + rounds)][warm_up:]
    return [list(times) for times in zip(*took, strict=True)]


def ratio(times: Sequence[float], to: Sequence[float]) -> float:
    """Return the median over the rounds of one side's time to the other's."""
    return statistics.median(a / b for a, b in zip(times, to, strict=True))


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Return p of the power law cost = c * size^p, by least squares of the logarithms."""
    xs, ys = [math.log(size) for size in sizes], [math.log(cost) for cost in costs]
    return statistics.linear_regression(xs, ys).slope


def doublings(most: float, count: int = 6) -> list[float]:
    """Return numbers of which each is half of the next, up to the last one."""
    return [most / 2**power for power in reversed(range(count))]
