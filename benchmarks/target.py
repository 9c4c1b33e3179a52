"""The optimisation time to a validation loss of 0.1 and of 0.01 on hyper-cleaning of MNIST.

Our methods are compared with other libraries.

Only the steps count as time; the loss is evaluated after each of them. Every method has the best of
its four settings in examples/grids/mnist_target.yaml, which stands first; IVSP's are the paper's.

Run: python -m benchmarks.target, which finds the best settings of each method.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.betty import Betty
from benchmarks.boat import Boat
from benchmarks.hypergradients import Higher, ImplicitCG, TorchOpt
from benchmarks.results import Curve, Row, Section, installed, skipped
from benchmarks.tasks import Size, Task, cleaning, solver
from benchmarks.timing import seconds
from lightning_bilevel import BilevelError

GRID = Path(__file__).parents[1] / "examples" / "grids" / "mnist_target.yaml"
TARGETS = (0.1, 0.01)
PACKAGES = {"boat": "boat-torch", "higher": "higher", "torchopt": "torchopt", "betty": "betty-ml"}
# The steps before an implicit gradient, which holds where y is stationary.
IMPLICIT_STEPS = 20
# IVSP comes first; all others may take so many times as long as it did.
PATIENCE = 3.5
# Seconds of optimisation for each of the settings.
TUNING = 25.0


def contender(
    name: str, settings: dict[str, Any], size: Size
) -> tuple[Task, nn.Module, Callable[[], object]]:
    """Return the task, the classifier that is trained, and an outer iteration."""
    library, _, how = name.partition(" ")
    if not how:
        task = cleaning(size, chosen=solver(f"mnist/{name}", **settings))
        module = task.build()
        method = module._declaration.solver(module._declaration.groups())
        problem = task.problem(module)
        return task, module.classifier, lambda: method.step(problem=problem)
    task = cleaning(size)
    if library == "boat":
        boat = Boat(task, how, settings)
        return task, boat.lower_model, boat.step
    lr = tuple(settings["lr"])
    if how == "cg":
        implicit = ImplicitCG(task, IMPLICIT_STEPS, lr)
        return task, implicit.network, implicit.step
    kinds = {"higher": Higher, "torchopt": TorchOpt, "betty": Betty}
    unrolled = kinds[library](task, int(how), lr)
    return task, unrolled.network, unrolled.step


def descent(name: str, settings: dict[str, Any], size: Size) -> Curve:
    """Return the validation loss over the optimisation time, up to the last target or the limit."""
    task, network, step = contender(name, settings, size)
    images, labels = task.data.upper[:2]
    spent, curve = 0.0, Curve(name, [], [])
    while spent < size.seconds:
        try:
            spent += seconds(step)
        except (BilevelError, RuntimeError):  # a method that diverges has come to its end
            break
        with torch.no_grad():
            loss = float(cross_entropy(network(images), labels))
        if not math.isfinite(loss):
            break
        curve.xs.append(spent)
        curve.ys.append(loss)
        if loss <= TARGETS[-1]:
            break
    return curve


def time_to(curve: Curve, target: float) -> float | None:
    return next((x for x, y in zip(curve.xs, curve.ys, strict=True) if y <= target), None)


def last(curve: Curve) -> float:
    """Return the final loss of a run: a low loss before it diverged does not count."""
    return curve.ys[-1] if curve.ys else math.inf


def run(size: Size) -> Section:
    rows, curves, limited = [], [], size
    for name, (settings, *_) in yaml.safe_load(GRID.read_text()).items():
        package = PACKAGES.get(name.partition(" ")[0])
        if package and installed(package) is None:
            rows.append(skipped(f"{name}: time to {TARGETS[-1]}", package))
            continue
        curve = descent(name, settings, limited)
        if name == "ivsp" and (mine := time_to(curve, TARGETS[-1])) is not None:
            limited = replace(size, seconds=min(size.seconds, PATIENCE * mine))
        curves.append(Curve("IVSP" if name == "ivsp" else name, curve.xs, curve.ys))
        end = (
            f"{last(curve):.3g} after {curve.xs[-1]:.3g} s, {len(curve.xs)} iterations"
            if curve.xs
            else "it diverged at once"
        )
        for target in TARGETS:
            time = time_to(curve, target)
            # What was not reached is no number, and says how far it came.
            rows.append(Row(f"{name}: time to {target}", time, "s", note="" if time else end))
    return Section(
        "Time to a validation loss, MNIST hyper-cleaning",
        rows + verdicts(curves, limited.seconds),
        curves,
    )


def verdicts(curves: list[Curve], limit: float) -> list[Row]:
    """Compare IVSP with the fastest of all others.

    A method that misses a target is taken to need at least all of the time.
    """
    rows = []
    ours = next(curve for curve in curves if curve.name == "IVSP")
    rivals = [curve for curve in curves if " " in curve.name]
    for target in TARGETS:
        mine = time_to(ours, target)
        for who, others, least in (
            ("all others", curves, 1.0),
            ("other libraries", rivals, 3.0 if target == TARGETS[-1] else None),
        ):
            reached = {curve.name: time_to(curve, target) for curve in others if curve is not ours}
            if mine is None or not reached:
                continue
            best = min(reached, key=lambda name: reached[name] or math.inf)
            none = reached[best] is None
            note = (
                f"none reached it: more than this, from the limit of {limit:.3g} s"
                if none
                else f"the fastest is {best}"
            )
            rows.append(
                Row(
                    f"IVSP to {target} before {who}",
                    (reached[best] or limit) / mine,
                    "times",
                    at_least=least,
                    note=note,
                )
            )
    return rows


def main() -> None:
    for name, candidates in yaml.safe_load(GRID.read_text()).items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        found = [
            (descent(name, settings, Size(seconds=TUNING)), settings) for settings in candidates
        ]
        for curve, settings in sorted(found, key=lambda pair: last(pair[0])):
            reached = [time_to(curve, target) for target in TARGETS]
            print(
                f"{name:12s} {last(curve):10.4g} {reached} {len(curve.xs)} {settings}", flush=True
            )


if __name__ == "__main__":
    main()
