"""A step on a mini-batch through Trainer.fit, with its loaders, against the loop written by hand.

Both sides step in turn: after each batch of the fit, its last callback makes one step by hand.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.results import Row, Section
from benchmarks.streaming import LOWER, SAMPLES, UPPER, ByHand, batches, network, weighted
from benchmarks.tasks import Size
from benchmarks.timing import ratio
from lightning_bilevel import F2SA, BilevelModule, StreamingIVSP

# The first steps of both sides: allocations, and the state of the optimisers.
WARM_UP = 5


class Fitted(BilevelModule):
    """The weighted network of the other benchmark, declared."""

    def __init__(self, net: nn.Module, solver: Callable[..., Any], count: int = SAMPLES) -> None:
        super().__init__()
        self.net = net
        self.logits = nn.Parameter(torch.zeros(count))
        self.declare(upper=self.logits, lower=self.net, solver=solver)

    def upper_loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def lower_loss(self, batch: Any) -> Tensor:
        return weighted(self.logits[batch[2]], self.net(batch[0]), batch[1])

    def upper_indices(self, batch: Any) -> Tensor:  # type: ignore[override]
        index: Tensor = batch[2]
        return index


class InTurn(Callback):
    """Times the fit from batch to batch, and a step by hand in between."""

    def __init__(self, by_hand: ByHand) -> None:
        self.by_hand = by_hand
        self.batches = cycle(batches())
        self.fit: list[float] = []
        self.hand: list[float] = []
        self._ended: float | None = None

    def on_train_batch_end(self, *args: Any) -> None:
        began = time.perf_counter()
        if self._ended is not None:
            self.fit.append(began - self._ended)
        self.by_hand.step(*next(self.batches))
        self._ended = time.perf_counter()
        self.hand.append(self._ended - began)


def run(size: Size) -> Section:
    rows = []
    steps = WARM_UP + min(100, 6 * size.steps)
    net = network(1024, 2)
    data = [{"upper": upper, "lower": lower} for upper, lower in batches()] * (steps // 8 + 1)
    for name, make, upper, ivsp in (
        ("F2SA, SGD", F2SA, "SGD", False),
        ("StreamingIVSP, TableRMS", StreamingIVSP, "TableRMS", True),
    ):
        solver = partial(make, upper_optimizer=UPPER[upper], lower_optimizer=LOWER)
        turns = InTurn(ByHand(net, UPPER[upper], ivsp))
        trainer = Trainer(
            accelerator="cpu",
            max_steps=steps,
            max_epochs=-1,
            callbacks=[turns],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loader: Any = DataLoader(data, batch_size=None)  # type: ignore[arg-type]
            trainer.fit(Fitted(network(1024, 2), solver), loader)
        fit, hand = turns.fit[WARM_UP:], turns.hand[WARM_UP + 1 :]
        rows.append(
            Row(
                f"{name}, 784-1024-1024-10, Trainer.fit / the same by hand",
                ratio(fit, hand),
                at_most=1.15,
            )
        )
        rows.append(Row(f"{name}, a step by hand", 1e3 * statistics.median(hand), "ms"))
    return Section("Mini-batches through the Trainer", rows)
