"""Nothing is lost by kills and signals, in processes of their own."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from places import SUPPORT
from starting import Forked
from tables import SOLVERS

pytestmark = pytest.mark.integration


def crashed(folder: Path, seed: int, kills: int, *solvers: str, timeout: float) -> dict[str, Any]:
    process = Forked(SUPPORT / "crashes.py", folder, seed, kills, *solvers, cwd=folder)
    printed, errors = process.communicate(timeout=timeout)
    assert process.returncode == 0, errors
    found: dict[str, Any] = json.loads(printed)
    return found


@pytest.fixture(scope="module")
def crashes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return crashed(tmp_path_factory.mktemp("crashes"), 0, 6, "own", "meha", timeout=500)


def check(run: dict[str, Any], kills: int) -> None:
    assert run["code"] == 0
    assert run["killed"] == kills
    assert run["writing"] == kills // 2
    assert run["equal"]
    assert run["steps"] == sorted(run["steps"])  # no kill cost what had been saved
    assert run["left"] == [
        "certificate.json",
        "config.yaml",
        "last.ckpt",
        "log.txt",
        "run.yaml",
    ]


def test_six_kills_later_a_run_ends_where_it_would_have(crashes: dict[str, Any]) -> None:
    for run in crashes["kills"]:
        check(run, 6)


@pytest.mark.slow
def test_fifty_kills_later_too(tmp_path: Path) -> None:
    for run in crashed(tmp_path, 1, 50, *SOLVERS, timeout=3000)["kills"]:
        check(run, 50)


def test_a_comparison_goes_on_after_kills(crashes: dict[str, Any]) -> None:
    found = crashes["compare"]
    assert found["code"] == 0, found["log"]
    assert found["killed"] >= 2
    for result in found["results"]:
        assert result["error"] is None
        iterations = [row["iteration"] for row in result["rows"]]
        assert len(iterations) >= 3
        assert iterations == sorted(set(iterations))
        assert result["rows"][-1]["optimization_time"] >= 0.6


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 128 + signal.SIGTERM), ("SIGINT", 1)])
def test_told_to_end_it_saves_and_ends(crashes: dict[str, Any], name: str, code: int) -> None:
    found = crashes[name]
    assert found["code"] == code
    assert 0 < found["step"] < 300
    assert found["resumed"] == 0
    assert found["equal"]
