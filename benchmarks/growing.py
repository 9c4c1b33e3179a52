"""IVSP on a growing sample against IVSP on all data, by processor time.

    python -m benchmarks.growing [--task fashion_mnist] [--train 50000] [--validation 5000]
        [--constants paper own] [--seeds 0 1 2] [--budget 120] [--error 0.2 0.17] [--kkt 0.03]

Both sides start at the same point and take turns in one process. The time is the processor time of
the optimisation: steps and the drawing of samples. Test error and KKT residual are of all data for
both sides, in one envelope; they are evaluated in between and cost nothing. A side ends when it has
reached all marks, or after the budget. With ``--ratio 3`` the growing side has a third of the
budget, and the full side three times as long as the growing one took to the last of its marks:
where it has not reached a mark then, it is three times as slow or more.

The constants are the paper's for MNIST (`paper`), the same with x measured in a unit of 300
(`cleaning`), the paper's for the task (`task`), or those that IVSP chooses (`own`).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.tasks import DATA, solver
from lightning_bilevel import IVSP, Envelope, HyperCleaning, SolverCallable, certify
from lightning_bilevel.data.fullbatch import Growing, NestedSample

# The KKT residual counts from this test error on. It is small at the start too, because a network
# of small weights starts at a saddle.
_LEARNED = 0.35
# Evaluations are at times that grow by this factor.
_SPACING = 1.25
# The columns of a row that have marks.
_ERROR, _KKT = 4, 5


@dataclass
class Task:
    """What both sides solve.

    Attributes:
        build: Makes the module at its start.
        batch: All data.
        test: The test data.
        envelope: That of the certificate.
    """

    build: Callable[[], HyperCleaning]
    batch: dict[str, Any]
    test: Any
    envelope: Envelope


def cleaning(name: str, train: int, validation: int, constants: str, seed: int) -> Task:
    data = DATA[name](n_train=train, n_validation=validation, seed=seed)
    data.setup()
    chosen: SolverCallable = IVSP
    if constants != "own":
        chosen = solver(f"{name if constants == 'task' else 'mnist'}/ivsp")
    unit = 300.0 if constants == "cleaning" else 1.0

    def build() -> HyperCleaning:
        torch.manual_seed(seed)
        pixels = math.prod(data.image_shape)
        return HyperCleaning(train, pixels, upper_unit=unit, solver=chosen)

    batch = {"upper": data.upper, "lower": data.lower}
    return Task(build, batch, data.test, Envelope(rho=0.1, sigma=1.0, delta=1e-3))


@dataclass
class Side:
    """One run, with or without a growing sample.

    Attributes:
        rows: (seconds, iteration, samples, passes, test error, KKT residual) of each evaluation.
        budget: When it ends.
    """

    name: str
    task: Task
    growing: Growing | None
    budget: float
    seconds: float = 0.0
    rows: list[tuple[float, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.module = self.task.build()
        self.optimizer = self.module._declared().new_solver()
        self.problem = self.whole = self.module.bilevel_problem(self.task.batch)
        self.sample: NestedSample | None = None
        if self.growing is not None:
            self.sample = NestedSample(self.growing, self.task.batch)

    def advance(self, until: float) -> None:
        """Make outer iterations up to a time."""
        while self.seconds < until:
            began = time.process_time()
            iteration = self.optimizer.progress.iterations
            if self.sample is not None:
                batch = self.sample.at(iteration)
                if self.sample.begins:
                    self.optimizer.problem_changed()
                if self.sample.begins or not iteration:
                    self.problem = self.module.bilevel_problem(batch)
                    self.problem.sampled_from(self.whole, self.sample.share)
            self.info = self.optimizer.step(problem=self.problem)
            self.seconds += time.process_time() - began

    def evaluate(self, certified: bool) -> tuple[float, ...]:
        inputs, labels = self.task.test[:2]
        with torch.no_grad():
            error = float((self.module(inputs).argmax(1) != labels).float().mean())
        kkt = math.inf
        # The certificate takes as long as some iterations: at the start, where nothing is learned,
        # it would tell nothing.
        if certified and error <= _LEARNED:
            kkt = certify(
                self.whole,
                *self.module.point,
                self.task.envelope,
                multiplier=self.optimizer.multiplier,
                tolerance=1e-3,
            ).kkt
        samples = 0 if self.sample is None else self.sample.sizes[self.sample.number]
        row = (
            self.seconds,
            self.info.iteration,
            samples,
            float(self.info.passes),
            error,
            kkt,
        )
        self.rows.append(row)
        return row

    def first(self, column: int, mark: float) -> float | None:
        """Return when a number first was at most the mark."""
        return next((row[0] for row in self.rows if row[column] <= mark), None)


def compare(task: Task, args: argparse.Namespace) -> list[Side]:
    """Run both sides in turns, and return them."""
    how = Growing(**json.loads(args.growing))
    ratio = args.ratio or 1.0
    sides = [Side("growing", task, how, args.budget / ratio), Side("full", task, None, args.budget)]
    sides = sides[: 1 if args.alone else 2]
    marks = [*((_ERROR, mark) for mark in args.error), *([(_KKT, args.kkt)] if args.kkt else [])]
    due = 0.5
    running = list(sides)
    while running:
        for side in list(running):
            until = min(due, side.budget)
            if side.seconds < until:
                side.advance(until)
                # Once the residual has reached its mark, certificates would tell nothing more.
                row = side.evaluate(bool(args.kkt) and side.first(_KKT, args.kkt) is None)
                if args.verbose:
                    print(side.name, *(f"{v:.4g}" for v in row), flush=True)
            reached = [side.first(column, mark) for column, mark in marks]
            if None not in reached or side.seconds >= side.budget:
                running.remove(side)
                if side is sides[0] and args.ratio is not None:
                    last = max((seconds for seconds in reached if seconds is not None), default=0.0)
                    sides[-1].budget = min(args.budget, ratio * last)
        due *= _SPACING
    return sides


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="fashion_mnist", choices=[*DATA])
    parser.add_argument("--train", type=int, default=50_000)
    parser.add_argument("--validation", type=int, default=5000)
    parser.add_argument(
        "--constants",
        nargs="+",
        choices=["paper", "cleaning", "task", "own"],
        default=["paper", "own"],
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--budget", type=float, default=120.0)
    parser.add_argument("--error", nargs="*", type=float, default=[])
    parser.add_argument("--kkt", type=float, default=0.03, help="0 leaves out the certificates")
    parser.add_argument("--ratio", type=float)
    parser.add_argument("--growing", default="{}", help="arguments of Growing, as JSON")
    parser.add_argument("--alone", action="store_true", help="the growing side alone")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    for seed in args.seeds:
        for constants in args.constants:
            task = cleaning(args.task, args.train, args.validation, constants, seed)
            found: dict[str, Any] = {
                "task": args.task,
                "train": args.train,
                "constants": constants,
                "seed": seed,
            }
            line = f"{args.task} {args.train} {constants} seed {seed}:"
            for side in compare(task, args):
                found[side.name] = {
                    "error": {str(mark): side.first(_ERROR, mark) for mark in args.error},
                    "kkt": side.first(_KKT, args.kkt) if args.kkt else None,
                    "seconds": side.seconds,
                    "rows": side.rows,
                }
                line += f" {side.name}"
                for mark in args.error:
                    line += f" error {mark} in {_time(side.first(_ERROR, mark))};"
                if args.kkt:
                    line += f" kkt {args.kkt} in {_time(side.first(_KKT, args.kkt))};"
                smallest = min(row[_ERROR] for row in side.rows)
                line += f" smallest error {smallest:.4f} in {side.seconds:.0f} s."
            print(line, flush=True)
            if args.out is not None:
                with args.out.open("a") as file:
                    file.write(json.dumps(found) + "\n")


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"


if __name__ == "__main__":
    main()
