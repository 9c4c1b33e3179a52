"""Runs on mini-batches equal a loop by hand over two separate networks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import (
    OPTIONS,
    ByHand,
    Cleaner,
    Make,
    Seeded,
    adamw,
    batches,
    loader,
    trainable,
    two_groups,
)
from lightning.pytorch import Trainer
from torch.optim import SGD, Optimizer, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from lightning_bilevel import Power
from lightning_bilevel.stochastic import F2BA, F2SA, MEHA, VPBGD, Method, StreamingIVSP

STEPS = 50
METHODS = [
    F2SA(0.7),
    F2SA(Power(0.2, 0.3)),
    VPBGD(Power(0.1, 0.5)),
    F2BA(0.3),
    MEHA(gamma=2.0),
    StreamingIVSP(rho=5.0, gamma=0.8),
]


def one_cycle(optimizer: Optimizer) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=[1e-2, 5e-3], total_steps=STEPS + 1)


def sgd(parameters: Any) -> Optimizer:
    return SGD(two_groups(parameters), momentum=0.9, nesterov=True)


@pytest.mark.parametrize(("clip", "accumulate"), [(None, 1), (0.3, 2)])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_every_penalty_method(
    method: Method, clip: float | None, accumulate: int, tmp_path: Path
) -> None:
    compare(method, adamw, one_cycle, clip, accumulate, tmp_path)


KINDS: dict[str, Make] = {
    "SGD": sgd,
    "Adafactor": lambda p: torch.optim.Adafactor(two_groups(p)),
    "RMSprop": lambda p: RMSprop(two_groups(p)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_optimizers(kind: str, tmp_path: Path) -> None:
    if not hasattr(torch.optim, kind):
        pytest.skip(f"this torch has no {kind}")
    cosine = partial(CosineAnnealingLR, T_max=STEPS)
    compare(F2SA(0.7), KINDS[kind], cosine, 1.0, 1, tmp_path)


def compare(
    method: Method, make: Make, scheduler: Any, clip: float | None, accumulate: int, root: Path
) -> None:
    torch.manual_seed(0)
    module = Cleaner(
        method, make, scheduler, gradient_clip_val=clip, accumulate=accumulate
    ).double()
    hand = ByHand(module, method, make, scheduler, clip)
    data = batches(STEPS * accumulate)
    trainer = Trainer(
        max_epochs=1, callbacks=[Seeded()], precision="64-true", default_root_dir=root, **OPTIONS
    )
    trainer.fit(module, loader(data))
    torch.manual_seed(99)
    for k in range(STEPS):
        hand.step(data[k * accumulate : (k + 1) * accumulate])
    assert trainer.global_step == STEPS
    assert 0.1 < float(module.logits.detach().abs().max()) <= 0.5
    torch.testing.assert_close(module.logits.data, hand.x.data, rtol=0, atol=1e-12)
    for name, value in module.network.state_dict().items():
        torch.testing.assert_close(value, hand.y.state_dict()[name], rtol=0, atol=1e-11)
    shadow = module.mini_batches.step.shadow
    for mine, other in zip(shadow.z, trainable(hand.z), strict=True):
        torch.testing.assert_close(mine.data, other.data, rtol=0, atol=1e-11)
    for buffer, other in zip(shadow.z_buffers, hand.z.buffers(), strict=True):
        torch.testing.assert_close(buffer, other, rtol=0, atol=1e-11)
