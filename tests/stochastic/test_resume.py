"""A run that was interrupted goes on bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import OPTIONS, Cleaner, Listed, Stateful, batches
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from lightning_bilevel import Envelope
from lightning_bilevel.stochastic import DARTS, F2SA, MEHA, SOBA, Method, StreamingIVSP


class SaveAt(Callback):
    """Saves the run after a step, or at the end of an epoch."""

    def __init__(self, path: Path, step: int = -1, epoch: int = -1) -> None:
        self.path, self.step, self.epoch = path, step, epoch

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)


def run(method: Method, data: Any, *saving: SaveAt, resume: Path | None = None) -> list[Tensor]:
    torch.manual_seed(1 if resume is None else 2)
    module = Cleaner(method, scheduler=lambda o: StepLR(o, 3, 0.5))
    trainer = Trainer(max_epochs=3, callbacks=[*saving], enable_checkpointing=False, **OPTIONS)
    trainer.fit(module, data(), ckpt_path=resume)
    step = module.mini_batches.step
    return [
        *(value.clone() for value in module.state_dict().values()),
        *step.shadow.z,
        *step.shadow.z_buffers,
        *_leaves([o.state_dict() for o in (*trainer.optimizers, *step.shadow_optimizers)]),
        *step.tracked,
    ]


def _leaves(state: Any) -> list[Tensor]:
    if isinstance(state, dict):
        return [leaf for value in state.values() for leaf in _leaves(value)]
    if isinstance(state, list):
        return [leaf for value in state for leaf in _leaves(value)]
    return [torch.as_tensor(state)] if isinstance(state, (Tensor, float, int)) else []


@pytest.mark.parametrize("method", [F2SA(), MEHA(), StreamingIVSP(), SOBA(), DARTS()])
def test_in_the_middle_of_an_epoch(method: Method, tmp_path: Path) -> None:
    saved = tmp_path / "a.ckpt"
    data = batches(7, torch.float32)
    whole = run(method, lambda: Stateful(data), SaveAt(saved, step=10))
    again = run(method, lambda: Stateful(data), resume=saved)
    assert len(whole) == len(again) > 20
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))


def test_at_the_end_of_an_epoch_with_a_plain_loader(tmp_path: Path) -> None:
    def shuffled() -> Any:
        return DataLoader(Listed(data), batch_size=None, shuffle=True)

    saved = tmp_path / "a.ckpt"
    data = batches(7, torch.float32)
    whole = run(F2SA(), shuffled, SaveAt(saved, epoch=1))
    again = run(F2SA(), shuffled, resume=saved)
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))


def test_a_model_for_use_ignores_z(tmp_path: Path) -> None:
    saved = tmp_path / "a.ckpt"
    run(F2SA(), lambda: Stateful(batches(3, torch.float32)), SaveAt(saved, step=9))
    content = torch.load(saved, weights_only=True)
    module = Cleaner.load_from_checkpoint(saved)
    for name, value in module.state_dict().items():
        assert torch.equal(value, content["state_dict"][name])


def test_a_restored_point_does_not_change_where_the_run_goes_on(tmp_path: Path) -> None:
    """The checkpoint has the last point; the next step forgets the multiplier of the other one."""
    saved = tmp_path / "a.ckpt"
    torch.manual_seed(0)
    module = Cleaner(F2SA(), envelope=Envelope(rho=0.1, sigma=0.0, delta=1e-3))
    data = batches(5, torch.float32)
    options = {**OPTIONS, "enable_checkpointing": False}
    first = Trainer(max_epochs=1, **options)
    first.fit(module, Stateful(data))
    last = {name: value.clone() for name, value in module.state_dict().items()}
    module.restore(tuple(torch.zeros_like(v) for v in module.point), 3.0)
    certificate = module.certify()
    assert certificate is not None
    assert certificate.multiplier == 3.0
    assert "restored" in certificate.point
    first.save_checkpoint(saved)
    again = Cleaner(F2SA())
    Trainer(max_epochs=1, **options).fit(again, Stateful(data), ckpt_path=saved)
    for name, value in again.state_dict().items():
        assert torch.equal(value, last[name]), name
    Trainer(max_epochs=1, **options).fit(module, Stateful(data))
    after = module.certify()
    assert after is not None
    assert after.multiplier != 3.0
    assert after.point.startswith("the last iterate")
