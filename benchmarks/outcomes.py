"""What IVSP with no arguments but delta comes to on a problem, next to what it came to before.

A problem counts as solved once its KKT residuals, relative to |grad f|, |g| and |f| at the start,
are all at most 1e-2; at most 2,000 outer iterations. The passes are those until then, to within a
tenth: certificates, which are not counted, are made at the iterations of :func:`checks`.
`before.csv` has the outcomes of commit 8d45010.

IVSP chooses rho, and with it the problem whose residuals these are: a smaller one is easier,
because it asks for less of y. So two versions are compared by :attr:`Outcome.lower` as well.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch

from benchmarks.random_problems import Drawn
from lightning_bilevel import IVSP, BilevelError, certify
from lightning_bilevel.core.vectors import norm
from lightning_bilevel.reading import Tally, advice

BEFORE = Path(__file__).parent / "before.csv"
SOLVED = 1e-2


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        name: The problem's.
        relative: The largest relative residual at the last check, infinite without one.
        iterations: Outer iterations.
        passes: Forward and backward passes of f and g.
        lower: How far y is from being stationary for g(x, .) at the last check, over what it is at
            the start. No choice of the solver enters.
        worst: The largest |f| of an iterate over that of the start.
        ending: The error that stopped the run, or nothing.
    """

    name: str
    relative: float
    iterations: int
    passes: int
    lower: float
    worst: float
    ending: str = ""

    @property
    def solved(self) -> bool:
        return self.relative <= SOLVED

    def __str__(self) -> str:
        return (
            f"{'solved' if self.solved else 'NOT   '} {self.name:<78} {self.relative:8.1e} after "
            f"{self.iterations:>5} iterations, {self.passes:>7} passes, lower slope "
            f"{self.lower:7.1e}, worst f / start {self.worst:.2f}"
        )


def checks(steps: int) -> Iterator[int]:
    """Yield 10, 20, ..., 200, 220, ..., 300, 330, ...: steps of at most a tenth from 100 on."""
    iteration = 0
    while iteration < steps:
        iteration = min(iteration + max(10, iteration // 100 * 10), steps)
        yield iteration


def solve(drawn: Drawn, steps: int = 2000) -> tuple[Outcome, str]:
    """Run IVSP until the problem is solved; also return why it is not, in words."""
    torch.manual_seed(0)
    problem = drawn.problem
    start = problem.upper(drawn.x, drawn.y)
    scales = (
        math.hypot(norm(start.grad_x), norm(start.grad_y)),
        abs(problem.at(drawn.x).value(drawn.y)),
        abs(start.value),
    )
    slope = problem.lower_set.normal_cone_distance(drawn.y, problem.at(drawn.x).gradient(drawn.y))
    x, y = drawn.x.clone().requires_grad_(), drawn.y.clone().requires_grad_()
    solver = IVSP(
        [{"params": [x], "level": "upper"}, {"params": [y], "level": "lower"}], delta=drawn.delta
    )
    relative, lower, highest, tally, words, ending = math.inf, 1.0, scales[2], Tally(), "", ""
    try:
        for check in checks(steps):
            while tally.iterations < check:
                info = solver.step(problem=problem)
                tally.add(info)
                highest = max(highest, abs(info.upper))
            assert solver.envelope is not None
            c = certify(
                problem,
                x,
                y,
                solver.envelope,
                multiplier=solver.multiplier,
                tolerance=1e-9 * solver.constants.L_yy,
            )
            residuals = c.stationarity, c.feasibility, c.complementarity
            relative = max(
                residual / max(scale, 1e-300)
                for residual, scale in zip(residuals, scales, strict=True)
            )
            lower = c.lower_gradient / max(slope, 1e-300)
            if relative <= SOLVED:
                break
        else:
            words = " ".join(advice(c, tally))
    except BilevelError as error:
        # The last check was good for another point.
        relative, ending, words = math.inf, type(error).__name__, f"stopped: {error}"
    worst = highest / max(scales[2], 1e-300)
    return (
        Outcome(drawn.name, relative, tally.iterations, tally.calls.passes, lower, worst, ending),
        words,
    )


def run(part: str, problems: Iterable[Drawn], before: Sequence[Outcome] = ()) -> list[Outcome]:
    """Solve all of them, print a line for each and a summary, and return what they came to."""
    known = {outcome.name: outcome for outcome in before}
    now = []
    for drawn in problems:
        outcome, words = solve(drawn)
        earlier = known.get(outcome.name)
        note = "" if earlier is None else f" (before {_passes(earlier)})"
        print(f"{outcome}{note} {words}", flush=True)
        now.append(outcome)
    print(summary(part, now, before), flush=True)
    return now


def _passes(outcome: Outcome) -> str:
    return f"{outcome.passes} passes" if outcome.solved else "not solved"


def summary(part: str, now: Sequence[Outcome], before: Sequence[Outcome] = ()) -> str:
    """Say how many are solved, and the median passes where both have solved it."""
    solved = {outcome.name: outcome.passes for outcome in now if outcome.solved}
    worst = max(outcome.worst for outcome in now)
    away = sum(outcome.solved and outcome.lower > 1.0 for outcome in now)
    line = (
        f"{part}: {len(solved)} of {len(now)} solved, {away} of them with y farther from "
        f"stationary than at the start; worst f / start {worst:.2f}"
    )
    known = {outcome.name for outcome in now}
    compared = [outcome for outcome in before if outcome.name in known]
    if not compared:
        return line
    earlier = {outcome.name: outcome.passes for outcome in compared if outcome.solved}
    both = [name for name in solved if name in earlier]
    line += f"; before {len(earlier)} of {len(compared)}"
    if both:
        medians = (statistics.median(passes[name] for name in both) for passes in (solved, earlier))
        ratio = statistics.median(solved[name] / earlier[name] for name in both)
        line += "; median passes of the {} solved by both {:g}, before {:g}".format(
            len(both), *medians
        )
        line += f", median ratio {ratio:.2f}"
    return line


def write(file: Path, parts: dict[str, list[Outcome]]) -> None:
    """Write the outcomes of several parts, such as the two halves, into a table."""
    with file.open("w", newline="") as opened:
        table = csv.writer(opened, lineterminator="\n")
        table.writerow(["part", *(field.name for field in fields(Outcome))])
        for part, outcomes in parts.items():
            table.writerows([part, *astuple(outcome)] for outcome in outcomes)


def read(file: Path = BEFORE) -> dict[str, list[Outcome]]:
    """Return what :func:`write` wrote."""
    parts: dict[str, list[Outcome]] = {}
    with file.open(newline="") as opened:
        for row in csv.DictReader(opened):
            outcome = Outcome(
                row["name"],
                float(row["relative"]),
                int(row["iterations"]),
                int(row["passes"]),
                float(row["lower"]),
                float(row["worst"]),
                row["ending"],
            )
            parts.setdefault(row["part"], []).append(outcome)
    return parts
