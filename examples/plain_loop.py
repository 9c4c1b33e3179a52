"""A loop of one's own: weights of noisy samples, without Lightning.

A solver is a torch optimiser with two groups of parameters, one for each level. Each step is given
f and g on all data as functions of the flat vectors x and y. `state_dict` and `load_state_dict` are
those of any optimiser. Mini-batches need a Trainer, which has the loaders and the optimisers.

Run: python examples/plain_loop.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from lightning_bilevel import IVSP, BilevelProblem, Box, DigitsCleaning
from lightning_bilevel.modules.reweighting import detection


def network() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def outputs(model: nn.Module, y: Tensor, inputs: Tensor) -> Tensor:
    """Evaluate the model at the weights y, one flat vector."""
    parameters = dict(model.named_parameters())
    parts = y.split([p.numel() for p in parameters.values()])
    named = zip(parameters.items(), parts, strict=True)
    return functional_call(model, {name: v.view_as(p) for (name, p), v in named}, inputs)


def cleaning(model: nn.Module, data: DigitsCleaning) -> BilevelProblem:
    """Return f, the loss on trusted samples, and g, the weighted mean of noisy losses."""
    images, labels, _ = data.lower

    def f(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(outputs(model, y, data.upper[0]), data.upper[1])

    def g(x: Tensor, y: Tensor) -> Tensor:
        losses = cross_entropy(outputs(model, y, images), labels, reduction="none")
        return x.sigmoid() @ losses / len(losses)

    return BilevelProblem(f, g, upper_set=Box(-100, 100))


def noisy_digits() -> DigitsCleaning:
    """100 trusted digits, and 1,000 of which 60 % have the label of the next class."""
    data = DigitsCleaning(n_train=1000, n_validation=100, corruption=0.6, kind="pair")
    data.prepare_data()
    data.setup("fit")
    return data


def trusted_alone(data: DigitsCleaning) -> float:
    """The simple rival: the losses of a network that has seen the trusted samples only."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(200):
        optimizer.zero_grad()
        cross_entropy(model(data.upper[0]), data.upper[1]).backward()
        optimizer.step()
    with torch.no_grad():
        losses = cross_entropy(model(data.lower[0]), data.lower[1], reduction="none")
    return detection(losses, data.corrupted)["auroc"]


def draw(weights: Tensor, wrong: Tensor, out: Path) -> None:
    figure = Figure(figsize=(5, 3), layout="constrained")
    axis = figure.subplots()
    axis.hist([weights[~wrong], weights[wrong]], 25, label=["right label", "wrong label"])
    axis.set(xlabel="weight", ylabel="samples")
    axis.legend(frameon=False)
    figure.savefig(out, dpi=160)


def main(short: bool = False, out: Path = Path("plain_loop.png")) -> dict[str, float]:
    torch.manual_seed(0)
    data = noisy_digits()
    model = network()
    x = nn.Parameter(torch.zeros(1000))
    # A weight moves g by a thousandth of itself: x is measured in a larger unit.
    solver = IVSP(
        [
            {"params": [x], "level": "upper", "unit": 30.0},
            {"params": model.parameters(), "level": "lower"},
        ]
    )
    problem = cleaning(model, data)
    for step in range(100 if short else 300):
        info = solver.step(problem=problem)
        if step % 50 == 0:
            print(f"step {step}: f {info.upper:.3f}, g {info.lower:.3f}")
    found = {
        "weights": detection(-x.detach(), data.corrupted)["auroc"],
        "trusted alone": trusted_alone(data),
    }
    print("AUROC:", found)
    draw(x.detach().sigmoid(), data.corrupted, out)
    return found


if __name__ == "__main__":
    main(short="--short" in sys.argv)
