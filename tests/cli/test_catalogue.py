"""The ready configs, and what the command line says without being asked to solve anything."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from places import CONFIGS

import lightning_bilevel
from lightning_bilevel import __main__ as program
from lightning_bilevel.__main__ import main
from lightning_bilevel.cli.app import BilevelCLI
from lightning_bilevel.cli.catalogue import folder, ready, tasks, with_ready_configs

IVSP = folder() / "synthetic" / "ivsp.yaml"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder has no configs, as for a user who has installed the package."""
    monkeypatch.setattr(sys, "argv", ["lightning-bilevel"])
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("args", [[], ["--help"], ["-h"]])
def test_alone_it_explains_itself_in_a_screen(
    args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main(args)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    for command in (*BilevelCLI.subcommands(), "compare", "tasks"):
        assert any(command in line for line in lines), command


def test_the_command_that_it_names_runs(capsys: pytest.CaptureFixture[str]) -> None:
    overview = str(program.__doc__).splitlines()
    (named,) = (line for line in overview if line.startswith("  lightning-bilevel "))
    with pytest.raises(SystemExit) as stop:
        main([*named.split()[1:], "--print_config"])
    assert stop.value.code == 0
    model = yaml.safe_load(capsys.readouterr().out)["model"]["class_path"]
    assert model == "lightning_bilevel.HyperCleaning"


def test_a_printed_config_prints_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*args: str) -> str:
        with pytest.raises(SystemExit):
            main(["fit", *args, "--print_config"])
        return capsys.readouterr().out

    first = printed("--config", "synthetic/ivsp", "--model.n=10", "--budget=2s")
    (tmp_path / "mine.yaml").write_text(first)
    assert printed("--config", "mine.yaml") == first
    assert "n: 10" in first


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert capsys.readouterr().out == f"lightning-bilevel {lightning_bilevel.__version__}\n"


def test_tasks_lists_every_folder_with_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    main(["tasks"])
    told = capsys.readouterr().out
    folders = {path.relative_to(CONFIGS).parts[0] for path in CONFIGS.rglob("*.yaml")}
    assert set(tasks()) == folders
    for path in CONFIGS.rglob("*.yaml"):
        shown = path.relative_to(CONFIGS).parts[:2]
        assert all(Path(part).stem in told for part in shown), path
    for name, words in tasks().items():
        config = next((folder() / name).rglob("*ivsp.yaml")).read_text()
        data = yaml.safe_load(config)["data"]["class_path"]
        downloads = data in ("MNISTCleaning", "FashionMNISTCleaning", "OmniglotEpisodes")
        assert ("no d" in words) != downloads, name


@pytest.mark.parametrize("task", tasks())
def test_a_gpu_is_used_where_there_is_one_and_the_papers_budget_is_a_flag_away(task: str) -> None:
    """The problem in float64 stays on the CPU; a ready config never takes more than one GPU."""
    budget = {"synthetic": "1s", "mnist": "60s", "fashion_mnist": "60s", "omniglot": "600s"}
    for path in (folder() / task).rglob("*.yaml"):
        settings = yaml.safe_load(path.read_text())["trainer"]
        if task == "synthetic":
            assert (settings["accelerator"], settings["precision"]) == ("cpu", "64-true")
        else:
            assert (settings["accelerator"], settings["devices"]) == ("auto", 1)
            assert "precision" not in settings
        if "the paper's settings" in path.read_text():
            assert f"`--budget {budget[task]}`" in path.read_text(), path


@pytest.mark.parametrize("name", ["synthetic/ivsp", "synthetic/ivsp.yaml"])
def test_a_ready_config_is_found_by_its_name(name: str) -> None:
    assert ready(Path(name)) == IVSP
    assert with_ready_configs(["fit", "--config", name]) == ["fit", "--config", str(IVSP)]
    assert with_ready_configs(["fit", f"--config={name}", "-c", name]) == [
        "fit",
        f"--config={IVSP}",
        "-c",
        str(IVSP),
    ]


def test_a_folder_of_ready_configs_is_found_by_its_name() -> None:
    assert ready(Path("synthetic")) == IVSP.parent


def test_what_is_not_ready_stays_what_it_is(tmp_path: Path) -> None:
    for name in (
        "mine.yaml",
        "synthetic/mine.yaml",
        "../synthetic/ivsp.yaml",
        "",
        str(tmp_path / "synthetic"),
    ):
        assert ready(Path(name)) == Path(name)
    (tmp_path / "synthetic").mkdir()
    (tmp_path / "synthetic" / "ivsp.yaml").write_text("mine")
    # A file of the user's comes first.
    assert ready(Path("synthetic/ivsp.yaml")) == Path("synthetic/ivsp.yaml")


def test_fit_by_name_from_anywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(
        [
            "fit",
            "--config",
            "synthetic/ivsp",
            "--trainer.fast_dev_run=true",
            "--trainer.enable_model_summary=false",
        ]
    )
    assert "KKT stationarity" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ["fit", "--config", "nowhere.yaml"],
            ["File does not exist", "See `lightning-bilevel --help`"],
        ),
        (
            ["fitt"],
            ["invalid choice: 'fitt'", "See `lightning-bilevel --help`."],
        ),
        (["--nonsense"], ["nonsense", "See `lightning-bilevel --help`"]),
        (["certify"], ["required", "model"]),
        (["tasks", "--all"], ["unrecognized arguments: --all"]),
        (
            ["compare", "nowhere"],
            ["File does not exist"],
        ),
    ],
)
def test_a_wrong_call_ends_with_where_to_look(
    args: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(args)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    for part in words:
        assert part in error
