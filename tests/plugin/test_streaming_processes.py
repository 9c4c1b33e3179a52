"""Mini-batches over two processes: ordinary samplers, the mean of both, one sum per step."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import streaming_processes
import torch
from modules import samples
from places import SUPPORT
from starting import Forked

pytestmark = [pytest.mark.compatibility, pytest.mark.integration]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("streaming")
    process = Forked(SUPPORT / "streaming_processes.py", folder / "ends.pt", cwd=folder)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return torch.load(folder / "ends.pt", weights_only=True)


@pytest.mark.parametrize("case", streaming_processes.CASES)
def test_both_processes_end_at_the_same_point(ends: Any, case: str) -> None:
    """Running statistics too, which validations and epochs share."""
    first, second = ends[case]
    for name, value in first["state"].items():
        assert torch.equal(value, second["state"][name]), name
    assert first["kkt"] == second["kkt"]


@pytest.mark.parametrize("case", ["plain", "touching", "soba"])
def test_two_processes_are_one_on_the_joined_batches(ends: Any, tmp_path: Path, case: str) -> None:
    together = ends[case][0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = streaming_processes.joined(ends[case])
        alone = streaming_processes.run(case, tmp_path, loader, max_epochs=1)
    assert together["iterations"] == alone["iterations"] == 9
    for name, value in alone["state"].items():
        torch.testing.assert_close(together["state"][name], value, rtol=0, atol=1e-10)


def test_the_certificate_is_of_the_data_of_both(ends: Any) -> None:
    """The two parts make up all samples, so it is the one of a single process."""
    together = ends["plain"][0]
    module = streaming_processes.module_of("plain").double().eval()
    module.load_state_dict(together["state"])
    inputs, labels, _ = samples(20, 1)
    with torch.no_grad():
        assert together["upper"] == pytest.approx(
            float(module.upper_loss((inputs.double(), labels))), abs=1e-12
        )


def test_one_sum_per_step(ends: Any) -> None:
    """And another one where a batch says which weights it touches.

    The first step is logged, and then the processes compare their points.
    """
    assert ends["plain"][0]["collectives"] == [2] + [1] * 8
    assert ends["touching"][0]["collectives"] == [3] + [2] * 8


def test_a_sick_batch_of_one_process_is_skipped_by_all(ends: Any) -> None:
    assert [end["skipped"] for end in ends["sick"]] == [1, 1]


def test_the_certificate_says_whose_data_it_is_of(ends: Any) -> None:
    words = "all data (20 upper and 30 lower samples of 2 processes), in eval mode"
    assert all(end["data"].startswith(words) for end in ends["plain"])


def test_what_the_samplers_repeat_is_said(ends: Any) -> None:
    """Of 31 samples two processes have 16 each."""
    words = "20 upper and 32 lower samples of 2 processes, 1 of them twice so that"
    assert words in ends["odd"][0]["data"]
