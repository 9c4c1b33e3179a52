"""An iteration of our MEHA, V-PBGD and BOME against BOAT's MESO, PGDO and VFO.

Both sides have the same data, network, steps and step sizes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.results import Row, Section, installed, skipped
from benchmarks.tasks import Size, Task, cleaning, solver
from benchmarks.timing import in_turns, ratio
from lightning_bilevel.core.lower import LowerTerm

# Ours with settings of the paper for MNIST, and what they are called there.
MESO = {"lr": (9.0, 1.0), "eta": 0.05, "gamma_1": 0.2, "c0": 0.2}
PGDO = {"lr": (2.0, 2.0), "y_hat_lr": 1.0, "gamma_init": 1.0, "gamma_max": 1.0}
VFO = {"lr": (3.0, 3.0), "y_hat_lr": 1.0, "u1": 0.5}
PAIRS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "MESO": ("meha", {"alpha": 9.0, "beta": 1.0, "eta": 0.05, "gamma": 5.0, "c": 0.2}, MESO),
    "PGDO": ("vpbgd", {}, PGDO),
    "VFO": ("bome", {}, VFO),
}
OURS = {"meha": "MEHA", "vpbgd": "V-PBGD", "bome": "BOME"}
# What BOAT reads of each operator besides; none of it changes what is computed here.
REQUIRED = {
    "MESO": {"y_hat_lr": 1.0},
    "PGDO": {"gamma_argmax_step": 1, "update_y_ahead": False, "penalty": "difference"},
    "VFO": {"eta": 1.0},
}


class Weights(nn.Module):
    """The upper level as BOAT takes it, a module."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(count))


def upper_loss(feed: dict[str, Tensor], upper: Weights, lower: nn.Module) -> Tensor:
    return cross_entropy(lower(feed["images"]), feed["labels"])


def lower_loss(feed: dict[str, Tensor], upper: Weights, lower: nn.Module) -> Tensor:
    return (
        upper.logits.sigmoid()
        * cross_entropy(lower(feed["images"]), feed["labels"], reduction="none")
    ).mean()


class Boat:
    """BOAT's hyper-cleaning by a first-order operator, with gradient steps in both levels."""

    def __init__(
        self, task: Task, operator: str, settings: dict[str, Any], lower_steps: int = 1
    ) -> None:
        from boat_torch import Problem

        self.folder = tempfile.TemporaryDirectory()
        upper, lower = task.data.upper, task.data.lower
        self.upper_model, self.lower_model = Weights(len(lower[0])), task.build().classifier
        x, y = list(self.upper_model.parameters()), list(self.lower_model.parameters())
        upper_lr, lower_lr = settings["lr"]
        constants = {name: value for name, value in settings.items() if name != "lr"}
        config = {
            "fo_op": operator,
            "gm_op": None,
            "na_op": None,
            "upper_level_model": self.upper_model,
            "lower_level_model": self.lower_model,
            "upper_level_var": x,
            "lower_level_var": y,
            "upper_level_opt": torch.optim.SGD(x, lr=upper_lr),
            "lower_level_opt": torch.optim.SGD(y, lr=lower_lr),
            "lower_iters": lower_steps,
            "device": "cpu",
            "return_grad": False,
            "fo_ol_batch_input": False,
            "loss_log_path": f"{self.folder.name}/losses.json",
            operator: {**REQUIRED[operator], **constants},
        }
        losses = {
            f"{level}_level_loss": {"function": f"{__name__}.{level}_loss"}
            for level in ("upper", "lower")
        }
        self.problem = Problem(config, losses).build_ll_solver().build_ul_solver()
        self.feeds = [
            {"images": images, "labels": labels} for images, labels in (lower[:2], upper[:2])
        ]
        self.iteration, self.operator_time = 0, 0.0

    def step(self) -> None:
        _, self.operator_time = self.problem.run_iter(*self.feeds, self.iteration)
        self.iteration += 1


def compare(size: Size, operator: str, whole: bool = False) -> tuple[float, float]:
    """Return how many times as long BOAT takes per iteration: all of it, and without its logs.

    Args:
        size: The size.
        operator: BOAT's.
        whole: Whether our g is one function, which BOAT's is, instead of a declared part that
            depends on y alone.
    """
    name, changes, settings = PAIRS[operator]
    task = cleaning(size, chosen=solver(f"mnist/{name}", **changes))
    method, problem = task.alone()
    if whole:
        problem.lower_terms = [LowerTerm(term) for term in problem.lower_terms]
    rival, own = Boat(task, operator, settings), []

    def theirs() -> None:
        rival.step()
        own.append(rival.operator_time)

    sides: list[Callable[[], object]] = [lambda: method.step(problem=problem), theirs]
    ours, full = in_turns(sides, rounds=2 * size.steps, warm_up=3)
    return ratio(full, ours), ratio(own[3:], ours)


def run(size: Size) -> Section:
    rows = []
    for operator, (name, _, _) in PAIRS.items():
        what = f"BOAT's {operator} / our {OURS[name]}"
        if installed("boat-torch") is None or installed("higher") is None:
            rows.append(skipped(what, "boat-torch"))
            continue
        full, operator_only = compare(size, operator)
        plain, _ = compare(size, operator, whole=True)
        note = (
            f"{operator_only:.2f} without what BOAT logs of each iteration; {plain:.2f} with our g "
            "as one function"
        )
        rows.append(Row(what, full, at_least=1.7, note=note))
    return Section("Time of an iteration, MNIST 5,000 + 5,000, MLP 784-32-10, one inner step", rows)
