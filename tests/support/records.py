"""What is kept of a run, and how it is compared."""

from __future__ import annotations

from dataclasses import asdict, fields, is_dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer


class Recorder(Callback):
    """Keeps the record of each step, without its time.

    Args:
        without: What else is left out.
    """

    def __init__(self, *without: str) -> None:
        self.without = without
        self.steps: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        known = asdict(pl_module.last_step)
        self.steps.append(
            {
                name: value
                for name, value in known.items()
                if name not in ("optimization_time", *self.without)
            }
        )


def timeless(optimizer: Any) -> dict[str, Any]:
    """The state of a solver but its time."""
    state: dict[str, Any] = optimizer.state_dict()
    state["state"]["progress"]["optimization_time"] = None
    return state


def same(a: Any, b: Any) -> bool:
    """Whether two states are equal, tensors bit for bit and in the same dtype."""
    if is_dataclass(a):
        return same(vars(a), vars(b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if is_dataclass(a) and type(a) is type(b):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return bool(a == b) or (a != a and b != b)  # nan is nan
