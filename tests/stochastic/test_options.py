"""Clipping, accumulation, warm-up, and batches that are not finite."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import OPTIONS, SAMPLES, Cleaner, batches, loader, trainable
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.optim import SGD

from lightning_bilevel import BilevelError
from lightning_bilevel.stochastic import DARTS, F2SA, SOBA, Method, StreamingIVSP

FIT: dict[str, Any] = {"max_epochs": 1, "enable_checkpointing": False, **OPTIONS}


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


class Unit(Cleaner):
    """SGD with rate 1, so that a step is a gradient; y may have several optimisers."""

    def __init__(self, method: Method, several: bool = False, **options: Any) -> None:
        super().__init__(method, net=small, **options)
        self.several = several

    def configure_optimizers(self) -> Any:
        parts = [[p] for p in trainable(self.network)]
        if not self.several:
            parts = [trainable(self.network)]
        return [SGD([self.logits], lr=1.0), *(SGD(part, lr=1.0) for part in parts)]


class History(Callback):
    """The state after each batch."""

    def __init__(self) -> None:
        self.seen: list[dict[str, list[Tensor]]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.on_train_batch_end(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        step = pl_module.mini_batches.step
        state = {
            "x": [pl_module.logits],
            "y": trainable(pl_module.network),
            "z": step.shadow.z,
            "buffers": [*pl_module.network.buffers(), *step.shadow.z_buffers, *step.tracked],
        }
        self.seen.append({k: [t.detach().clone() for t in v] for k, v in state.items()})


def distance(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    squares = [(a - b).square().sum() for a, b in zip(one, other, strict=True)]
    return float(torch.stack(squares).sum().sqrt())


def run(module: Cleaner, data: Any) -> History:
    history = History()
    Trainer(callbacks=[history], **FIT).fit(module, loader(data))
    return history


@pytest.mark.parametrize("several", [False, True])
def test_each_level_is_clipped(several: bool) -> None:
    """As a whole, also where it has several optimisers."""
    module = Unit(F2SA(), several, gradient_clip_val=(1e-4, 1e-2))
    seen = run(module, batches(4, torch.float32)).seen
    for before, after in pairwise(seen[1:]):
        assert distance(before["x"], after["x"]) == pytest.approx(1e-4, rel=1e-2)
        assert distance(before["y"], after["y"]) == pytest.approx(1e-2, rel=1e-2)
        assert distance(before["z"], after["z"]) == pytest.approx(1e-2, rel=1e-2)


def test_one_level_may_be_clipped_alone() -> None:
    free = run(Unit(F2SA()), batches(2, torch.float32)).seen
    torch.manual_seed(0)
    seen = run(Unit(F2SA(), gradient_clip_val=(1e-4, None)), batches(2, torch.float32)).seen
    assert distance(seen[1]["x"], seen[2]["x"]) == pytest.approx(1e-4, rel=1e-3)
    assert distance(seen[0]["y"], seen[1]["y"]) > 0.05 < distance(free[0]["y"], free[1]["y"])


@pytest.mark.parametrize(
    ("method", "moved"),
    [
        (F2SA(), "01111111"),
        (F2SA(warmup=3), "00011111"),
        (F2SA(x_every=3), "00100100"),
        (F2SA(warmup=2, x_every=2), "00010101"),
        (SOBA(warmup=1), "01111111"),
        (DARTS(warmup=2), "00111111"),
    ],
    ids=str,
)
def test_when_x_moves(method: Method, moved: str) -> None:
    seen = run(Unit(method), batches(8, torch.float32)).seen
    pairs = list(pairwise(seen))
    assert "".join(str(int(distance(a["x"], b["x"]) > 0)) for a, b in pairs) == moved
    assert all(distance(a["y"], b["y"]) > 0 for a, b in pairs)


def sick(data: list[Any], *places: int) -> list[Any]:
    for place in places:
        data[place]["upper"][0][0, 0] = float("nan")
    return data


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "method", [F2SA(), StreamingIVSP(), SOBA()], ids=lambda m: type(m).__name__
)
def test_a_batch_that_is_not_finite_makes_no_step(method: Method, accumulate: int) -> None:
    module = Unit(method, skip_nonfinite=True, accumulate=accumulate)
    seen = run(module, sick(batches(8, torch.float32), 4)).seen
    before, after = seen[4], seen[4 + accumulate]
    for kind, values in before.items():
        assert len(values) > 0
        assert all(torch.equal(a, b) for a, b in zip(values, after[kind], strict=True)), kind
    assert module.last_step is not None
    assert module.last_step.skipped == 1
    step = module.mini_batches.step  # type: ignore[union-attr]
    assert step is not None
    assert step.skipped == (1, 0)
    assert step.k == module.trainer.global_step == 8 // accumulate - 1
    assert all(t.isfinite().all() for values in seen[-1].values() for t in values)
    assert distance(seen[-1]["y"], after["y"]) > 0


def test_a_loss_alone_may_be_infinite() -> None:
    class Infinite(Unit):
        def upper_loss(self, batch: Any) -> Tensor:
            value = super().upper_loss(batch)
            return value + float("inf") if self.trainer.global_step == 1 else value

    module = Infinite(F2SA(), skip_nonfinite=True)
    with pytest.raises(BilevelError, match="10 mini-batches in a row"):
        run(module, batches(12, torch.float32))
    assert module.trainer.global_step == 1


def test_ten_in_a_row_end_the_run_at_the_last_good_point(tmp_path: Path) -> None:
    module, history = Unit(F2SA(), skip_nonfinite=True), History()
    data = sick(batches(40, torch.float32), *range(3, 12), *range(20, 32))
    with pytest.raises(BilevelError, match="10 mini-batches in a row had a loss or gradient"):
        Trainer(callbacks=[history], **FIT).fit(module, loader(data))
    # Nine in a row did not end it.
    assert module.trainer.global_step == 3 + 8
    good = history.seen[20]
    assert torch.equal(module.logits, good["x"][0])
    for kind, now in (("y", trainable(module.network)),):
        assert all(torch.equal(a, b) for a, b in zip(good[kind], now, strict=True))
    now = [*module.network.buffers(), *module.mini_batches.step.shadow.z_buffers]  # type: ignore[union-attr]
    assert all(torch.equal(a, b) for a, b in zip(good["buffers"], now, strict=True))


def test_without_the_option_nothing_is_asked() -> None:
    module = Unit(F2SA())
    run(module, sick(batches(3, torch.float32), 0))
    assert module.trainer.global_step == 3
    assert len(module.logits) == SAMPLES
