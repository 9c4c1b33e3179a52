"""SOBA and DARTS by central differences against second derivatives by autograd."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from by_hand import OPTIONS, Cleaner, Seeded, batches, loader, trainable
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from lightning_bilevel.stochastic import DARTS, SOBA, Method

RATE = 0.1


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))


class Plain(Cleaner):
    """SGD at both levels, so that a step is a direction."""

    def configure_optimizers(self) -> Any:
        return SGD([self.logits], lr=1.0), SGD(self.network.parameters(), lr=RATE)


class ByAutograd:
    """The directions of both methods, with exact products of second derivatives."""

    def __init__(self, module: Cleaner) -> None:
        self.x = nn.Parameter(module.logits.detach().clone())
        self.y = copy.deepcopy(module.network)
        self.v = [torch.zeros_like(p) for p in self.y.parameters()]

    def losses(self, batch: Any) -> tuple[Tensor, Tensor]:
        """f and g with the same random numbers at every call of a step."""
        torch.set_rng_state(self.state)
        f = cross_entropy(self.y(batch["upper"][0]), batch["upper"][1])
        torch.set_rng_state(self.state)
        inputs, labels, index = batch["lower"]
        losses = cross_entropy(self.y(inputs), labels, reduction="none")
        return f, (self.x[index].sigmoid() * losses).mean()

    def step(self, method: Method, batch: Any) -> None:
        self.state = torch.get_rng_state()
        y = trainable(self.y)
        f, g = self.losses(batch)
        g_y = torch.autograd.grad(g, y, create_graph=True)
        if isinstance(method, SOBA):
            f_y = torch.autograd.grad(f, y)
            along = sum((a * b).sum() for a, b in zip(g_y, self.v, strict=True))
            of_x, *of_y = torch.autograd.grad(along, [self.x, *y])
            to_v = [a - b for a, b in zip(of_y, f_y, strict=True)]
            to_x = -of_x
        else:
            assert isinstance(method, DARTS)
            kept = [p.detach().clone() for p in y]
            with torch.no_grad():
                for p, d in zip(y, g_y, strict=True):
                    p.sub_(method.xi * d)
            ahead, _ = self.losses(batch)
            f_y = torch.autograd.grad(ahead, y)
            with torch.no_grad():
                for p, value in zip(y, kept, strict=True):
                    p.copy_(value)
            _, g = self.losses(batch)
            g_y = torch.autograd.grad(g, y, create_graph=True)
            along = sum((a * b).sum() for a, b in zip(g_y, f_y, strict=True))
            to_x = -method.xi * torch.autograd.grad(along, self.x)[0]
            to_v = [torch.zeros_like(p) for p in y]
        with torch.no_grad():
            self.x.sub_(to_x).clamp_(-0.5, 0.5)
            for p, v, d, to in zip(y, self.v, g_y, to_v, strict=True):
                p.sub_(RATE * d)
                v.sub_(RATE * to)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("method", [SOBA(), DARTS(xi=0.5), DARTS(xi=0.0)], ids=str)
def test_directions(method: Method, accumulate: int) -> None:
    torch.manual_seed(0)
    module = Plain(method, net=smooth, accumulate=accumulate).double()
    hand = ByAutograd(module)
    # The batches of a step are one batch, so that their mean is that batch.
    data = [b for b in batches(6) for _ in range(accumulate)]
    trainer = Trainer(
        max_epochs=1,
        callbacks=[Seeded()],
        precision="64-true",
        enable_checkpointing=False,
        **OPTIONS,
    )
    if accumulate > 1:
        module.network[2].p = 0.0  # type: ignore[union-attr, index]
        hand.y[2].p = 0.0  # type: ignore[index]
    trainer.fit(module, loader(data))
    torch.manual_seed(99)
    for batch in data[::accumulate]:
        hand.step(method, batch)
        torch.set_rng_state(hand.state)
        hand.y(batch["upper" if method == DARTS(xi=0.0) else "lower"][0])  # draws for good
    torch.testing.assert_close(module.logits.data, hand.x.data, rtol=1e-3, atol=1e-6)
    for mine, other in zip(trainable(module.network), trainable(hand.y), strict=True):
        torch.testing.assert_close(mine.data, other.data, rtol=0, atol=1e-8)
    moved = float(module.logits.detach().abs().max())
    assert moved > 1e-3 if method != DARTS(xi=0.0) else moved == 0.0
