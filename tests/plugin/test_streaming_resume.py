"""A run on mini-batches that goes on from a checkpoint is the run that was not interrupted."""

from __future__ import annotations

import random
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from records import same
from running import same_parameters, trainer
from streaming import ADAMW, SGD, STREAMED, Resumable, Streamed, loader, loaders
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from lightning_bilevel import AID, DARTS, MEHA, SOBA, VPBGD, HJFBiO, PNGBiO, StreamingIVSP

PER_STEP = {"scheduler": partial(CosineAnnealingLR, T_max=12), "interval": "step"}
PER_EPOCH = {"scheduler": partial(CosineAnnealingLR, T_max=3)}
SOLVERS: dict[str, Any] = {
    "f2sa": STREAMED,
    "streaming ivsp": partial(StreamingIVSP, upper_optimizer=SGD, lower_optimizer=ADAMW),
    "meha": partial(MEHA, upper_optimizer=ADAMW, lower_optimizer=SGD),
    "vpbgd": partial(VPBGD, lower_optimizer=ADAMW),
    "pngbio": partial(PNGBiO, upper_optimizer=SGD, lower_optimizer=SGD),
    "soba": partial(SOBA, upper_optimizer=SGD, lower_optimizer=ADAMW),
    # An iteration takes four batches: the run is stopped in the middle of the second.
    "neumann": partial(
        AID, T=1, N=2, linear_solver="neumann", upper_optimizer=ADAMW, lower_optimizer=SGD
    ),
    "hjfbio": partial(HJFBiO, upper_optimizer=ADAMW, lower_optimizer=ADAMW),
    "darts": partial(DARTS, upper_optimizer=ADAMW, lower_optimizer=SGD),
}


class Spectral(Streamed):
    """A layer whose buffers change the loss: y and z have their own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.network[0] = nn.utils.spectral_norm(self.network[0])
        self.declare(upper=self.logits, lower=self.network, solver=STREAMED)


def run(
    tmp_path: Path, module: Any, data: Any, ckpt_path: Any = None, **options: Any
) -> tuple[Any, Any]:
    # Whatever has been drawn before, a resumed run goes on with its own numbers.
    torch.manual_seed(5 if ckpt_path is None else 99)
    random.seed(5 if ckpt_path is None else 99)
    saving = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=6)
    fit = trainer(
        tmp_path,
        **{
            "max_epochs": 3,
            "enable_checkpointing": True,
            "callbacks": [saving],
            "num_sanity_val_steps": 0,
            **options,
        },
    )
    with warnings.catch_warnings():
        # Lightning's, of folders that exist and of its own saves under manual optimisation.
        warnings.simplefilter("ignore", UserWarning)
        fit.fit(module, data, loader(20, 3, 20), ckpt_path=ckpt_path)
    return fit, module


def resumable() -> dict[str, Resumable]:
    return {"upper": Resumable(20, 1, 5), "lower": Resumable(30, 2, 10)}


def same_end(first: tuple[Any, Any], second: tuple[Any, Any]) -> None:
    """Parameters, running statistics, the solver with its optimisers, and the rates."""
    assert same_parameters(first[1], second[1])
    for a, b in zip(first[1].buffers(), second[1].buffers(), strict=True):
        assert torch.equal(a, b)
    states = []
    for fit, _ in (first, second):
        state = fit.optimizers[0].state_dict()
        memory = {**state["state"][0], "optimization_time": 0.0}
        states.append({**state, "state": {0: memory}})
    assert same(*states)


@pytest.mark.parametrize("name", SOLVERS)
def test_in_the_middle_of_an_epoch(tmp_path: Path, name: str) -> None:
    """Dropout, batch normalisation, momentum, schedule, and a loader that keeps its place."""
    schedule = PER_STEP if name != "vpbgd" else {**PER_STEP, "frequency": 2}
    make = partial(Streamed, solver=SOLVERS[name], scheduler=schedule)
    whole = run(tmp_path, make(), resumable())
    assert whole[1].last_step.iteration == 12
    resumed = run(tmp_path, make(), resumable(), tmp_path / "step=6.ckpt")
    assert resumed[1].last_step.iteration == 12
    same_end(whole, resumed)
    # The numbers of the run matter: with other masks it would be another one.
    other = torch.load(tmp_path / "step=6.ckpt", weights_only=True)
    del other["lightning_bilevel"]["stream"]
    torch.save(other, tmp_path / "other.ckpt")
    assert not same_parameters(
        whole[1], run(tmp_path, make(), resumable(), tmp_path / "other.ckpt")[1]
    )


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("schedule", [PER_STEP, PER_EPOCH], ids=["step", "epoch"])
def test_at_the_end_of_an_epoch_with_plain_loaders(
    tmp_path: Path, workers: int, schedule: Any
) -> None:
    """Shuffling draws from torch's generator, whose place the checkpoint holds."""
    saving = ModelCheckpoint(
        tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True, every_n_epochs=1
    )
    whole = run(
        tmp_path,
        Streamed(scheduler=schedule),
        loaders(num_workers=workers),
        callbacks=[saving],
    )
    resumed = run(
        tmp_path,
        Streamed(scheduler=schedule),
        loaders(num_workers=workers),
        tmp_path / "epoch=0.ckpt",
    )
    same_end(whole, resumed)


def test_from_a_checkpoint_of_the_validation(tmp_path: Path) -> None:
    """Lightning saves there if a validation metric is monitored; the epoch's rates come after."""
    saving = ModelCheckpoint(tmp_path, "{epoch}", monitor="val_loss", save_top_k=-1)
    whole = run(tmp_path, Streamed(scheduler=PER_EPOCH), loaders(), callbacks=[saving])
    resumed = run(tmp_path, Streamed(scheduler=PER_EPOCH), loaders(), tmp_path / "epoch=0.ckpt")
    same_end(whole, resumed)


def test_the_buffers_of_z_are_restored_too(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        modules = [Spectral(norm=False) for _ in range(2)]
    whole = run(tmp_path, modules[0], resumable())
    resumed = run(tmp_path, modules[1], resumable(), tmp_path / "step=6.ckpt")
    same_end(whole, resumed)


def test_numbers_of_the_losses_are_apart_from_those_of_the_loaders(tmp_path: Path) -> None:
    """What else draws from torch's generator during a run does not change its masks."""

    class Draws(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            torch.rand(7)

    ends = []
    for callbacks in ([], [Draws()]):
        options = {"callbacks": callbacks, "enable_checkpointing": False}
        ends.append(run(tmp_path, Streamed(), resumable(), **options)[1])
    assert same_parameters(*ends)
