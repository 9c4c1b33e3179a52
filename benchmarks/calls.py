"""How many passes an outer iteration takes, against what the algorithm needs at least."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from benchmarks.results import Row, Section
from benchmarks.tasks import Size, cleaning, solver

# Besides the inner steps: IVSP one of f and a gap per trial; MEHA and PNGBiO 6, of which one is
# saved where f has no x, as here; T steps and one of f and a gap; F2SA per inner step one of z, one
# of f and one of y, and then a gap.
NEEDED = {"ivsp": 3, "meha": 5, "pngbio": 5, "slm": 3, "f2sa": 2, "vpbgd": 3, "bome": 3}


class Counted:
    """A function that counts its calls."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        self.function, self.count = function, 0

    def __call__(self, y: Tensor) -> Any:
        self.count += 1
        return self.function(y)


def run(size: Size) -> Section:
    rows = []
    for name, fixed in NEEDED.items():
        task = cleaning(size, chosen=solver(f"mnist/{name}"))
        method, problem = task.alone()
        (term,) = problem.lower_terms
        assert term.outputs is not None
        forward = Counted(term.outputs)
        problem.lower_terms = [replace(term, outputs=forward)]
        method.step(problem=problem)  # the first iteration has no known point to start from
        ratios, made = [], 0
        forward.count = 0
        for _ in range(size.steps):
            info = method.step(problem=problem)
            trials = getattr(info, "trials", 1)
            steps = {"meha": 0, "pngbio": 0, "f2sa": 3 * info.inner_iterations}.get(
                name, info.inner_iterations
            )
            ratios.append(info.calls.passes / (steps + fixed * trials))
            made += info.calls.passes - info.calls.upper
        shared = (
            f"{forward.count / size.steps:.3g} forward passes of g for {made / size.steps:.3g} "
            "that were asked for"
        )
        rows.append(
            Row(
                f"{type(method).__name__}: passes / minimum",
                statistics.mean(ratios),
                at_most=1.0,
                note=shared,
            )
        )
    return Section("Passes of f and g per outer iteration", rows)
