"""The methods and libraries that are compared on hyper-cleaning of MNIST.

Our methods have the settings of configs/mnist, which are the paper's; each other library has the
best of four settings.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from benchmarks.betty import Betty
from benchmarks.boat import Boat
from benchmarks.hypergradients import Higher, ImplicitCG, TorchOpt
from benchmarks.results import installed
from benchmarks.tasks import Size, Task, cleaning, solver
from lightning_bilevel import IVSP, BilevelModule, BilevelOptimizer, BilevelProblem

METHODS = ("ivsp", "pngbio", "meha", "slm", "f2sa", "vpbgd", "bome")
# IVSP without constants.
OWN = "ivsp_own"
GRID = Path(__file__).parents[1] / "examples" / "grids" / "mnist_libraries.yaml"
PACKAGES = {"boat": "boat-torch", "higher": "higher", "torchopt": "torchopt", "betty": "betty-ml"}
# The steps before an implicit gradient, which holds where y is stationary.
IMPLICIT_STEPS = 20


def libraries() -> dict[str, list[dict[str, Any]]]:
    """Return the settings of each way of another library; the first ones are used."""
    found: dict[str, list[dict[str, Any]]] = yaml.safe_load(GRID.read_text())
    return found


def missing(name: str) -> str | None:
    """Return the package that a library's way needs and that is not installed, if any."""
    package = PACKAGES[name.partition(" ")[0]]
    return package if installed(package) is None else None


def method(name: str, size: Size) -> tuple[Task, BilevelModule, BilevelOptimizer, BilevelProblem]:
    """Return the task of one of our methods, its module, the method and the problem."""
    task = cleaning(size, chosen=IVSP if name == OWN else solver(f"mnist/{name}"))
    return task, *task.begin()


def library(
    name: str, settings: dict[str, Any], size: Size
) -> tuple[Task, nn.Module, Callable[[], object]]:
    """Return the task, the classifier that another library trains, and its outer iteration."""
    task = cleaning(size)
    package, _, how = name.partition(" ")
    if package == "boat":
        boat = Boat(task, how, settings)
        return task, boat.lower_model, boat.step
    lr = tuple(settings["lr"])
    if how == "cg":
        implicit = ImplicitCG(task, IMPLICIT_STEPS, lr)
        return task, implicit.network, implicit.step
    kinds = {"higher": Higher, "torchopt": TorchOpt, "betty": Betty}
    chosen = kinds[package](task, int(how), lr)
    return task, chosen.network, chosen.step
