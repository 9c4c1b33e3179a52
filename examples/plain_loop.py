"""A loop of one's own: weights of noisy samples on mini-batches, without Lightning.

A solver is a torch optimiser with two groups of parameters, one for each level. Each step is given
f and g on a mini-batch as functions of the flat vectors x and y. Schedulers, `state_dict` and
`load_state_dict` are those of any optimiser.

Run: python examples/plain_loop.py
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR

from lightning_bilevel import BilevelProblem, Box, DigitsCleaning, StreamingIVSP, TableRMS
from lightning_bilevel.modules.detection import detection

BATCH = 64


def network() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def outputs(model: nn.Module, y: Tensor, inputs: Tensor) -> Tensor:
    """Evaluate the model at the weights y, one flat vector."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    parts = y.split([shape.numel() for shape in shapes.values()])
    weights = {name: v.view(shapes[name]) for name, v in zip(shapes, parts, strict=True)}
    logits: Tensor = functional_call(model, weights, inputs)
    return logits


def on_batch(model: nn.Module, upper: list[Tensor], lower: list[Tensor]) -> BilevelProblem:
    """Return f, the loss on trusted samples, and g, the weighted mean of noisy losses."""
    inputs, labels, index = lower

    def f(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(outputs(model, y, upper[0]), upper[1])

    def g(x: Tensor, y: Tensor) -> Tensor:
        weights = x[index].sigmoid()
        losses = cross_entropy(outputs(model, y, inputs), labels, reduction="none")
        return (weights * losses).sum() / weights.sum()

    # Only the weights of the samples in the batch move.
    touched = index.sort().values
    return BilevelProblem(f, g, upper_set=Box(-8, 8), mini_batch=True, touched=touched)


def sample(data: tuple[Tensor, ...]) -> list[Tensor]:
    """Draw a mini-batch; any DataLoader would do."""
    rows = torch.randperm(len(data[0]))[:BATCH]
    return [tensor[rows] for tensor in data]


def noisy_digits() -> DigitsCleaning:
    """100 trusted digits, and 1,000 of which 60 % have the label of the next class."""
    data = DigitsCleaning(n_train=1000, n_validation=100, corruption=0.6, kind="pair")
    data.prepare_data()
    data.setup("fit")
    return data


def draw(weights: Tensor, wrong: Tensor, out: Path) -> None:
    figure = Figure(figsize=(5, 3), layout="constrained")
    axis = figure.subplots()
    bins: Any = torch.linspace(0, 1, 26)
    axis.hist([weights[~wrong], weights[wrong]], bins, label=["right label", "wrong label"])
    axis.set_xlabel("weight")
    axis.set_ylabel("samples")
    axis.legend(frameon=False)
    figure.savefig(out, dpi=160)


def main(short: bool = False, out: Path = Path("plain_loop.png")) -> dict[str, float]:
    torch.manual_seed(0)
    steps = 150 if short else 1600
    data = noisy_digits()
    model = network()
    x = nn.Parameter(torch.zeros(1000))
    solver = StreamingIVSP(
        [{"params": [x], "level": "upper"}, {"params": model.parameters(), "level": "lower"}],
        upper_optimizer=partial(TableRMS, lr=3.0),
        lower_optimizer=partial(torch.optim.AdamW, lr=1e-4 if not short else 1e-3),
    )
    scheduler = CosineAnnealingLR(solver, T_max=steps)
    for step in range(steps):
        info = solver.step(problem=on_batch(model, sample(data.upper), sample(data.lower)))
        scheduler.step()
        if step % 100 == 0:
            print(f"step {step}: f {info.upper:.3f}, g {info.lower:.3f}, gap {info.gap:.4f}")
    assert data.corrupted is not None
    found = detection(-x.detach(), data.corrupted)
    print(f"AUROC of the weights: {found['auroc']:.3f}")
    draw(x.detach().sigmoid(), data.corrupted, out)
    return found


if __name__ == "__main__":
    main(short="--short" in sys.argv)
