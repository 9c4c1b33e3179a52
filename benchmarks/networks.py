"""IVSP's own choices on hyper-cleaning: three other networks, and MNIST at the paper's relaxation.

The networks start as torch makes them. The KKT residual is that of the relaxation that IVSP has at
the end, at the first point and at the last, so both are judged alike. The first point has the
multiplier that makes it smallest, the last one that of IVSP.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from functools import partial

import torch
from torch import nn

from benchmarks.outcomes import checks
from benchmarks.tasks import Size, Task, cleaning, solver
from lightning_bilevel import (
    IVSP,
    BilevelError,
    CleaningData,
    DigitsCleaning,
    HyperCleaning,
    MNISTCleaning,
    certify,
)

HIDDEN = 32
NETWORKS = ("ReLU", "tanh", "BatchNorm")
# The paper's constants need 3,761.
MOST_PASSES = 20_000
# The passes of a certificate's proximal point.
JUDGED = 1_000
FULL = Size()


def network(name: str, inputs: int) -> nn.Sequential:
    """Return a network with one hidden layer, as torch initialises it; always the same."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(inputs, HIDDEN)]
    if name == "BatchNorm":
        layers.append(nn.BatchNorm1d(HIDDEN))
    layers.append(nn.Tanh() if name == "tanh" else nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(HIDDEN, 10))


def run_networks(seconds: float) -> None:
    """Run IVSP with no arguments on each network for that processor time, and print how it went."""
    for data in (DigitsCleaning(), MNISTCleaning(n_train=2_000, n_validation=2_000)):
        data.prepare_data()
        data.setup()
        for name in NETWORKS:
            print(f"{type(data).__name__:<15} {name:<10} {clean(data, name, seconds)}", flush=True)


def clean(data: CleaningData, name: str, seconds: float) -> str:
    """Say in words how the KKT residual of IVSP went in that processor time."""

    def build() -> HyperCleaning:
        classifier = network(name, math.prod(data.image_shape))
        return HyperCleaning(data.n_train, classifier=classifier, solver=IVSP)

    module, ivsp, problem = Task(name, build, data).begin()
    start = [part.clone() for part in module.point]
    began, iterations, passes, stopped = time.process_time(), 0, 0, ""
    try:
        while time.process_time() - began < seconds:
            info = ivsp.step(problem=problem)
            iterations, passes = info.iteration, info.passes
    except BilevelError as error:
        stopped = f", stopped: {error}"
    if ivsp.envelope is None or ivsp.multiplier is None:
        return f"no iteration{stopped}"
    judge = partial(certify, problem, envelope=ivsp.envelope, passes=JUDGED)
    first = judge(x=start[0], y=start[1]).smallest_kkt
    x, y = module.point
    last = judge(x=x, y=y, multiplier=ivsp.multiplier).kkt
    return (
        f"KKT {first:.2e} -> {last:.2e}, {first / last:.1f} times smaller, {iterations} "
        f"iterations, {passes} passes{stopped}"
    )


def run_mnist(size: Size = FULL, epsilon: float = 1e-3) -> None:
    """Print the passes to a KKT residual of epsilon, for the paper's constants and IVSP's own.

    Both have the paper's rho, sigma and delta, so that both solve the same problem.
    """
    paper = solver("mnist/ivsp")
    _, ivsp, _ = cleaning(size, chosen=paper).begin()
    assert ivsp.envelope is not None
    own = partial(IVSP, **asdict(ivsp.envelope))
    for name, chosen in (("paper", paper), ("own choices", own)):
        print(f"MNIST, {name:<12} {descend(cleaning(size, chosen=chosen), epsilon)}", flush=True)


def descend(task: Task, epsilon: float) -> str:
    """Say in words how many passes a solver takes to a KKT residual of epsilon."""
    module, chosen, problem = task.begin()
    kkt, iterations, passes, stopped = math.inf, 0, 0, ""
    try:
        for check in checks(MOST_PASSES):
            while iterations < check:
                info = chosen.step(problem=problem)
                iterations, passes = info.iteration, info.passes
            assert chosen.envelope is not None
            kkt = certify(problem, *module.point, chosen.envelope, passes=JUDGED).smallest_kkt
            if kkt <= epsilon or passes >= MOST_PASSES:
                break
    except BilevelError as error:
        stopped = f", stopped: {error}"
    return f"KKT {kkt:.2e} after {iterations} iterations, {passes} passes{stopped}"
