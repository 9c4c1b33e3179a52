"""Runs of bilevel modules by Trainer, command line and hand, and what is read of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from places import SYNTHETIC
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from lightning_bilevel.__main__ import main


def trainer(tmp_path: Any, **kwargs: Any) -> Trainer:
    """A Trainer that is silent and leaves nothing behind, unless it is asked to."""
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "enable_checkpointing": False,
    }
    return Trainer(
        accelerator="cpu", default_root_dir=tmp_path, **{**quiet, "max_epochs": -1, **kwargs}
    )


def fit(tmp_path: Path, *args: str, config: Path = SYNTHETIC / "ivsp.yaml") -> None:
    """``lightning-bilevel fit`` on a config, which leaves its files in a folder."""
    main(["fit", "--config", str(config), f"--trainer.default_root_dir={tmp_path}", *args])


def bare(module: Any, batch: Any, steps: int) -> list[Any]:
    """The steps that a Trainer would make, in a loop without one."""
    declared = module._declaration
    solver = declared.new_solver()
    problem = module.bilevel_problem(batch)
    return [solver.step(problem=problem) for _ in range(steps)]


def same_parameters(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def events(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator
