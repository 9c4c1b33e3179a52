"""Data mixture: learn how much of each text source to train on, by mini-batches.

The sources are Python's own library as text; in all but one the characters of each row are
shuffled. Below, a small transformer is trained on the weighted mixture; above is its loss on 128
clean rows. AdamW steps both levels, the loaders are ordinary ones.

Run: python examples/mixture.py
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from lightning_bilevel import F2SA, BilevelModule, SolverCallable, StreamingIVSP

LENGTH = 64
ROWS = 2000


class Transformer(nn.Module):
    """Two layers of width 64 that predict the next character."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.characters = nn.Embedding(128, width)
        self.places = nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(width, 128)

    def forward(self, rows: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        inputs = self.characters(rows[:, :-1]) + self.places.weight
        logits = self.out(self.layers(inputs, mask=mask, is_causal=True)).transpose(1, 2)
        return cross_entropy(logits, rows[:, 1:], reduction="none").mean(1)  # of each row


class Mixture(BilevelModule):
    def __init__(self, sources: int, solver: SolverCallable) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(sources))
        self.network = Transformer()
        self.declare(upper=self.logits, lower=self.network, solver=solver)

    def upper_loss(self, batch: list[Tensor]) -> Tensor:
        return self.network(batch[0]).mean()

    def lower_loss(self, batch: list[Tensor]) -> Tensor:
        weights = self.logits.softmax(0)[batch[1]]
        return weights @ self.network(batch[0]) / weights.sum()


class Noise(Callback):
    """Keeps the weight of the shuffled sources, all but the first, at each step."""

    def __init__(self) -> None:
        self.weights: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        self.weights.append(1 - float(module.logits.detach().softmax(0)[0]))


def loaders(sources: int, seed: int) -> dict[str, DataLoader[Any]]:
    generator = torch.Generator().manual_seed(seed)
    text = b"".join(p.read_bytes() for p in sorted(Path(os.__file__).parent.glob("*.py")))
    rows = torch.tensor(list(text)).clamp(max=127)
    rows = rows[: len(rows) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    rows = rows[torch.randperm(len(rows), generator=generator)[: 128 + sources * ROWS]]
    clean, mixed = rows.tensor_split([128])
    order = torch.rand(mixed.shape, generator=generator).argsort(1)
    order[:ROWS] = torch.arange(LENGTH + 1)  # the first source stays as it is
    source = torch.arange(sources).repeat_interleave(ROWS)
    levels = {"upper": (clean,), "lower": (mixed.gather(1, order), source)}
    return {
        level: DataLoader(TensorDataset(*tensors), batch_size=16, shuffle=True)
        for level, tensors in levels.items()
    }


def learned(solver: Any, sources: int, steps: int, seed: int) -> list[float]:
    torch.manual_seed(seed)
    upper = partial(AdamW, lr=1e-2 if sources == 2 else 2e-2)
    stepped = partial(solver, upper_optimizer=upper, lower_optimizer=partial(AdamW, lr=1e-3))
    noise = Noise()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = Trainer(accelerator="cpu", max_steps=steps, callbacks=[noise], **quiet)
    trainer.fit(Mixture(sources, stepped), loaders(sources, seed))
    return noise.weights


def main(short: bool = False, out: Path = Path("mixture.png")) -> dict[str, list[float]]:
    figure = Figure(figsize=(5.2, 3.4), layout="constrained")
    axis = figure.subplots()
    found = {}
    for sources in (2,) if short else (2, 4):
        for solver, steps in ((F2SA, 200), (StreamingIVSP, 250)):
            name = f"{solver.__name__}, {sources} sources"
            found[name] = learned(solver, sources, 60 if short else steps, seed=0)
            axis.plot(found[name], label=name)
    axis.axhline(0.05, color="black", linewidth=0.5)
    axis.set(xlabel="mini-batches", ylabel="weight of the shuffled sources", ylim=(0, None))
    axis.legend()
    figure.savefig(out, dpi=160)
    return found


if __name__ == "__main__":
    main(short="--short" in sys.argv)
