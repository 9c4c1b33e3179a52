"""A user's ways into two processes: command line, lists of callbacks in Python, signals."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import two_processes
import yaml
from modules import samples
from places import SUPPORT
from running import trainer
from starting import Forked, gone, started, two_process_config

from lightning_bilevel import FullBatchDataModule

pytestmark = [pytest.mark.compatibility, pytest.mark.integration]


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of all fits over two processes, and what they printed."""
    folder = tmp_path_factory.mktemp("fits")
    process = Forked(SUPPORT / "two_processes.py", folder, cwd=folder)
    printed, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return folder, printed


@pytest.mark.parametrize("name", two_processes.lists(Path()))
def test_fit_and_test_end_with_any_callbacks(fits: tuple[Path, str], name: str) -> None:
    assert f"done: {name}\n" in fits[1]


def test_the_certificate_is_printed_and_saved_by_one_process(fits: tuple[Path, str]) -> None:
    folder, printed = fits
    assert printed.count("IVSP on Tested") == 6  # every list has the report
    assert (folder / "report" / "certificate.json").is_file()
    assert (folder / "last" / "last.ckpt").is_file()


def test_batch_normalisation_is_that_of_one_process(fits: tuple[Path, str], tmp_path: Path) -> None:
    first, second = torch.load(fits[0] / "normed.pt", weights_only=True)
    assert all(torch.equal(first[name], second[name]) for name in first)
    module = two_processes.Normed()
    data = FullBatchDataModule(
        samples(21, 1), samples(30, 2), samples(20, 3), samples(20, 4), epoch_length=4
    )
    trainer(tmp_path, max_epochs=5).fit(module, datamodule=data)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(first[name], value, rtol=1e-3, atol=1e-4)


def test_the_documented_command_ends_by_itself_with_a_certificate(tmp_path: Path) -> None:
    path = two_process_config(tmp_path, default_root_dir=str(tmp_path), max_epochs=2)
    process = started("-m", "lightning_bilevel", "fit", "--config", path, cwd=tmp_path)
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert printed.count("IVSP on SineProblem") == 1
    assert list(tmp_path.glob("lightning_logs/version_0/certificate.json"))


# A moment, and whether a checkpoint must be left. Before training, Python's own handler may be in
# place (-15).
MOMENTS = [
    pytest.param("on_fit_start", 0, False, marks=pytest.mark.slow),
    ("on_sanity_check_end", 0, False),
    ("on_train_batch_end", 60, True),
    pytest.param("on_validation_start", 1, True, marks=pytest.mark.slow),
    pytest.param("on_train_end", 0, True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("hook", "step", "saved"), MOMENTS)
def test_sigterm_ends_both_processes_at_any_moment(
    tmp_path: Path, hook: str, step: int, saved: bool
) -> None:
    path = two_process_config(tmp_path, default_root_dir=str(tmp_path), max_epochs=2)
    content: dict[str, Any] = yaml.safe_load(path.read_text())
    terminate = {"class_path": "two_processes.Terminate", "init_args": {"hook": hook, "step": step}}
    content["trainer"]["callbacks"] = [terminate]
    path.write_text(yaml.safe_dump(content))
    process = Forked("-m", "lightning_bilevel", "fit", "--config", path, cwd=tmp_path)
    try:
        _, errors = process.communicate(timeout=90)
        assert process.returncode in (128 + signal.SIGTERM, -signal.SIGTERM), errors
        assert (tmp_path / "checkpoints" / "last.ckpt").is_file() == saved
        if saved:
            assert process.returncode == 128 + signal.SIGTERM, errors
            assert torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)[
                "global_step"
            ] >= max(step, 1)
        others = [int(pid) for pid in re.findall(r"^process (\d+)$", errors, re.M)]
        deadline = time.monotonic() + 20
        while not all(map(gone, others)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert all(map(gone, others))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
