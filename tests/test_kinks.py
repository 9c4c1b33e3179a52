"""What is not differentiable in the declared modules, and what the certificate makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from modules import MILD, weighting_data
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_bilevel import BilevelModule, Box, Envelope, Free, StrictlyConvex
from lightning_bilevel.declaration import Declared, kinks_of
from lightning_bilevel.modules.networks import Conv4


class Calls(nn.Module):
    """A module that calls a function with a kink, and says so."""

    kinks = ("absolute value",)

    def forward(self, value: Tensor) -> Tensor:
        return value.abs()


@pytest.mark.parametrize(
    ("declared", "names"),
    [
        (nn.Linear(2, 2), []),
        (nn.Parameter(torch.zeros(2)), []),
        (nn.Sequential(nn.Linear(2, 2), nn.Sigmoid(), nn.Tanh(), nn.GELU(), nn.Softplus()), []),
        (nn.ReLU(), ["ReLU"]),
        (nn.Sequential(nn.ReLU(), nn.Sequential(nn.LeakyReLU())), ["ReLU", "LeakyReLU"]),
        (nn.Sequential(nn.ReLU(), nn.MaxPool2d(2), nn.ReLU()), ["ReLU", "MaxPool2d"]),
        ([nn.Parameter(torch.zeros(2)), nn.Hardtanh()], ["Hardtanh"]),
        (nn.ELU(), []),
        (nn.ELU(alpha=0.5), ["ELU"]),
        (nn.Sequential(Calls(), nn.Linear(2, 2)), ["absolute value"]),
        (Conv4(channels=2), ["ReLU", "max-pooling"]),
    ],
    ids=str,
)
def test_names(declared: Declared, names: list[str]) -> None:
    assert kinks_of(declared) == names


KINKED = [
    nn.ReLU(),
    nn.ReLU6(),
    nn.LeakyReLU(),
    nn.PReLU(),
    nn.SELU(),
    nn.ELU(alpha=2.0),
    nn.Hardtanh(),
    nn.Hardsigmoid(),
    nn.Hardswish(),
    nn.Softshrink(),
]
SMOOTH = [nn.ELU(), nn.CELU(), nn.SiLU(), nn.Mish(), nn.Softplus(), nn.Softsign(), nn.Tanhshrink()]


@pytest.mark.parametrize("layer", [*KINKED, *SMOOTH], ids=str)
def test_a_layer_is_named_if_its_slope_jumps(layer: nn.Module) -> None:
    t = torch.linspace(-7.0, 7.0, 1_400_001, dtype=torch.float64)
    values = layer.double()(t).detach()
    slopes = values.diff() / t.diff()
    jumps = float(slopes.diff().abs().max()) > 1e-3
    assert bool(kinks_of(layer)) is jumps


class Fit(BilevelModule):
    """A weighted classifier with a layer of the test's choice."""

    def __init__(self, layer: nn.Module, lower_set: Any = None, **more: Any) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(30))
        self.model = nn.Sequential(nn.Linear(2, 3), layer, nn.Linear(3, 3))
        self.declare(
            upper=self.logits,
            lower=self.model,
            upper_set=Box(-5, 5),
            lower_set=lower_set or Box(-5, 5),
            solver=MILD,
            **more,
        )

    def upper_loss(self, batch: Any) -> Tensor:
        return cross_entropy(self.model(batch[0]), batch[1])

    def lower_loss(self, batch: Any) -> Tensor:
        losses = cross_entropy(self.model(batch[0]), batch[1], reduction="none")
        return (self.logits[batch[2]].sigmoid() * losses).mean()


def theorem(module: BilevelModule) -> tuple[str, str]:
    data = weighting_data()
    batch = next(iter(data.train_dataloader()))
    envelope = Envelope(rho=0.1, sigma=1.0, delta=1e-3)
    certificate = module.certify(batch=batch, envelope=envelope)
    assert certificate is not None
    return certificate.qualification, certificate.theorem


def test_the_certificate_names_them() -> None:
    known = StrictlyConvex()  # it is not; the test is about the rest
    smooth = Fit(nn.Sigmoid(), qualification=known)
    assert theorem(smooth)[1] == "applies, if the gradients of f and g are Lipschitz"
    kinked = Fit(nn.ReLU(), qualification=known)
    assert theorem(kinked)[1] == "does not apply: ReLU is not differentiable"
    both = Fit(nn.ReLU(), lower_set=Free(), qualification=known)
    assert theorem(both)[1] == "does not apply: Y is unbounded, ReLU is not differentiable"
    assert theorem(Fit(nn.Sigmoid()))[1] == "not known: the constraint qualification"


@pytest.mark.parametrize(
    ("qualification", "words"),
    [
        ("holds by assumption", "holds by assumption"),
        (lambda envelope, *_: f"holds for rho = {envelope.rho}", "holds for rho = 0.1"),
        ("fails: an example", "fails: an example"),
        (lambda envelope, *_: "not known: yet", "not known: yet"),
        (StrictlyConvex(), "holds: for each delta > 0, because g is strictly convex in y"),
    ],
)
def test_a_qualification_may_be_declared_in_several_ways(qualification: Any, words: str) -> None:
    assert theorem(Fit(nn.Sigmoid(), qualification=qualification))[0] == words
