"""Class-imbalance reweighting: learn one weight per class, so that rare classes are recognised.

Five of scikit-learn's ten digits have 120 training samples each, the other five have 4. The upper
level is the loss on a small balanced validation set. The lower level trains a linear classifier
with weighted classes.

Run: python examples/imbalance.py
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_bilevel import (
    IVSP,
    BilevelMixin,
    Box,
    CertificateReport,
    FullBatchDataModule,
    SolverCallable,
)

RARE = 4
COMMON = 120


class ClassBalance(BilevelMixin, LightningModule):
    def __init__(self, solver: SolverCallable) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(10))
        self.classifier = nn.Linear(64, 10)
        sets = {"upper_set": Box(-2, 2), "lower_set": Box(-20, 20)}
        self.declare(
            upper=self.logits, lower=self.classifier, **sets, upper_unit=10.0, solver=solver
        )

    def upper_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(self.classifier(batch[0]), batch[1])

    def lower_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        losses = cross_entropy(self.classifier(batch[0]), batch[1], reduction="none")
        weights = 10 * self.logits.softmax(0)[batch[1]]
        return (weights * losses).mean() + 1e-3 * self.classifier.weight.square().sum()


def load() -> tuple[tuple[Tensor, Tensor], ...]:
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    # The number of each sample within its class, from 1.
    counts = torch.stack([labels == digit for digit in range(10)]).cumsum(1)
    number = counts[labels, torch.arange(len(labels))]
    train = number <= torch.where(labels < 5, COMMON, RARE)
    validation = (number > COMMON) & (number <= COMMON + 10)
    test = number > COMMON + 10
    return tuple((images[part] / 16, labels[part]) for part in (train, validation, test))


def main(short: bool = False, out: Path = Path("imbalance.png")) -> dict[str, float]:
    torch.manual_seed(0)
    train, validation, test = load()
    convex = {
        "rho": 0.5,
        "sigma": 0.0,
        "delta": 1e-4,
        "L_yy": 20.0,
        "L_xy": 1.0,
        "inner": "accelerated",
    }
    module = ClassBalance(
        partial(IVSP, **convex, mu0=2e-3, block=10, gamma0=0.02, zeta_bar=1e3, L_init=1.0, B_R=1.0)
    )
    data = FullBatchDataModule(upper=validation, lower=train, epoch_length=25 if short else 80)
    quiet = {"logger": False, "enable_checkpointing": False, "callbacks": [CertificateReport()]}
    Trainer(accelerator="cpu", precision="64-true", max_epochs=1, **quiet).fit(
        module, datamodule=data
    )

    equal = nn.Linear(64, 10).double()
    optimizer = torch.optim.Adam(equal.parameters(), lr=0.01, weight_decay=1e-3)
    for _ in range(300):
        optimizer.zero_grad()
        cross_entropy(equal(train[0]), train[1]).backward()
        optimizer.step()
    errors = {}
    figure = Figure(figsize=(7, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.bar(range(10), (10 * module.logits.detach().softmax(0)).tolist(), color="#0072B2")
    left.set(ylabel="learned weight of the class", xlabel="digit; 5 to 9 are rare")
    right.set(ylabel="test error of the class", xlabel="digit; 5 to 9 are rare")
    for shift, name, classifier in (
        (-0.2, "equal weights", equal),
        (0.2, "learned weights", module.classifier),
    ):
        wrong = (classifier(test[0]).argmax(1) != test[1]).double()
        by_class = [float(wrong[test[1] == digit].mean()) for digit in range(10)]
        errors[name] = sum(by_class) / 10
        print(
            f"{name}: test error {errors[name]:.3f}, of the rare classes "
            f"{sum(by_class[5:]) / 5:.3f}"
        )
        right.bar([digit + shift for digit in range(10)], by_class, 0.4, label=name)
    right.legend(frameon=False)
    figure.savefig(out, dpi=160)
    return errors


if __name__ == "__main__":
    main(short="--short" in sys.argv)
