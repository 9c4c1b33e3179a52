"""The test error on hyper-cleaning of MNIST against time: our methods and other libraries.

Also the other way round: the time that each takes to a test error of 0.1.

The time is the processor time of the steps, which other work on the machine hardly changes; it
counts every thread, so run it with OMP_NUM_THREADS=1. Our methods have the paper's settings, each
other library the first of its settings in examples/grids/mnist_libraries.yaml. IVSP without
constants is there too.

Run: python -m benchmarks.accuracy, which orders the settings of the libraries by validation loss.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.contenders import METHODS, OWN, libraries, library, method, missing
from benchmarks.results import Curve, Row, Section, skipped
from benchmarks.tasks import Size
from benchmarks.timing import doublings
from lightning_bilevel import BilevelError

# Seconds of optimisation for each of the settings of a library.
TUNING = 25.0
# A classifier of the clean samples alone comes to 0.072.
ERROR = 0.1
# Between two of the times of the table, which double.
LOOKS = 4


def error(network: nn.Module, batch: tuple[Tensor, ...]) -> float:
    """Return the share of wrong predictions; nan for a network that has diverged."""
    images, labels = batch[:2]
    with torch.no_grad():
        logits = network(images)
    if not logits.isfinite().all():
        return math.nan
    return float((logits.argmax(1) != labels).float().mean())


def loss(network: nn.Module, batch: tuple[Tensor, ...]) -> float:
    images, labels = batch[:2]
    with torch.no_grad():
        return float(cross_entropy(network(images), labels))


def descent(
    name: str, step: Callable[[], object], measure: Callable[[], float], times: list[float]
) -> Curve:
    """Return what is measured against the time, at the first iteration at or after each time.

    Args:
        name: The name of the curve.
        step: An outer iteration.
        measure: What is measured; nan ends the run.
        times: The seconds of iterations after which it is measured.
    """
    curve = Curve(name, [], [])
    spent = 0.0
    for until in times:
        while spent < until:
            began = time.process_time()
            try:
                step()
            except (BilevelError, RuntimeError):  # a method that diverges has come to its end
                return curve
            spent += time.process_time() - began
        found = measure()
        if math.isnan(found):
            return curve
        curve.xs.append(spent)
        curve.ys.append(found)
    return curve


def looks(most: float) -> list[float]:
    """Return the times of the table, and between each two of them three more."""
    times = doublings(most)
    between = [time * 2 ** (k / LOOKS) for time in times[:-1] for k in range(LOOKS)]
    return [*between, times[-1]]


def ours(name: str, size: Size) -> Curve:
    task, module, chosen, problem = method(name, size)
    network, test = module.classifier, task.data.test
    return descent(
        name,
        lambda: chosen.step(problem=problem),
        lambda: error(network, test),
        looks(size.seconds),
    )


def theirs(name: str, size: Size) -> Curve:
    task, network, step = library(name, libraries()[name][0], size)
    return descent(name, step, lambda: error(network, task.data.test), looks(size.seconds))


def rows(curve: Curve, most: float) -> list[Row]:
    """Return the last error, with the earlier ones as its note, and the time to `ERROR`."""
    what = f"{curve.name}: test error after {most:g} s"
    looked = list(zip(curve.xs, curve.ys, strict=True))
    earlier = ", ".join(f"{y:.3f} after {x:.3g} s" for x, y in looked[::LOOKS])
    if len(looked) < len(looks(most)):
        note = f"it diverged; {earlier}" if earlier else "it diverged at once"
        last = Row(what, None, note=note)
    else:
        last = Row(what, curve.ys[-1], note=earlier.rpartition(", ")[0])
    reached = next((x for x, y in looked if y <= ERROR), None)
    note = "" if reached else f"not within {most:g} s"
    return [last, Row(f"{curve.name}: seconds to a test error of {ERROR:g}", reached, note=note)]


def run(size: Size) -> Section:
    found = []
    curves = [ours(name, size) for name in (*METHODS, OWN)]
    for curve in curves:
        found += rows(curve, size.seconds)
    for name in libraries():
        if package := missing(name):
            found.append(skipped(f"{name}: test error after {size.seconds:g} s", package))
            continue
        curves.append(theirs(name, size))
        found += rows(curves[-1], size.seconds)
    return Section("Test error against time, MNIST hyper-cleaning", found, curves)


def main() -> None:
    for name, candidates in libraries().items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        found = []
        for settings in candidates:
            task, network, step = library(name, settings, Size())
            clean = task.data.upper
            times = doublings(TUNING)
            curve = descent(name, step, lambda n=network, b=clean: loss(n, b), times)
            ended = len(curve.ys) == len(times)
            found.append((curve.ys[-1] if ended else math.inf, settings))
        for value, settings in sorted(found, key=lambda pair: pair[0]):
            print(f"{name:12s} {value:10.4g} {settings}", flush=True)


if __name__ == "__main__":
    main()
