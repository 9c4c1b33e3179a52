"""How time and memory of an outer iteration of IVSP grow with coordinates, samples and episodes.

The exponent is fitted at the upper end, over the last sizes. Every iteration does the same work
(one trial, one inner step), so that what grows is the cost of it and not the number of steps.
Vectors of tens of megabytes are memory that the system hands out page by page: coordinates are
measured with torch's large pages as well, THP_MEM_ALLOC_ENABLE=1, in processes of their own.

Run: python -m benchmarks.growth ROUNDS SIZE ..., which is the coordinates' part.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory import peak_bytes
from benchmarks.results import Curve, Row, Section
from benchmarks.tasks import Size, Task, cleaning, few_shot, solver, synthetic
from benchmarks.timing import exponent, in_turns

# A coarse accuracy stops the inner loop after its first step; a fixed curvature accepts the first
# trial.
SAME_WORK: dict[str, Any] = {"zeta_bar": 1e30, "fixed_L": 1e12}
LAST = 3


def sizes(most: int, ladder: Sequence[int]) -> list[int]:
    return [count for count in ladder if count < most] + [most]


def measure(
    make: Callable[[int], Task], counts: Sequence[int], rounds: int
) -> tuple[list[float], list[float]]:
    """Return the seconds and the peak MiB of an iteration at each size, timed in turns."""
    methods = [make(count).alone() for count in counts]

    def step(number: int) -> Callable[[], object]:
        method, problem = methods[number]
        return lambda: method.step(problem=problem)

    works = [step(number) for number in range(len(methods))]
    times = [statistics.median(took) for took in in_turns(works, rounds, warm_up=2)]
    return times, [peak_bytes(work) / 2**20 for work in works]


def evaluations(n: int, rounds: int) -> float:
    """Return the seconds of f, a gradient of g and a gap, without a solver."""
    _, problem = synthetic(Size(n=n)).alone()
    x, y = torch.zeros(1, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    lower = problem.at(x)
    took = in_turns(
        [lambda: problem.upper(x, y), lambda: lower.gradient(y), lambda: lower.gap(y, y)], rounds
    )
    return sum(statistics.median(times) for times in took)


def coordinates(counts: Sequence[int], rounds: int) -> dict[str, list[float]]:
    """Return times and peaks of the synthetic problem, and the times of f and g alone."""
    chosen = solver("synthetic/ivsp", **SAME_WORK)
    times, peaks = measure(lambda n: synthetic(Size(n=n), chosen), counts, rounds)
    return {"times": times, "peaks": peaks, "evaluations": [evaluations(n, rounds) for n in counts]}


def in_a_process(counts: Sequence[int], rounds: int, large_pages: bool) -> dict[str, list[float]]:
    command = [sys.executable, "-m", "benchmarks.growth", str(rounds), *map(str, counts)]
    environment = {**os.environ, "THP_MEM_ALLOC_ENABLE": str(int(large_pages))}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
        env=environment,
    )
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows_of(
    name: str, counts: Sequence[int], times: Sequence[float], peaks: Sequence[float], more: str = ""
) -> list[Row]:
    upper = counts[-LAST:]
    over = ", ".join(f"{count:,}" for count in upper)
    note = (
        f"{1e3 * times[-1]:.3g} ms and {peaks[-1]:.3g} MiB at {counts[-1]:,}; fitted over "
        f"{over}{more}"
    )
    return [
        Row(f"time, exponent in {name}", exponent(upper, times[-LAST:]), at_most=1.05, note=note),
        Row(f"memory, exponent in {name}", exponent(upper, peaks[-LAST:]), at_most=1.05),
    ]


def run(size: Size) -> Section:
    rows, curves = [], []
    counts = sizes(size.most_coordinates, [10**3, 10**4, 10**5, 10**6])
    for name, large in (("coordinates, large pages", True), ("coordinates, pages as usual", False)):
        found = in_a_process(counts, size.rounds, large)
        alone = exponent(counts[-LAST:], found["evaluations"][-LAST:])
        rows += rows_of(
            name,
            counts,
            found["times"],
            found["peaks"],
            f"; the evaluations of f and g alone: {alone:.3g}",
        )
        curves.append(Curve(name, [float(count) for count in counts], found["times"]))
    samples = sizes(size.most_samples, [1000, 3000, 10_000, 20_000, 40_000])
    episodes = sizes(size.most_episodes, [8, 16, 32, 64])
    cleaner, learner = (solver(f"{task}/ivsp", **SAME_WORK) for task in ("mnist", "glyphs"))
    tasks: dict[str, tuple[Callable[[int], Task], list[int]]] = {
        "samples": (
            lambda n: cleaning(replace(size, samples=n // 2), chosen=cleaner, chunk_size=5000),
            samples,
        ),
        "episodes": (lambda n: few_shot(replace(size, episodes=n), learner), episodes),
    }
    for name, (make, counts) in tasks.items():
        times, peaks = measure(make, counts, size.rounds)
        rows += rows_of(name, counts, times, peaks)
        curves.append(Curve(name, [float(count) for count in counts], times))
    return Section("Growth of an outer iteration of IVSP", rows, curves)


if __name__ == "__main__":
    print(json.dumps(coordinates([int(argument) for argument in sys.argv[2:]], int(sys.argv[1]))))
