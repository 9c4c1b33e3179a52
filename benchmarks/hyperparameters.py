"""Hyper-parameters: learn the weight decay of each layer and the label smoothing of a network.

A network is trained on 300 of scikit-learn's digits, a fifth of them mislabelled, by mini-batches.
Above are four hyper-parameters, judged on 500 clean samples. Beside it stands a random search with
the same number of passes, which is ahead: with so few hyper-parameters, search at random.

Run: python -m benchmarks.hyperparameters
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam, AdamW
from torch.utils.data import DataLoader, TensorDataset

from lightning_bilevel import BilevelModule, Box, DigitsCleaning
from lightning_bilevel.stochastic import F2SA

# Logarithms of the weight decays, then the logit of the smoothing.
BOUNDS = torch.tensor([[-9.0, -1.0]] * 3 + [[-6.0, 0.0]])
START = BOUNDS.mean(1)
PASSES = 3  # of a bilevel step


def network() -> nn.Sequential:
    layers = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(nn.Flatten(), *layers)


def training_loss(net: nn.Sequential, x: Tensor, batch: Any) -> Tensor:
    logp = net(batch[0]).log_softmax(1)
    smooth = x[3].sigmoid()
    right = logp.gather(1, batch[1].unsqueeze(1)).mean()
    squares = torch.stack([layer.weight.square().sum() for layer in net[1::2]])
    return -(1 - smooth) * right - smooth * logp.mean() + 0.5 * x[:3].exp() @ squares


class Tuned(BilevelModule):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(START.clone())
        self.network = network()
        # y must follow the minimiser of g, hence the large multiplier.
        method = F2SA(multiplier=1000.0)
        self.declare(upper=self.x, lower=self.network, upper_set=Box(*BOUNDS.T), method=method)

    def configure_optimizers(self) -> tuple[Adam, AdamW]:
        return Adam([self.x], 3e-2), AdamW(self.network.parameters(), 1e-3, weight_decay=0.0)

    def upper_loss(self, batch: Any) -> Tensor:
        return cross_entropy(self.network(batch[0]), batch[1])

    def lower_loss(self, batch: Any) -> Tensor:
        return training_loss(self.network, self.x, batch)


def loader(samples: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*samples), batch_size=50, shuffle=True)


def trained(x: Tensor, samples: Any, steps: int) -> nn.Sequential:
    """Train the network as usual, with these hyper-parameters."""
    net = network()
    optimizer = AdamW(net.parameters(), lr=1e-3, weight_decay=0.0)
    done = 0
    while done < steps:
        for batch in loader(samples):
            optimizer.zero_grad()
            training_loss(net, x, batch).backward()
            optimizer.step()
            done += 1
    return net


@torch.no_grad()
def measure(net: nn.Module, samples: Any) -> dict[str, float]:
    logits = net(samples[0])
    wrong = float((logits.argmax(1) != samples[1]).float().mean())
    return {"loss": float(cross_entropy(logits, samples[1])), "error": wrong}


def main(short: bool = False, out: Path = Path("hyper.png"), seed: int = 0) -> dict[str, Any]:
    data = DigitsCleaning(n_train=300, n_validation=500, corruption=0.2, seed=seed)
    data.setup()
    train, validation, test = data.lower[:2], data.upper, data.test
    steps, trial = (60, 60) if short else (2000, 1000)
    torch.manual_seed(seed)
    module = Tuned()
    limits: dict[str, Any] = {"max_epochs": -1, "max_steps": steps, "logger": False}
    trainer = Trainer(accelerator="cpu", enable_checkpointing=False, **limits)
    trainer.fit(module, {"upper": loader(validation), "lower": loader(train)})
    learned = module.x.detach()
    points = {"start": START, "learned": learned}
    found = {name: measure(trained(x, train, trial), test) for name, x in points.items()}
    best = (float("inf"), START)
    for x in BOUNDS[:, 0] + torch.rand(PASSES * steps // trial, 4) * (BOUNDS[:, 1] - BOUNDS[:, 0]):
        loss = measure(trained(x, train, trial), validation)["loss"]
        best = min(best, (loss, x), key=lambda pair: pair[0])
    found["random search"] = measure(trained(best[1], train, trial), test)
    for name, row in found.items():
        print(f"{name}: test loss {row['loss']:.3f}, error {row['error']:.3f}")
    figure = Figure(figsize=(5, 3), layout="constrained")
    axis = figure.subplots()
    for i, (name, x) in enumerate({"learned": learned, "random search": best[1]}.items()):
        axis.bar(torch.arange(4) + 0.4 * i, x.tolist(), 0.4, label=name)
    axis.set_xticks([0.2, 1.2, 2.2, 3.2], ["decay 1", "decay 2", "decay 3", "smoothing"])
    axis.set(ylabel="logarithm; logit of the smoothing")
    axis.legend()
    figure.savefig(out, dpi=160)
    return found


if __name__ == "__main__":
    main(short="--short" in sys.argv)
