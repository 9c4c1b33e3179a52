"""Nothing is lost: errors, full disks and folders that cannot be written to."""

from __future__ import annotations

import errno
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from modules import Weighting, weighting_data
from places import SYNTHETIC
from running import same_parameters, trainer
from torch import Tensor

from lightning_bilevel import BilevelError, LastCheckpoint, output
from lightning_bilevel.__main__ import main
from lightning_bilevel.checkpoint import WholeFileIO
from lightning_bilevel.cli.app import BilevelCLI


class Failing(Weighting):
    """Whose f is NaN from some outer iteration on."""

    def __init__(self, iteration: int = 4, **declared: Any) -> None:
        super().__init__(**declared)
        self.iteration = iteration

    def upper_loss(self, batch: Any) -> Tensor:
        value = super().upper_loss(batch)
        return value * float("nan") if self.trainer.global_step >= self.iteration else value


def run_with(tmp_path: Path, last: LastCheckpoint, module: Any, steps: int = 30, **fit: Any) -> Any:
    run = trainer(tmp_path, max_steps=steps, callbacks=[last], enable_checkpointing=True)
    run.fit(module, datamodule=weighting_data(), **fit)
    return module


def test_an_error_saves_the_last_point(tmp_path: Path) -> None:
    good, bad = Weighting(), Failing()
    trainer(tmp_path, max_steps=4).fit(good, datamodule=weighting_data())
    with pytest.raises(BilevelError, match="in outer iteration 5"):
        run_with(tmp_path, LastCheckpoint(tmp_path, "1h"), bad)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 4
    assert same_parameters(good, bad)
    assert all(
        torch.equal(saved["state_dict"][name], tensor) for name, tensor in good.state_dict().items()
    )


def test_a_refused_resume_leaves_the_checkpoint(tmp_path: Path) -> None:
    run_with(tmp_path, LastCheckpoint(tmp_path), Weighting(), steps=5)
    before = (tmp_path / "last.ckpt").read_bytes()
    with pytest.raises(Exception, match="belongs to another problem"):
        run_with(tmp_path, LastCheckpoint(tmp_path), Weighting(29), ckpt_path="last")
    assert (tmp_path / "last.ckpt").read_bytes() == before
    assert sorted(p.name for p in tmp_path.glob("*.ckpt")) == ["last.ckpt"]


def test_a_new_run_leaves_the_checkpoint_of_the_old_one(tmp_path: Path) -> None:
    run_with(tmp_path, LastCheckpoint(tmp_path), Weighting(), steps=5)
    before = (tmp_path / "last.ckpt").read_bytes()
    run_with(tmp_path, LastCheckpoint(tmp_path), Weighting(), steps=7)
    assert (tmp_path / "last.ckpt").read_bytes() == before
    assert torch.load(tmp_path / "last-v1.ckpt", weights_only=True)["global_step"] == 7
    resumed = run_with(tmp_path, LastCheckpoint(tmp_path), Weighting(), steps=9, ckpt_path="last")
    assert resumed.last_step.iteration == 9
    assert torch.load(tmp_path / "last-v1.ckpt", weights_only=True)["global_step"] == 9


@pytest.mark.parametrize("length", [1, 2, 10])
def test_it_saves_at_its_interval_whatever_the_epochs(tmp_path: Path, length: int) -> None:
    steps: list[int] = []

    class Saves(LastCheckpoint):
        def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
            steps.append(trainer.global_step)
            super()._save_checkpoint(trainer, filepath)

    run = trainer(
        tmp_path, max_steps=20, callbacks=[Saves(tmp_path, 1e-9)], enable_checkpointing=True
    )
    run.fit(Weighting(), datamodule=weighting_data(epoch_length=length))
    assert len(steps) >= 10
    assert steps[-1] == 20


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_full_disk_keeps_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    real, calls = getattr(os, fails), [0]

    def full(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(output.os, fails, full)
    with pytest.raises(OSError, match=r"No space left on device: '.*last.ckpt'"):
        run_with(tmp_path, LastCheckpoint(tmp_path, 1e-9), Weighting())
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
    monkeypatch.undo()
    resumed = run_with(tmp_path, LastCheckpoint(tmp_path), Weighting(), ckpt_path="last")
    assert same_parameters(
        resumed, run_with(tmp_path, LastCheckpoint(tmp_path / "other"), Weighting())
    )


def test_a_full_disk_at_the_end_leaves_the_file_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step is saved twice: once more when the other callbacks have finished."""
    real, calls = os.fsync, [0]

    def full(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] > 3:  # one for each step, and then the end
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(output.os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*last.ckpt'"):
        run_with(tmp_path, LastCheckpoint(tmp_path, 1e-9), Weighting(), steps=3)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 3


def test_a_folder_that_cannot_be_written_to_is_named_at_the_first_save(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    module = Weighting()
    with pytest.raises(OSError, match=r"Not a directory: .*inside"):
        run_with(tmp_path, LastCheckpoint(tmp_path / "file" / "inside", 1e-9), module)
    assert module.last_step is not None
    assert module.last_step.iteration == 1


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_the_command_line_says_what_is_wrong_with_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    """Wherever it is met first, such as by the logger."""
    monkeypatch.setattr(sys, "argv", ["lightning-bilevel"])

    def broken(*args: Any, **kwargs: Any) -> None:
        raise OSError(number, os.strerror(number), str(tmp_path))

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.__init__", broken)
    with pytest.raises(SystemExit) as stop:
        main(
            [
                "fit",
                "--config",
                str(SYNTHETIC / "ivsp.yaml"),
                f"--trainer.default_root_dir={tmp_path}",
            ]
        )
    assert stop.value.code == 1
    error = capsys.readouterr().err
    assert f"lightning-bilevel: [Errno {number}] {os.strerror(number)}: '{tmp_path}'" in error
    assert "Traceback" not in error


@pytest.mark.integration
def test_a_comparison_that_meets_a_full_disk_blames_no_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-bilevel"])
    from lightning_bilevel.cli import compare as module

    monkeypatch.setattr(module, "SAVE_EVERY", 1e-9)
    call = ["compare", str(SYNTHETIC / "ivsp.yaml"), "--budget", "50ms", "--evaluations", "2"]
    call += ["--out", str(tmp_path / "out")]
    replace = os.replace

    def full(a: Any, b: Any) -> None:
        if str(b).endswith("last.ckpt"):
            raise OSError(errno.ENOSPC, "No space left on device", str(b))
        replace(a, b)

    monkeypatch.setattr(output.os, "replace", full)
    with pytest.raises(SystemExit) as stop:
        main(call)
    assert stop.value.code == 1
    assert "No space left on device" in capsys.readouterr().err
    assert not (tmp_path / "out" / "ivsp" / "result.json").exists()
    monkeypatch.setattr(output.os, "replace", replace)
    main(call)
    assert json.loads((tmp_path / "out" / "ivsp" / "result.json").read_text())["error"] is None


def test_the_command_line_keeps_a_users_own_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-bilevel"])
    content = yaml.safe_load((SYNTHETIC / "ivsp.yaml").read_text())
    content["trainer"]["default_root_dir"] = str(tmp_path)
    for own in ([], [{"class_path": "ModelCheckpoint", "init_args": {"every_n_epochs": 3}}]):
        content["trainer"]["callbacks"] = own
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
            run = BilevelCLI(["--config", str(tmp_path / "run.yaml")], run=False).trainer
        assert [type(callback) for callback in run.checkpoint_callbacks] == [
            ModelCheckpoint if own else LastCheckpoint
        ]
        assert isinstance(run.strategy.checkpoint_io, WholeFileIO)
