"""The benchmarks run at tiny sizes and say what they skip; what they time is not tested."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")

from benchmarks import __main__ as command
from benchmarks import boat, memory, results, target, tasks
from benchmarks.results import Curve, Row, Section
from benchmarks.timing import exponent, in_turns, ratio
from lightning_bilevel import DigitsCleaning

TINY = tasks.Size(
    n=20,
    samples=60,
    episodes=2,
    channels=1,
    steps=2,
    rounds=1,
    seconds=0.05,
    most_coordinates=3000,
    most_samples=1200,
    most_episodes=9,
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(tasks, "DATA", {"mnist": DigitsCleaning, "fashion_mnist": DigitsCleaning})
    # No rival is installed, whatever is.
    for module in (boat, memory, target):
        monkeypatch.setattr(module, "installed", lambda package: None)
    return tmp_path


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    ["overhead", "calls", "byhand", "boat", "target", "memory", "growth", "chunks", "streaming"],
)
def test_a_section_runs_and_leaves_its_results(name: str, tiny: Path) -> None:
    command.run([name], TINY, tiny)
    section = Section.load(tiny / f"{name}.json")
    assert section.rows
    rivals = [row for row in section.rows if row.verdict == "skipped"]
    assert len(rivals) == {"boat": 3, "target": 9, "memory": 2}.get(name, 0)
    assert section.title in (tiny / "table.md").read_text()
    assert (tiny / "benchmarks.png").exists() == (name in ("boat", "target", "memory", "growth"))


def test_those_that_are_there_are_not_run_again_unless_they_are_named(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(command, "run", lambda names, size, folder: ran.append(list(names)))
    (tiny / "growth.json").write_text("{}")
    command.main(["--out", str(tiny)])
    assert ran[-1] == [name for name in command.SECTIONS if name != "growth"]
    command.main(["growth", "--out", str(tiny)])
    assert ran[-1] == ["growth"]
    with pytest.raises(SystemExit):
        command.main(["nothing"])


def test_an_exponent_is_that_of_the_power_law() -> None:
    sizes = [10.0, 100.0, 1000.0]
    assert exponent(sizes, [3.0 * size**1.25 for size in sizes]) == pytest.approx(1.25)
    assert exponent(sizes, [7.0, 7.0, 7.0]) == pytest.approx(0.0)


def test_sides_take_turns() -> None:
    order: list[str] = []
    times = in_turns([lambda: order.append("a"), lambda: order.append("b")], rounds=2, warm_up=1)
    assert order == ["a", "b"] * 3
    assert [len(side) for side in times] == [2, 2]
    assert ratio([1.0, 2.0, 9.0], to=[1.0, 1.0, 3.0]) == 2.0


@pytest.mark.parametrize(
    ("limits", "verdict"),
    [
        ({"at_most": 1.0}, "met"),
        ({"at_most": 0.9}, "missed"),
        ({"at_least": 1.0}, "met"),
        ({"at_least": 1.1}, "missed"),
        ({}, ""),
    ],
)
def test_a_row_says_whether_it_meets_its_target(limits: dict[str, Any], verdict: str) -> None:
    assert Row("", 1.0, **limits).verdict == verdict
    assert Row("", None, **limits).verdict == "not reached"
    assert results.skipped("", "a-package").verdict == "skipped"


def test_who_is_first_to_a_target() -> None:
    ours = Curve("IVSP", [1.0, 2.0, 3.0], [0.5, 0.1, 0.01])
    method = Curve("slm", [1.0, 5.0], [0.5, 0.09])
    library = Curve("higher 5", [4.0, 8.0], [0.1, 0.05])
    found = {row.what: row for row in target.verdicts([ours, method, library], limit=30.0)}
    assert found["IVSP to 0.1 before all others"].value == 2.0
    assert found["IVSP to 0.1 before all others"].note == "the fastest is higher 5"
    assert found["IVSP to 0.01 before other libraries"].value == 10.0
    assert found["IVSP to 0.01 before other libraries"].note.startswith("none reached it")
    assert target.verdicts([Curve("IVSP", [1.0], [0.5]), library], limit=30.0) == []


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    section = Section(
        "a title",
        [Row("a", 1.5, "s", at_most=2.0, note="b"), Row("c", None)],
        [Curve("d", [1.0], [2.0])],
    )
    section.save(tmp_path / "x.json")
    assert Section.load(tmp_path / "x.json") == section
    assert json.loads((tmp_path / "x.json").read_text())["rows"][0]["value"] == 1.5
    lines = results.markdown([section]).splitlines()
    assert "| a | 1.5 s | at most 2 | met | b |" in lines
    assert "| c | - |  | not reached |  |" in lines


@pytest.mark.filterwarnings("ignore")
def test_memory_counts_what_is_held_at_once() -> None:
    import torch

    def work() -> None:
        first = torch.zeros(1000, dtype=torch.float64)
        del first
        torch.zeros(2000, dtype=torch.float64)

    assert memory.peak_bytes(work) == 16_000
    kept: list[torch.Tensor] = []
    assert (
        memory.peak_bytes(work, lambda: kept.append(torch.zeros(1000, dtype=torch.float64)))
        == 24_000
    )


@pytest.mark.filterwarnings("ignore")
def test_ivsp_holds_twelve_parameter_vectors() -> None:
    assert memory.vectors(10_000) <= 12.0
