"""IVSP on a growing sample against IVSP on all data, by processor time.

    python -m benchmarks.growing [--task fashion_mnist] [--train 50000] [--validation 5000]
        [--constants paper own] [--seeds 0 1 2] [--budget 120] [--error 0.2 0.165] [--kkt 0.03]
    python -m benchmarks.growing --task glyphs --train 512 --error 0.25 0.2 --kkt 0

Both sides start at the same point and take turns in one process. The time is the processor time of
the optimisation: steps, looks at the noise and the drawing of samples. Test error and KKT residual
are of all data for both sides, in one envelope; they are evaluated in between and cost nothing. A
side ends when it has reached all marks, or after the budget. With ``--ratio 3`` the growing side
has a third of the budget, and the full side three times as long as the growing one took to the last
of its marks: where it has not reached a mark then, it is three times as slow or more.

The constants are the paper's for MNIST (`paper`), the same with x measured in a unit of 300
(`cleaning`), the paper's for the task (`task`), or those that IVSP chooses (`own`). The task
`glyphs` is few-shot learning with three ways and eight channels, with the constants of its config
(`task`) or IVSP's own.
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
from lightning_bilevel import (
    IVSP,
    BilevelModule,
    Envelope,
    FewShot,
    GlyphEpisodes,
    HyperCleaning,
    SolverCallable,
    certify,
)
from lightning_bilevel.plugin.batches import BatchProblem
from lightning_bilevel.plugin.growing import Growing
from lightning_bilevel.plugin.stages import Stages

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
        error: The error of a module on the test data.
        envelope: That of the certificate.
    """

    build: Callable[[], BilevelModule]
    batch: dict[str, Any]
    error: Callable[[Any], float]
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

    def error(module: HyperCleaning) -> float:
        return float((module(data.test[0]).argmax(1) != data.test[1]).float().mean())

    batch = {"upper": data.upper, "lower": data.lower}
    return Task(build, batch, error, Envelope(rho=0.1, sigma=1.0, delta=1e-3))


def few_shot(train: int, validation: int, constants: str, seed: int) -> Task:
    data = GlyphEpisodes(n_train=train, n_validation=1, n_test=validation, ways=3, glyph_seed=seed)
    data.setup()
    chosen: SolverCallable = IVSP if constants == "own" else solver("glyphs/ivsp")

    def build() -> FewShot:
        torch.manual_seed(seed)
        unit = math.sqrt(train / 128)
        return FewShot(train, ways=3, channels=8, lower_unit=unit, solver=chosen)

    def error(module: FewShot) -> float:
        wrong = module.predict(data.test).argmax(-1) != data.test.query_labels
        return float(wrong.float().mean())

    batch = {"upper": data.upper, "lower": data.lower}
    return Task(build, batch, error, Envelope(rho=2.5, sigma=0.0, delta=1e-3))


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
        declared = self.module._declared()
        batch = self.task.batch
        self.whole = self.module.bilevel_problem(batch)
        self.optimizer = declared.new_solver()
        self.current = BatchProblem([], batch, batch, self.whole)
        self.stages = None
        if self.growing is not None:
            self.stages = Stages(self.growing, batch, declared)

    def advance(self, until: float) -> None:
        """Make outer iterations up to a time."""
        while self.seconds < until:
            began = time.process_time()
            problem = self.current.problem
            if self.stages is not None:
                problem = self.stages.next_problem(
                    self.optimizer, self.current, lambda b: (self.module.bilevel_problem(b), b)
                ).problem
            self.info = self.optimizer.step(problem=problem)
            self.seconds += time.process_time() - began

    def evaluate(self, certified: bool) -> tuple[float, ...]:
        with torch.no_grad():
            error = self.task.error(self.module)
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
        info = self.info
        row = (
            self.seconds,
            info.iteration,
            info.samples or 0,
            float(info.passes),
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
    parser.add_argument("--task", default="fashion_mnist", choices=[*DATA, "glyphs"])
    parser.add_argument("--train", type=int, default=50_000)
    parser.add_argument("--validation", type=int, help="5000, or 200 test episodes of the glyphs")
    parser.add_argument("--constants", nargs="+", choices=["paper", "cleaning", "task", "own"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--budget", type=float, default=120.0)
    parser.add_argument("--error", nargs="+", type=float, default=[0.165])
    parser.add_argument("--kkt", type=float, default=0.03, help="0 leaves out the certificates")
    parser.add_argument("--ratio", type=float)
    parser.add_argument("--growing", default="{}", help="arguments of Growing, as JSON")
    parser.add_argument("--alone", action="store_true", help="the growing side alone")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    few = args.task == "glyphs"
    size = args.validation or (200 if few else 5000)
    for seed in args.seeds:
        for constants in args.constants or (["task", "own"] if few else ["paper", "own"]):
            if few:
                task = few_shot(args.train, size, constants, seed)
            else:
                task = cleaning(args.task, args.train, size, constants, seed)
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
                times = [f"{mark} in {_time(side.first(_ERROR, mark))}" for mark in args.error]
                line += f" {side.name} error {', '.join(times)};"
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
