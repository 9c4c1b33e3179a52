"""IVSP on a growing sample against IVSP on all data, by processor time.

    python -m benchmarks.growing [--task fashion_mnist] [--train 50000] [--validation 5000]
        [--constants paper own] [--seeds 0 1 2] [--budget 120] [--error 0.165] [--kkt 0.03]

Both sides start at the same point and take turns in one process. The time is the processor time of
the optimisation: steps, looks at the noise and the drawing of samples. Test error and KKT residual
are of all data for both sides, in one envelope; they are evaluated in between and cost nothing. A
side ends when it has reached both marks, or after the budget.

The constants are the paper's for MNIST (`paper`), the paper's for the task (`task`), or those that
IVSP chooses (`own`).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.tasks import DATA, solver
from lightning_bilevel import IVSP, Envelope, HyperCleaning, SolverCallable, certify
from lightning_bilevel.plugin.batches import BatchProblem
from lightning_bilevel.plugin.growing import Growing
from lightning_bilevel.plugin.stages import Stages

# The KKT residual counts from this test error on. It is small at the start too, because a network
# of small weights starts at a saddle.
_LEARNED = 0.35
# Evaluations are at times that grow by this factor.
_SPACING = 1.25


@dataclass
class Side:
    """One run, with or without a growing sample.

    Attributes:
        rows: (seconds, iteration, samples, passes, test error, KKT residual) of each evaluation.
    """

    name: str
    module: HyperCleaning
    whole: Any
    growing: Growing | None
    batch: Any
    seconds: float = 0.0
    due: float = 0.5
    rows: list[tuple[float, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        declared = self.module._declared()
        self.optimizer = declared.new_solver()
        self.current = BatchProblem([], self.batch, self.batch, self.whole)
        self.stages = None
        if self.growing is not None:
            self.stages = Stages(self.growing, self.batch, declared)

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

    def evaluate(self, envelope: Envelope, test: Any) -> tuple[float, ...]:
        with torch.no_grad():
            wrong = self.module(test[0]).argmax(1) != test[1]
        error = float(wrong.float().mean())
        kkt = math.inf
        # The certificate takes as long as some iterations: at the start, where nothing is learned,
        # it would tell nothing.
        if error <= _LEARNED:
            kkt = certify(
                self.whole,
                *self.module.point,
                envelope,
                multiplier=self.optimizer.multiplier,
                tolerance=1e-3,
            ).kkt
        row = (
            self.seconds,
            self.info.iteration,
            self.info.samples or 0,
            float(self.info.passes),
            error,
            kkt,
        )
        self.rows.append(row)
        return row

    def first(self, column: int, mark: float) -> float | None:
        """Return when a number first was at most the mark."""
        return next((row[0] for row in self.rows if row[column] <= mark), None)


def run(
    task: str, train: int, validation: int, constants: str, seed: int, args: argparse.Namespace
) -> dict[str, Any]:
    data = DATA[task](n_train=train, n_validation=validation, seed=seed)
    data.setup()
    batch = {"upper": data.upper, "lower": data.lower}
    chosen: SolverCallable = IVSP
    if constants != "own":
        chosen = solver(f"{'mnist' if constants == 'paper' else task}/ivsp")
    envelope = Envelope(rho=0.1, sigma=1.0, delta=1e-3)

    def side(name: str, growing: Growing | None) -> Side:
        torch.manual_seed(seed)
        module = HyperCleaning(train, solver=chosen)
        return Side(name, module, module.bilevel_problem(batch), growing, batch)

    how = Growing(**json.loads(args.growing))
    sides = [side("growing", how), side("full", None)][: 1 if args.alone else 2]
    due = 0.5
    running = list(sides)
    while running:
        for each in list(running):
            each.advance(due)
            row = each.evaluate(envelope, data.test)
            done = all(
                each.first(column, mark) is not None
                for column, mark in ((4, args.error), (5, args.kkt))
            )
            if args.verbose:
                print(each.name, *(f"{v:.4g}" for v in row), flush=True)
            if done or due >= args.budget:
                running.remove(each)
        due *= _SPACING
    found: dict[str, Any] = {"task": task, "train": train, "constants": constants, "seed": seed}
    for each in sides:
        found[each.name] = {
            "error": each.first(4, args.error),
            "kkt": each.first(5, args.kkt),
            "last": each.rows[-1],
            "rows": each.rows,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="fashion_mnist", choices=list(DATA))
    parser.add_argument("--train", type=int, default=50_000)
    parser.add_argument("--validation", type=int, default=5000)
    parser.add_argument(
        "--constants", nargs="+", default=["paper", "own"], choices=["paper", "task", "own"]
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--budget", type=float, default=120.0)
    parser.add_argument("--error", type=float, default=0.165)
    parser.add_argument("--kkt", type=float, default=0.03)
    parser.add_argument("--growing", default="{}", help="arguments of Growing, as JSON")
    parser.add_argument("--alone", action="store_true", help="the growing side alone")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    for seed in args.seeds:
        for constants in args.constants:
            found = run(args.task, args.train, args.validation, constants, seed, args)
            line = f"{args.task} {args.train} {constants} seed {seed}:"
            for name in ("growing", "full"):
                if name in found:
                    line += f" {name} error {found[name]['error']} kkt {found[name]['kkt']}"
            print(line, flush=True)
            if args.out is not None:
                with args.out.open("a") as file:
                    file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
