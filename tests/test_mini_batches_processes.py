"""Runs on mini-batches over two processes, and runs that are killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mini_batch_processes
import pytest
import torch
from places import SUPPORT
from records import same
from starting import Forked

pytestmark = [pytest.mark.compatibility, pytest.mark.integration]
SCRIPT = SUPPORT / "mini_batch_processes.py"


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("ddp")
    process = Forked(SCRIPT, "ddp", folder / "ends.pt", cwd=folder)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return torch.load(folder / "ends.pt", weights_only=True)


@pytest.mark.parametrize("way", mini_batch_processes.WAYS)
@pytest.mark.parametrize("method", mini_batch_processes.METHODS)
def test_two_processes_are_one_on_the_joined_batches(ends: Any, method: str, way: str) -> None:
    data = mini_batch_processes.all_batches(way)
    alone = mini_batch_processes.run(method, way, data)
    assert float(alone[0].abs().max()) > 0.05
    first, second = ends[method, way]
    # A central difference divides the rounding of gradients by its length.
    tolerance = 1e-12 if method not in ("DARTS", "SOBA") else 1e-9
    for one, other, whole in zip(first, second, alone, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, whole.detach(), rtol=0, atol=tolerance)


def test_a_run_that_was_killed_goes_on_bit_for_bit(tmp_path: Path) -> None:
    process = Forked(SCRIPT, "kill", tmp_path, cwd=tmp_path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    killed, quiet = (
        torch.load(tmp_path / name / "last.ckpt", weights_only=True) for name in ("killed", "quiet")
    )
    assert killed["global_step"] == quiet["global_step"] == 18
    for one in (killed, quiet):
        one["callbacks"]["MiniBatches"].pop("seconds")
    keys = ("state_dict", "optimizer_states", "lr_schedulers")
    assert all(same(killed[key], quiet[key]) for key in keys)
    assert same(killed["callbacks"]["MiniBatches"], quiet["callbacks"]["MiniBatches"])
