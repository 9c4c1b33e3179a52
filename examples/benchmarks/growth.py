"""How time and memory of an outer iteration of IVSP grow with coordinates, samples and episodes.

The exponent is fitted at the upper end, over the last sizes. Every iteration does the same work (one trial, one inner step), so
that what grows is the cost of it and not the number of steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from examples.benchmarks.memory import peak_bytes
from examples.benchmarks.results import Curve, Row, Section
from examples.benchmarks.tasks import Size, Task, cleaning, few_shot, solver, synthetic
from examples.benchmarks.timing import exponent, in_turns

# A coarse accuracy stops the inner loop after its first step; a fixed curvature accepts the first trial.
SAME_WORK: dict[str, Any] = {"zeta_bar": 1e30, "fixed_L": 1e12}
LAST = 3


def sizes(most: int, ladder: Sequence[int]) -> list[int]:
    return [count for count in ladder if count < most] + [most]


def measure(make: Callable[[int], Task], counts: Sequence[int], rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds and the peak MiB of an iteration at each size, timed in turns."""
    methods = [make(count).alone() for count in counts]

    def step(number: int) -> Callable[[], object]:
        method, problem = methods[number]
        return lambda: method.step(problem=problem)

    works = [step(number) for number in range(len(methods))]
    times = [statistics.median(took) for took in in_turns(works, rounds, warm_up=2)]
    return times, [peak_bytes(work) / 2**20 for work in works]


def run(size: Size) -> Section:
    coordinates = sizes(size.most_coordinates, [10**3, 10**4, 10**5, 10**6])
    samples = sizes(size.most_samples, [1000, 3000, 10_000, 20_000, 40_000])
    episodes = sizes(size.most_episodes, [8, 16, 32, 64])
    tasks: dict[str, tuple[Callable[[int], Task], list[int]]] = {
        "coordinates": (lambda n: synthetic(replace(size, n=n), solver("synthetic/ivsp", **SAME_WORK)), coordinates),
        "samples": (
            lambda n: cleaning(replace(size, samples=n // 2), chosen=solver("mnist/ivsp", **SAME_WORK), chunk_size=5000),
            samples,
        ),
        "episodes": (lambda n: few_shot(replace(size, episodes=n), solver("glyphs/ivsp", **SAME_WORK)), episodes),
    }
    rows, curves = [], []
    for name, (make, counts) in tasks.items():
        times, peaks = measure(make, counts, size.rounds)
        upper = counts[-LAST:]
        over = ", ".join(f"{count:,}" for count in upper)
        note = f"{1e3 * times[-1]:.3g} ms and {peaks[-1]:.3g} MiB at {counts[-1]:,}; fitted over {over}"
        rows.append(Row(f"time, exponent in {name}", exponent(upper, times[-LAST:]), at_most=1.05, note=note))
        rows.append(Row(f"memory, exponent in {name}", exponent(upper, peaks[-LAST:]), at_most=1.05))
        curves.append(Curve(name, [float(c) for c in counts], times))
    return Section("Growth of an outer iteration of IVSP", rows, curves)
