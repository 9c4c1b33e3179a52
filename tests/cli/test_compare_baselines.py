"""``compare --baselines``: computed once, kept, and shown beside the methods."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from places import SYNTHETIC

from lightning_bilevel import Baseline, cleaning_baselines
from lightning_bilevel.__main__ import main
from lightning_bilevel.baselines import cleaning
from lightning_bilevel.cli import baselines as baselines_module
from lightning_bilevel.cli import compare as compare_module
from lightning_bilevel.cli.compare import compare
from lightning_bilevel.cli.results import MethodResult, write_figure, write_summary
from lightning_bilevel.data import DigitsCleaning
from lightning_bilevel.modules.networks import sigmoid_network

pytestmark = pytest.mark.integration

CONFIGS = SYNTHETIC.parent


@pytest.fixture(autouse=True)
def _as_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-bilevel"])
    monkeypatch.setattr(cleaning, "find_spec", lambda name: None)
    monkeypatch.setattr(cleaning, "_FEWEST_STEPS", 1)  # it does not matter what is learned
    # The figure takes as long as a method: it is drawn where a test looks at it.
    monkeypatch.setattr(compare_module, "write_figure", lambda *args: None)


def config(tmp_path: Path, task: str, model: dict[str, Any], data: dict[str, Any]) -> Path:
    content = yaml.safe_load((CONFIGS / task / "bome.yaml").read_text())
    content["model"]["init_args"] |= model
    content["data"]["init_args"] |= data
    path = tmp_path / "bome.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    sizes = {"n_train": 60, "n_validation": 40, "n_test": 50}
    return config(tmp_path, "digits", {"n_train": 60, "hidden": 8}, sizes)


def test_a_comparison_without_them_is_extended_and_they_are_computed_once(
    tmp_path: Path,
    digits: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    call = ["compare", str(digits), "--budget", "50ms", "--evaluations", "1", "--out", str(out)]
    main(call)
    assert not (out / "baselines.csv").exists()
    assert "baseline" not in (out / "summary.md").read_text()
    before = (out / "results.csv").read_text()
    with monkeypatch.context() as patch:
        patch.setattr(compare_module, "write_figure", write_figure)
        main([*call, "--baselines"])
    assert (out / "results.csv").read_text() == before
    with (out / "baselines.csv").open() as file:
        found = {row["baseline"]: row for row in csv.DictReader(file)}
    # The network is that of the config, and the seed too.
    data = DigitsCleaning(n_train=60, n_validation=40, n_test=50)
    data.setup()
    expected = cleaning_baselines(data, 0, lambda: sigmoid_network(64, 8, 10))
    assert list(found) == [row.name for row in expected]
    for row in expected:
        for name, value in row.metrics.items():
            assert float(found[row.name][name]) == value
    summary = (out / "summary.md").read_text()
    assert "| *oracle (true labels)* |" in summary
    assert "oracle (true labels): " in (out / "figure.svg").read_text()

    def never(*args: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(baselines_module, "cleaning_baselines", never)
    capsys.readouterr()
    main([*call, "--baselines"])
    assert (out / "summary.md").read_text() == summary
    assert summary in capsys.readouterr().out


def test_few_shot_networks_have_the_channels_of_the_config_and_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"n_train": 2, "n_validation": 2, "n_test": 2, "ways": 3, "queries": 2}
    sizes |= {"train_classes": 5, "validation_classes": 4, "test_classes": 4, "image_size": 16}
    path = config(
        tmp_path, "glyphs", {"tasks": 2, "channels": 2, "ways": 3, "image_size": 16}, sizes
    )
    given = {}
    real = baselines_module.few_shot_baselines

    def seen(data: Any, seed: int, **options: Any) -> list[Baseline]:
        given.update(options, seed=seed)
        return real(data, seed, **options)

    monkeypatch.setattr(baselines_module, "few_shot_baselines", seen)
    compare([path], 0.05, tmp_path / "out", evaluations=1, baselines=True)
    assert given == {"channels": 2, "seconds": 0.05, "seed": 43}
    assert "| *prototypical network, fresh episodes* |" in (tmp_path / "out/summary.md").read_text()


def test_a_task_without_any_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bome.yaml"
    content = yaml.safe_load((SYNTHETIC / "bome.yaml").read_text())
    content["model"]["init_args"]["n"] = 10
    path.write_text(yaml.safe_dump(content))
    compare([path], 0.05, tmp_path / "out", evaluations=1, baselines=True)
    words = "`compare --baselines`: there are none for FullBatchDataModule. They are for `Cleaning"
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out" / "baselines.csv").exists()


def test_they_stand_below_and_are_not_ranked(tmp_path: Path) -> None:
    row = {"iteration": 1, "optimization_time": 1.0, "passes": 4, "test_error": 0.5, "loss": 1.0}
    results = [MethodResult("a", "IVSP", [row]), MethodResult("b", "MEHA", [row | {"loss": 2.0}])]
    better = [Baseline("simple", {"test_error": 0.1, "iteration": 7}, 2.5)]
    write_summary(tmp_path / "s.md", results, "title", better)
    lines = (tmp_path / "s.md").read_text().splitlines()
    assert lines[2] == "| method | test error | loss | iterations | passes | time (s) | note |"
    assert lines[6] == "| *simple* | 0.1 |  | 7 |  | 2.50 | baseline |"
    assert "- **test error**: a, b" in lines
    write_figure(tmp_path / "f", results, "title", better)
    drawn = (tmp_path / "f.svg").read_text()
    assert (
        drawn.count("simple: 0.1") == 1
    )  # in the panel of the test error, not in that of the loss
