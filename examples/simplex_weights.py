"""Sample weights on the simplex, without labels: find the rows of a table that can be trusted.

The lower level predicts half of the columns of scikit-learn's breast-cancer measurements from the
other half, without the diagnosis. A third of the training rows are spoilt: their columns come from
different patients. The weights of the rows lie on the simplex. The upper level is the prediction
error on 100 rows that are known to be good.

Run: python examples/simplex_weights.py
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from matplotlib.figure import Figure
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torchmetrics.functional.classification import binary_auroc

from lightning_bilevel import (
    IVSP,
    BilevelMixin,
    CertificateReport,
    FullBatchDataModule,
    Simplex,
    SolverCallable,
)

TRAIN = 300
GOOD = 100
SPOILT = 100


class Trust(BilevelMixin, LightningModule):
    def __init__(self, solver: SolverCallable) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.full((TRAIN,), 1 / TRAIN, dtype=torch.float64))
        self.model = nn.Linear(15, 15, bias=False, dtype=torch.float64)
        # Weights are about 1/300. In a unit of 0.03 their steps are about as long as possible.
        self.declare(
            upper=self.weights,
            lower=self.model,
            upper_set=Simplex(),
            upper_unit=0.03,
            solver=solver,
        )

    def errors(self, rows: Tensor) -> Tensor:
        return (rows[:, 1::2] - self.model(rows[:, ::2])).square().mean(1)

    def upper_loss(self, batch: Tensor) -> Tensor:
        return self.errors(batch).mean()

    def lower_loss(self, batch: Tensor) -> Tensor:
        return (self.weights * self.errors(batch)).sum() + 5e-4 * self.model.weight.square().sum()


def load() -> tuple[Tensor, Tensor, Tensor]:
    rows = torch.tensor(load_breast_cancer().data, dtype=torch.float64)
    rows = ((rows - rows.mean(0)) / rows.std(0))[torch.randperm(len(rows))]
    train = rows[:TRAIN].clone()
    good = rows[TRAIN : TRAIN + GOOD]
    spoilt = torch.arange(TRAIN) < SPOILT
    for column in train.T:
        column[spoilt] = column[spoilt][torch.randperm(SPOILT)]
    return train, good, spoilt


def main(short: bool = False, out: Path = Path("simplex_weights.png")) -> dict[str, float]:
    torch.manual_seed(0)
    train, good, spoilt = load()
    convex = {
        "rho": 5.0,
        "sigma": 0.0,
        "delta": 1e-4,
        "L_yy": 1.0,
        "L_xy": 1.0,
        "inner": "accelerated",
    }
    module = Trust(
        partial(IVSP, **convex, mu0=2e-3, block=10, gamma0=0.05, zeta_bar=1e3, L_init=1.0, B_R=1.0)
    )
    data = FullBatchDataModule(upper=good, lower=train, epoch_length=120 if short else 400)
    quiet = {"logger": False, "enable_checkpointing": False, "callbacks": [CertificateReport()]}
    Trainer(accelerator="cpu", precision="64-true", max_epochs=1, **quiet).fit(
        module, datamodule=data
    )

    weights = module.weights.detach()
    found = {
        "auroc": float(binary_auroc(-weights, spoilt.int())),
        "weight of the spoilt third": float(weights[spoilt].sum()),
    }
    print(
        f"{found}; {int((weights == 0).sum())} weights are exactly 0, "
        f"{int((weights[spoilt] == 0).sum())} of them spoilt"
    )
    figure = Figure(figsize=(6, 3), layout="constrained")
    axis = figure.subplots()
    both = [weights[rows].tolist() for rows in (spoilt, ~spoilt)]
    axis.hist(
        both,
        bins=40,
        stacked=True,
        label=["spoilt rows", "good rows"],
        color=["#D55E00", "#0072B2"],
    )
    axis.set(xlabel="weight", ylabel="training rows")
    axis.legend(frameon=False)
    figure.savefig(out, dpi=160)
    return found


if __name__ == "__main__":
    main(short="--short" in sys.argv)
