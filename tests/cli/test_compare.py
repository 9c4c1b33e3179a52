"""The comparison: fair, resumable, and plain about what is wrong."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from clocks import Clock
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from modules import Weighting, weighting_data
from places import SYNTHETIC
from running import trainer

from lightning_bilevel import OptimizationBudget
from lightning_bilevel.__main__ import main
from lightning_bilevel.callbacks.optimization_budget import seconds
from lightning_bilevel.cli.compare import _TimedEpochs, compare
from lightning_bilevel.cli.results import MethodResult, write_csv, write_figure, write_summary


@pytest.fixture(autouse=True)
def _command_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-bilevel"])


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Configs of two methods on ten variables."""
    folder = tmp_path / "small"
    folder.mkdir()
    for name in ("ivsp", "bome"):
        config = yaml.safe_load((SYNTHETIC / f"{name}.yaml").read_text())
        config["model"]["init_args"]["n"] = 10
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return folder


def edited(config: Path, *keys: str, value: Any) -> None:
    content = yaml.safe_load(config.read_text())
    inner = content
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    config.write_text(yaml.safe_dump(content))


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "results.csv").open() as file:
        return list(csv.DictReader(file))


def test_comparison_writes_everything(tmp_path: Path, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    main(["compare", str(small), "--budget", "200ms", "--out", str(out), "--evaluations", "5"])
    found = rows(out)
    for method in ("ivsp", "bome"):
        mine = [row for row in found if row["method"] == method]
        times = [float(row["optimization_time"]) for row in mine]
        assert 1 <= len(mine) <= 7
        assert times == sorted(times)
        # the budget is never underrun, and only the last evaluation is past it
        assert times[-1] >= 0.2
        assert all(time < 0.2 for time in times[:-1])
        assert all(row["x_error"] and row["violation"] and row["kkt_residual"] for row in mine)
        resolved = yaml.safe_load((out / method / "config.yaml").read_text())
        assert resolved["model"]["init_args"]["n"] == 10
    summary = (out / "summary.md").read_text()
    assert "- **x_error**: ivsp, bome" in summary or "- **x_error**: bome, ivsp" in summary
    assert summary in capsys.readouterr().out
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (out / "figure.svg").read_text()


def test_called_again_it_runs_only_what_is_missing(tmp_path: Path, small: Path) -> None:
    out = tmp_path / "out"
    call = ["compare", str(small), "--budget", "100ms", "--out", str(out), "--evaluations", "2"]
    main(call)
    before = rows(out)
    (out / "bome" / "result.json").unlink()
    main(call)
    after = rows(out)
    assert [r for r in after if r["method"] == "ivsp"] == [r for r in before if r["method"] == "ivsp"]
    assert [r for r in after if r["method"] == "bome"] != [r for r in before if r["method"] == "bome"]


def test_an_interrupted_method_goes_on(tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_bilevel.cli import compare as module

    out = tmp_path / "out"
    call = ["compare", str(small / "ivsp.yaml"), "--budget", "400ms", "--out", str(out), "--evaluations", "4"]
    monkeypatch.setattr(module._Recorder, "SAVE_EVERY", 0.0)
    evaluate = module._Recorder.on_validation_end

    def interrupted(self: Any, *args: Any) -> None:
        evaluate(self, *args)
        if len(self.result.rows) == 2:
            raise SystemExit(1)  # not an Exception: as a kill would, it leaves no result behind

    monkeypatch.setattr(module._Recorder, "on_validation_end", interrupted)
    with pytest.raises(SystemExit):
        main(call)
    saved = torch.load(out / "ivsp" / "state.pt", weights_only=True)["rows"]
    monkeypatch.setattr(module._Recorder, "on_validation_end", evaluate)
    main(call)
    finished = json.loads((out / "ivsp" / "result.json").read_text())["rows"]
    assert finished[:2] == saved
    assert finished[2]["iteration"] > saved[1]["iteration"]
    assert finished[2]["optimization_time"] > saved[1]["optimization_time"]
    assert not (out / "ivsp" / "state.pt").exists()


def test_a_method_that_fails_says_why_and_the_others_go_on(tmp_path: Path, small: Path) -> None:
    out = tmp_path / "out"
    edited(small / "ivsp.yaml", "model", "init_args", "solver", "init_args", "max_trials", value=1)
    # Long enough for the iteration that needs a second trial, on a machine that does other things too.
    main(["compare", str(small), "--budget", "2s", "--out", str(out), "--evaluations", "2"])
    lines = {line.split("|")[1].strip(): line for line in (out / "summary.md").read_text().splitlines() if line.startswith("| ")}
    assert "LineSearchError: IVSP stopped in outer iteration" in lines["ivsp"]
    assert "Error" not in lines["bome"]


@pytest.mark.parametrize(
    ("prepare", "arguments", "words"),
    [
        (lambda f: None, ["--budget", "fast"], "budget 'fast' is not a duration"),
        (lambda f: None, ["--budget=-1s"], "budget '-1s' is not a duration"),
        (lambda f: None, ["--budget", "10 parsecs"], "budget '10 parsecs' is not a duration"),
        (lambda f: None, ["--evaluations", "0"], "`compare --evaluations 0` must be at least 1"),
        (lambda f: edited(f / "bome.yaml", "model", "init_args", "n", value=11), [], "bome differs|ivsp differs"),
        (lambda f: edited(f / "bome.yaml", "seed_everything", value=3), [], "seed_everything \\(0, not 3\\)"),
        (lambda f: edited(f / "bome.yaml", "model", "init_args", "solver", "class_path", value="BOMB"), [], "BOMB"),
        (lambda f: [p.unlink() for p in f.iterdir()], [], "there is no config"),
    ],
)
def test_bad_calls(tmp_path: Path, small: Path, capsys: Any, prepare: Any, arguments: list[str], words: str) -> None:
    import re

    prepare(small)
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as stop:
        main(["compare", str(small), "--out", str(out), *arguments])
    assert stop.value.code == 2
    assert re.search(words, capsys.readouterr().err)
    assert not out.exists()


def test_a_wrong_constant_ends_with_its_sentence(tmp_path: Path, small: Path, capsys: Any) -> None:
    edited(small / "ivsp.yaml", "model", "init_args", "solver", "init_args", "rho", value=2.0)
    with pytest.raises(SystemExit) as stop:
        main(["compare", str(small), "--out", str(tmp_path / "out")])
    assert stop.value.code == 2
    assert "error: `IVSP`: `rho=2.0` must be smaller than 1/sigma = 1" in capsys.readouterr().err


def test_different_tasks_may_be_forced(tmp_path: Path, small: Path) -> None:
    edited(small / "bome.yaml", "model", "init_args", "n", value=11)
    out = tmp_path / "out"
    main(["compare", str(small), "--allow-different-tasks", "--budget", "50ms", "--out", str(out), "--evaluations", "1"])
    assert {row["method"] for row in rows(out)} == {"ivsp", "bome"}


def test_a_missing_config_and_a_double_name(tmp_path: Path, small: Path, capsys: Any) -> None:
    for paths, words in (
        (["nowhere.yaml"], "there is no such file"),
        ([str(small), str(small)], "several configs named bome, ivsp"),
    ):
        with pytest.raises(SystemExit):
            main(["compare", *paths, "--out", str(tmp_path / "out")])
        assert words in capsys.readouterr().err


def test_a_foreign_folder_is_left_alone(tmp_path: Path, small: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    call = ["compare", str(small), "--out", str(out), "--evaluations", "1", "--budget"]
    out.mkdir()
    (out / "thesis.txt").write_text("precious")
    with pytest.raises(SystemExit):
        main([*call, "50ms"])
    assert "has something else in it" in capsys.readouterr().err
    assert [p.name for p in out.iterdir()] == ["thesis.txt"]
    (out / "thesis.txt").unlink()
    main([*call, "50ms"])
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main([*call, "60ms"])
    assert "has another comparison" in capsys.readouterr().err
    edited(small / "bome.yaml", "model", "init_args", "solver", "init_args", "xi", value=0.01)
    with pytest.raises(SystemExit):
        main([*call, "50ms"])
    assert "bome was run there with other settings" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "value"), [("1s", 1.0), ("500ms", 0.5), ("2m", 120.0), ("1.5h", 5400.0), (3, 3.0), ("7", 7.0)])
def test_durations(text: str | float, value: float) -> None:
    assert seconds(text) == value


def test_budget_counts_the_solvers_time_only(tmp_path: Path, clock: Clock) -> None:
    class Timed(Weighting):
        """Its f takes 20 ms, and what comes after a step 100 ms."""

        def upper_loss(self, batch: Any) -> torch.Tensor:
            clock.now += 0.02
            return super().upper_loss(batch)

        def on_train_batch_end(self, *args: Any) -> None:
            clock.now += 0.1

    module = Timed()
    trainer(tmp_path, callbacks=[OptimizationBudget("50ms")]).fit(module, datamodule=weighting_data())
    assert module.last_step is not None
    assert 0.05 <= module.last_step.optimization_time < 0.1
    assert module.last_step.iteration >= 2  # the pause after the first did not end the run


def test_budget_needs_a_bilevel_module(tmp_path: Path) -> None:
    class Plain(LightningModule):
        def training_step(self, batch: Any, batch_idx: int) -> None: ...

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)

    with pytest.raises(MisconfigurationException, match="`OptimizationBudget` was given a Plain: it needs a bilevel module"):
        trainer(tmp_path, callbacks=[OptimizationBudget(1)]).fit(Plain(), [1])


def test_timed_epochs_end_when_an_evaluation_is_due() -> None:
    now = [0.0]
    epochs = _TimedEpochs([1, 2], [1.0, 3.0], lambda: now[0])
    lengths = []
    for _ in range(2):
        count = 0
        for _batch in epochs:
            now[0] += 0.25
            count += 1
        lengths.append(count)
    assert lengths == [4, 8]


def test_report_ranks_and_marks_the_best(tmp_path: Path) -> None:
    results = [
        MethodResult("a", "IVSP", [{"iteration": 1, "optimization_time": 1.0, "passes": 4, "loss": 0.5, "auroc": 0.9}]),
        MethodResult("b", "MEHA", [{"iteration": 2, "optimization_time": 1.0, "passes": 8, "loss": 0.7, "auroc": 0.95}]),
        MethodResult("c", "SLM", [{"iteration": 2, "optimization_time": 0.1, "passes": 8, "loss": 0.1}], error="Boom | bang"),
        MethodResult("d", "BOME"),
    ]
    write_summary(tmp_path / "s.md", results, "title")
    text = (tmp_path / "s.md").read_text()
    assert "| a | **0.5** | 0.9 | 1 | 4 | 1.00 |  |" in text
    assert "| b | 0.7 | **0.95** |" in text
    assert "| c | 0.1 |  | 2 | 8 | 0.10 | Boom / bang |" in text
    assert "- **loss**: a, b\n- **auroc**: b, a" in text
    write_csv(tmp_path / "r.csv", results)
    assert (tmp_path / "r.csv").read_text().splitlines()[0] == "method,solver,iteration,optimization_time,passes,loss,auroc"
    write_figure(tmp_path / "f", results, "title")
    assert (tmp_path / "f.svg").exists()


class TestAModuleOfTheUsers:
    """Such as README's, with the mixin and without validation."""

    def config(self, tmp_path: Path, **model: Any) -> Path:
        content = {"seed_everything": 0, "trainer": {"accelerator": "cpu"}, "data": {"class_path": "modules.CleanerData"}}
        path = tmp_path / "own.yaml"
        path.write_text(yaml.safe_dump({**content, "model": model}))
        return path

    def test_it_is_evaluated_all_the_same(self, tmp_path: Path) -> None:
        path = self.config(tmp_path, class_path="modules.Cleaner", init_args={"n_train": 30})
        (result,) = compare([path], 0.2, tmp_path / "out", evaluations=2)
        assert result.error is None
        assert result.solver == "IVSP"
        assert len(result.rows) == 2
        assert result.rows[-1]["optimization_time"] >= 0.2
        assert "kkt_residual" in result.rows[-1]

    def test_a_module_that_is_not_told_its_solver(self, tmp_path: Path) -> None:
        path = self.config(tmp_path, class_path="wrong_modules.Right")
        with pytest.raises(ValueError, match=r"`Right` is not told its solver by the config: give its `__init__` an argument"):
            compare([path], 0.2, tmp_path / "out")
