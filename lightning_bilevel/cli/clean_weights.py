"""One weight per training sample, learned on mini-batches, for ``lightning-bilevel clean``."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import ceil, sqrt
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_bilevel.baselines.trusted import TrustedSamples
from lightning_bilevel.data.tables import TensorTable, as_it_is
from lightning_bilevel.modules.reweighting import Reweighting
from lightning_bilevel.modules.weights import SampleWeights
from lightning_bilevel.solvers.streaming_ivsp import StreamingIVSP
from lightning_bilevel.solvers.table_rms import TableRMS

__all__ = ["Plan", "learn_weights", "plan_for"]

_BATCH = 256
_EPOCHS = 7
_FEWEST_STEPS = 1600


class Plan(NamedTuple):
    """How the weights are learned.

    Attributes:
        steps: The number of mini-batches.
        batch_size: The training samples of a mini-batch.
        rate: The rate of AdamW for the network.
        table: The rate of TableRMS for the weights.
    """

    steps: int
    batch_size: int
    rate: float
    table: float


def plan_for(n: int, steps: int | None = None) -> Plan:
    r"""Return the settings for n training samples: batches of at most 256 and of a quarter of them.

    At seven passes the rates are those that were found on 59,000 samples, 1e-4 for the network and
    3 for the weights. A small set is passed more often, p times. Then a weight moves p/7 times as
    often, and its rate is 3 * 7/p. That of the network is :math:`10^{-4} \sqrt{p/7}`: on a thousand
    digits and a hundred wines 1e-3 was better than 1e-4.

    Args:
        n: The number of training samples.
        steps: The number of mini-batches; None is seven passes over the data, at least 1,600.
    """
    batch = min(_BATCH, max(n // 4, min(n, 8)))
    usual = max(_FEWEST_STEPS, ceil(_EPOCHS * n / batch))
    passes = usual * batch / n / _EPOCHS
    return Plan(steps or usual, batch, rate=1e-4 * sqrt(passes), table=3.0 / passes)


def learn_weights(samples: TrustedSamples, plan: Plan, stepped: Callable[[], object]) -> Tensor:
    """Return the learned weight of each training sample, between 0 and 1.

    Args:
        samples: The training samples, the trusted ones, and what makes the network.
        plan: The settings.
        stepped: Called after each step.
    """
    n = len(samples.labels)
    weights = SampleWeights(n)
    solver = partial(
        StreamingIVSP,
        upper_optimizer=partial(TableRMS, lr=plan.table),
        lower_optimizer=partial(AdamW, lr=plan.rate),
    )
    cosine = partial(CosineAnnealingLR, T_max=plan.steps)
    module = Reweighting(samples.network(), weights, solver=solver, scheduler=cosine)
    loaders = {
        "upper": _loader(plan.batch_size, samples.trusted_inputs, samples.trusted_labels),
        "lower": _loader(plan.batch_size, samples.inputs, samples.labels, torch.arange(n)),
    }
    with _quiet():
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=-1,
            max_steps=plan.steps,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[_Stepped(stepped)],
        )
        trainer.fit(module, loaders)
    return weights.values().cpu()


def _loader(batch_size: int, *tensors: Tensor) -> DataLoader[Any]:
    # Batch normalisation cannot take a last batch of one sample.
    return DataLoader(
        TensorTable(*tensors),
        batch_size=min(batch_size, len(tensors[0])),
        shuffle=True,
        drop_last=True,
        collate_fn=as_it_is,
    )


class _Stepped(Callback):
    def __init__(self, stepped: Callable[[], object]) -> None:
        self.stepped = stepped

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.stepped()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Lightning's remarks on devices and workers out of the output of the command."""
    names = ("lightning.pytorch", "lightning.fabric")
    loggers = [logging.getLogger(f"{name}.utilities.rank_zero") for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\.")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
