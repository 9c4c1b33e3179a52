"""The comparison: fair, resumable, and plain about what is wrong."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from clocks import Clock
from matplotlib.figure import Figure
from modules import Weighting, weighting_data
from places import CONFIGS, SYNTHETIC
from running import trainer

from lightning_bilevel import BOME, IVSP, FullBatchDataModule, OptimizationBudget, SineProblem
from lightning_bilevel.__main__ import main
from lightning_bilevel.callbacks.ends import seconds
from lightning_bilevel.cli import compare as compare_module
from lightning_bilevel.cli.compare import (
    TRAINER,
    Method,
    MethodResult,
    Recorder,
    compare,
    draw,
    write_results,
)

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def _as_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-bilevel"])
    # The figure takes as long as two methods: it is drawn where a test looks at it.
    monkeypatch.setattr(compare_module, "draw", lambda *args: Figure())


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


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """An iteration of IVSP or BOME takes 30 ms, whatever else the machine does."""

    def timed(step: Any) -> Any:
        def slowly(*args: Any) -> Any:
            clock.now += 0.03
            return step(*args)

        return slowly

    for method in (IVSP.method_type, BOME.method_type):
        monkeypatch.setattr(method, "step", timed(method.step))


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


def test_comparison_writes_everything(
    tmp_path: Path,
    small: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compare_module, "draw", draw)
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    main(["compare", str(small), "--budget", "200ms", "--out", str(out), "--evaluations", "5"])
    assert not list(elsewhere.iterdir())
    found = rows(out)
    for method in ("ivsp", "bome"):
        mine = [row for row in found if row["method"] == method]
        times = [float(row["optimization_time"]) for row in mine]
        assert 2 <= len(mine) <= 7
        assert times == sorted(times)
        # the budget is never underrun, and only the last evaluation is past it
        assert times[-1] >= 0.2
        assert all(time < 0.2 for time in times[:-1])
        assert all(row["x_error"] and row["violation"] and row["kkt_residual"] for row in mine)
        resolved = yaml.safe_load((out / method / "config.yaml").read_text())
        assert resolved["model"]["init_args"]["n"] == 10
    summary = (out / "summary.md").read_text()
    assert summary in capsys.readouterr().out
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (out / "figure.svg").read_text()


def test_all_methods_start_at_the_same_point(tmp_path: Path, small: Path) -> None:
    first, second = compare([small], 0.05, tmp_path / "out", evaluations=1)
    assert first.rows[0] == second.rows[0]
    row = first.rows[0]
    assert (row["iteration"], row["optimization_time"], row["passes"]) == (0, 0.0, 0)
    assert row.keys() == first.rows[1].keys()
    torch.manual_seed(0)
    problem = SineProblem(n=10).double()
    run = trainer(tmp_path / "other", precision="64-true")
    expected = run.validate(problem, datamodule=FullBatchDataModule(), verbose=False)[0]
    for name in ("x_error", "y_error"):
        assert row[name] == pytest.approx(expected[name], rel=1e-12)


def test_called_again_it_runs_only_what_is_missing(tmp_path: Path, small: Path) -> None:
    out = tmp_path / "out"
    call = ["compare", str(small), "--budget", "100ms", "--out", str(out), "--evaluations", "2"]
    main(call)
    before = rows(out)
    (out / "bome" / "result.json").unlink()
    main(call)
    after = rows(out)
    assert [r for r in after if r["method"] == "ivsp"] == [
        r for r in before if r["method"] == "ivsp"
    ]
    assert [r for r in after if r["method"] == "bome"] != [
        r for r in before if r["method"] == "bome"
    ]


def test_an_interrupted_method_goes_on(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch, steady: None
) -> None:
    out = tmp_path / "out"
    call = [
        "compare",
        str(small / "ivsp.yaml"),
        "--budget",
        "400ms",
        "--out",
        str(out),
        "--evaluations",
        "4",
    ]
    monkeypatch.setattr(compare_module, "SAVE_EVERY", 1e-9)
    start = Recorder.on_train_batch_start

    def interrupted(self: Any, *args: Any) -> None:
        if len(self.rows) == 3:
            raise SystemExit(1)  # not an Exception: as a kill would, it leaves no result behind
        start(self, *args)

    monkeypatch.setattr(Recorder, "on_train_batch_start", interrupted)
    with pytest.raises(SystemExit):
        main(call)
    saved = torch.load(out / "ivsp" / "last.ckpt", weights_only=True)
    rows = saved["callbacks"]["Recorder"]["rows"]
    assert len(rows) == 3
    assert not (out / "ivsp" / "result.json").exists()
    monkeypatch.setattr(Recorder, "on_train_batch_start", start)
    main(call)
    finished = json.loads((out / "ivsp" / "result.json").read_text())["rows"]
    assert finished[:3] == rows
    assert finished[3]["iteration"] > rows[2]["iteration"]
    assert finished[3]["optimization_time"] > rows[2]["optimization_time"]
    assert sorted(path.name for path in (out / "ivsp").iterdir()) == ["config.yaml", "result.json"]


def test_a_comparison_has_its_own_callbacks(tmp_path: Path, small: Path) -> None:
    mine = ["CertificateMonitor", "TQDMProgressBar", {"class_path": "ModelCheckpoint"}]
    edited(small / "ivsp.yaml", "trainer", "callbacks", value=mine)
    edited(small / "ivsp.yaml", "budget", value="1ms")  # of a fit
    seen: list[list[str]] = []

    class Seen(Recorder):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append([type(callback).__name__ for callback in trainer.callbacks])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare_module, "Recorder", Seen)
        (result,) = compare([small / "ivsp.yaml"], 0.05, tmp_path / "out", evaluations=1)
    assert seen == [["OptimizationBudget", "Seen", "LastCheckpoint"]]
    assert result.rows[-1]["optimization_time"] >= 0.05


def test_a_method_that_fails_says_why_and_the_others_go_on(
    tmp_path: Path, small: Path, steady: None
) -> None:
    out = tmp_path / "out"
    edited(small / "ivsp.yaml", "model", "init_args", "solver", "init_args", "max_trials", value=1)
    # Long enough for the iteration that needs a second trial.
    main(["compare", str(small), "--budget", "2s", "--out", str(out), "--evaluations", "2"])
    lines = {
        line.split("|")[1].strip(): line
        for line in (out / "summary.md").read_text().splitlines()
        if line.startswith("| ")
    }
    assert "LineSearchError: IVSP stopped in outer iteration" in lines["ivsp"]
    assert "Error" not in lines["bome"]


@pytest.mark.parametrize(
    ("prepare", "arguments", "words"),
    [
        (lambda f: None, ["--budget", "fast"], "budget 'fast' is not a duration"),
        (
            lambda f: edited(f / "bome.yaml", "seed_everything", value=3),
            [],
            "`compare`: ivsp differs from bome in seed_everything",
        ),
        (
            lambda f: edited(
                f / "bome.yaml", "model", "init_args", "solver", "class_path", value="BOMB"
            ),
            [],
            "BOMB",
        ),
    ],
)
def test_bad_calls(
    tmp_path: Path, small: Path, capsys: Any, prepare: Any, arguments: list[str], words: str
) -> None:
    prepare(small)
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as stop:
        main(["compare", str(small), "--out", str(out), *arguments])
    assert stop.value.code in (1, 2)
    assert words in capsys.readouterr().err
    assert not out.exists()


def test_a_wrong_constant_ends_with_its_sentence(tmp_path: Path, small: Path, capsys: Any) -> None:
    edited(small / "ivsp.yaml", "model", "init_args", "solver", "init_args", "rho", value=2.0)
    with pytest.raises(SystemExit) as stop:
        main(["compare", str(small), "--out", str(tmp_path / "out")])
    assert stop.value.code == 1
    assert "`rho=2.0` must be smaller than 1/sigma = 1" in capsys.readouterr().err


def test_two_configs_of_one_name(tmp_path: Path, small: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["compare", str(small), str(small), "--out", str(tmp_path / "out")])
    assert "each config needs its own name" in capsys.readouterr().err


def test_the_results_of_another_comparison_are_left_alone(
    tmp_path: Path, small: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    config = str(small / "bome.yaml")
    call = ["compare", config, "--out", str(out), "--evaluations", "1", "--budget"]
    main([*call, "50ms"])
    words = "bome was run there with other settings"
    with pytest.raises(SystemExit):
        main([*call, "60ms"])
    assert words in capsys.readouterr().err
    edited(small / "bome.yaml", "model", "init_args", "solver", "init_args", "xi", value=0.01)
    with pytest.raises(SystemExit):
        main([*call, "50ms"])
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("duration", "value"),
    [
        ("1s", 1.0),
        ("500ms", 0.5),
        ("2m", 120.0),
        ("1.5h", 5400.0),
        (3, 3.0),
        ("7", 7.0),
        (1e-5, 1e-5),
    ],
)
def test_durations(duration: Any, value: float) -> None:
    assert seconds(duration) == value


@pytest.mark.parametrize(
    "duration",
    ["soon", "", "0", -1, "1:2:3:4", "3 parsecs", "1e999s", "nan", None],
)
def test_what_is_no_duration(duration: Any) -> None:
    with pytest.raises(
        ValueError,
        match="is not a duration: write a positive number of seconds, or one with ms",
    ):
        seconds(duration)


def test_budget_counts_the_solvers_time_only(tmp_path: Path, clock: Clock) -> None:
    class Timed(Weighting):
        """Its f takes 20 ms, and what comes after a step 100 ms."""

        def upper_loss(self, batch: Any) -> torch.Tensor:
            clock.now += 0.02
            return super().upper_loss(batch)

        def on_train_batch_end(self, *args: Any) -> None:
            clock.now += 0.1

    module = Timed()
    trainer(tmp_path, callbacks=[OptimizationBudget("50ms")]).fit(
        module, datamodule=weighting_data()
    )
    assert module.last_step is not None
    assert 0.05 <= module.last_step.optimization_time < 0.1
    assert module.last_step.iteration >= 2  # the pause after the first did not end the run


@pytest.mark.parametrize("validates", [True, False])
@pytest.mark.parametrize("length", [1, 4, 1000])
def test_evaluations_are_made_when_they_are_due(
    tmp_path: Path, length: int, validates: bool
) -> None:
    """At the first iteration past each time, whatever the epochs, with its validation before it."""
    times, validated = [3.0, 4.0, 9.5, 20.0], []

    class Clocked(SineProblem):
        def training_step(self, batch: Any, batch_idx: int = 0) -> None:
            super().training_step(batch, batch_idx)
            assert self.last_step is not None
            now = float(self.last_step.iteration)
            self._run.step = replace(self.last_step, optimization_time=now)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert self.last_step is not None
            validated.append(self.last_step.iteration)
            super().validation_step(batch, batch_idx)

    recorder = Recorder(times)
    when = ("val_check_interval", "check_val_every_n_epoch", "num_sanity_val_steps")
    options = {key: TRAINER[key] for key in when}
    run = trainer(
        tmp_path,
        callbacks=[OptimizationBudget(20), recorder],
        **options,
        limit_val_batches=1.0 if validates else 0,
    )
    run.fit(Clocked(n=3), datamodule=FullBatchDataModule(epoch_length=length))
    assert [row["iteration"] for row in recorder.rows] == [0, 3, 4, 10, 20]
    assert all(("x_error" in row) == validates for row in recorder.rows[1:])
    assert validated == ([3, 4, 10, 20] if validates else [])


def test_files_have_every_method_and_mark_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare_module, "draw", draw)

    def row(iteration: int, time: float, passes: float, **metrics: float) -> dict[str, float]:
        counts = {"iteration": iteration, "optimization_time": time, "passes": passes}
        return counts | metrics

    results = [
        MethodResult("a", [row(1, 1.0, 4, loss=0.5, auroc=0.9, kkt_residual=0.1)]),
        MethodResult("b", [row(2, 1.25, 80_000, loss=0.7, auroc=0.95)]),
        MethodResult("c", [row(2, 0.1, 8, loss=0.1)], error="Boom | bang"),
        MethodResult("d", [], error="Bang"),
        MethodResult("e", [row(1, 1.0, 4, loss=500.0)]),
    ]
    write_results(tmp_path, results, "title")
    text = (tmp_path / "summary.md").read_text()
    assert "| method | loss | auroc | kkt_residual | iterations |" in text
    assert "| a | **0.5** | 0.9 | **0.1** | 1 | 1 | 4 |  |" in text
    assert "| b | 0.7 | **0.95** |  | 2 | 1.25 | 80000 |  |" in text
    assert "| c | 0.1 |  |  | 2 | 0.1 | 8 | Boom / bang |" in text
    head, first, *_ = (tmp_path / "results.csv").read_text().splitlines()
    assert head == "method,iteration,optimization_time,passes,loss,auroc,kkt_residual"
    assert first == "a,1,1.0,4,0.5,0.9,0.1"
    assert "<svg" in (tmp_path / "figure.svg").read_text()
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    loss = draw(results, ["loss"], "title").axes[0]
    lines = {line.get_label(): line for line in loss.lines}
    assert list(lines) == ["a", "b", "c", "d", "e"]
    assert len({line.get_color() for line in lines.values()}) == 5
    assert loss.get_yscale() == "log"
    assert loss.get_xlim()[0] == 0.0  # the start is in the picture


@pytest.mark.parametrize(
    ("values", "scale"),
    [([3.0, 0.1, 0.0], "log"), ([3.0, 0.1, -1.0], "linear"), ([3.0, 2.0], "linear")],
)
def test_the_scale_of_an_axis(values: list[float], scale: str) -> None:
    """Logarithmic over more than a power of ten, also where a violation reaches 0."""
    rows = [{"optimization_time": float(time), "loss": v} for time, v in enumerate(values)]
    assert draw([MethodResult("a", rows)], ["loss"], "title").axes[0].get_yscale() == scale


def test_more_methods_than_colours_are_told_apart() -> None:
    results = [MethodResult(str(n), [{"optimization_time": 0.0, "loss": 1.0}]) for n in range(14)]
    lines = draw(results, ["loss"], "title").axes[0].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 14


class TestAModuleOfTheUsers:
    """Such as README's, with the mixin and without validation."""

    def config(self, tmp_path: Path, **model: Any) -> Path:
        content = {
            "seed_everything": 0,
            "trainer": {"accelerator": "cpu"},
            "data": {"class_path": "modules.CleanerData"},
        }
        path = tmp_path / "own.yaml"
        path.write_text(yaml.safe_dump({**content, "model": model}))
        return path

    def test_it_is_evaluated_all_the_same(self, tmp_path: Path, steady: None) -> None:
        path = self.config(tmp_path, class_path="modules.Cleaner", init_args={"n_train": 30})
        (result,) = compare([path], 0.2, tmp_path / "out", evaluations=2)
        assert result.error is None
        assert [row["iteration"] == 0 for row in result.rows] == [True, False, False]
        assert result.rows[-1]["optimization_time"] >= 0.2
        assert "kkt_residual" in result.rows[-1]

    def test_a_module_that_is_not_told_its_solver(self, tmp_path: Path) -> None:
        path = self.config(tmp_path, class_path="wrong_modules.Right")
        with pytest.raises(
            ValueError,
            match="the config names no `solver` or `method` to hand to `declare`",
        ):
            compare([path], 0.2, tmp_path / "out")


def test_a_growing_sample_is_a_way_to_solve_the_same_task() -> None:
    full, growing, own = (
        Method(CONFIGS / "mnist" / f"{name}.yaml", 1.0)
        for name in ("ivsp", "ivsp_growing", "ivsp_own_growing")
    )
    assert "factor: 4.0" in growing.text
    assert "growing: null" in full.text
    assert full.task == growing.task == own.task
