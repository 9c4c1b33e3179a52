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
from modules import Weighting, weighting_data
from places import CONFIGS, SYNTHETIC
from running import trainer

from lightning_bilevel import BOME, IVSP, FullBatchDataModule, OptimizationBudget, SineProblem
from lightning_bilevel.__main__ import main
from lightning_bilevel.callbacks.optimization_budget import seconds
from lightning_bilevel.cli import compare as compare_module
from lightning_bilevel.cli.compare import compare
from lightning_bilevel.cli.configs import check_same_task, read_config
from lightning_bilevel.cli.recorder import NEVER, Recorder
from lightning_bilevel.cli.results import MethodResult, write_csv, write_figure, write_summary

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def _as_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-bilevel"])
    # The figure takes as long as two methods: it is drawn where a test looks at it.
    monkeypatch.setattr(compare_module, "write_figure", lambda *args: None)


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

    def timed(advance: Any) -> Any:
        def slowly(*args: Any) -> Any:
            clock.now += 0.03
            return advance(*args)

        return slowly

    for solver in (IVSP, BOME):
        monkeypatch.setattr(solver, "advance", timed(solver.advance))


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
    monkeypatch.setattr(compare_module, "write_figure", write_figure)
    out = tmp_path / "out"
    main(["compare", str(small), "--budget", "200ms", "--out", str(out), "--evaluations", "5"])
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
    assert "- **error of x**: ivsp, bome" in summary or "- **error of x**: bome, ivsp" in summary
    assert summary in capsys.readouterr().out
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (out / "figure.svg").read_text()


def test_all_methods_have_a_row_of_the_start_evaluated_once(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    evaluate = compare_module.start_row

    def counted(*args: Any) -> dict[str, float]:
        calls.append(args)
        return evaluate(*args)

    monkeypatch.setattr(compare_module, "start_row", counted)
    first, second = compare([small], 0.05, tmp_path / "out", evaluations=1)
    assert len(calls) == 1
    assert first.rows[0] == second.rows[0]
    row = first.rows[0]
    assert (row["iteration"], row["optimization_time"], row["passes"]) == (0, 0.0, 0)
    assert list(row) == list(first.rows[1])
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
        if len(self.rows) == 2:
            raise SystemExit(1)  # not an Exception: as a kill would, it leaves no result behind
        start(self, *args)

    monkeypatch.setattr(Recorder, "on_train_batch_start", interrupted)
    with pytest.raises(SystemExit):
        main(call)
    saved = torch.load(out / "ivsp" / "last.ckpt", weights_only=True)
    rows = saved["callbacks"]["Recorder"]["rows"]
    assert len(rows) == 2
    assert not (out / "ivsp" / "result.json").exists()
    monkeypatch.setattr(Recorder, "on_train_batch_start", start)
    main(call)
    finished = json.loads((out / "ivsp" / "result.json").read_text())["rows"]
    assert finished[:2] == rows
    assert finished[2]["iteration"] > rows[1]["iteration"]
    assert finished[2]["optimization_time"] > rows[1]["optimization_time"]
    assert sorted(path.name for path in (out / "ivsp").iterdir()) == ["config.yaml", "result.json"]


def test_the_state_of_an_earlier_version_is_refused(
    tmp_path: Path, small: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    config = str(small / "bome.yaml")
    call = ["compare", config, "--budget", "50ms", "--out", str(out), "--evaluations", "1"]
    main(call)
    (out / "bome" / "result.json").unlink()
    (out / "bome" / "state.pt").write_bytes(b"old")
    with pytest.raises(SystemExit) as stop:
        main(call)
    assert stop.value.code == 2
    assert "bome/state.pt is of an earlier version of lightning-bilevel" in capsys.readouterr().err
    (out / "bome" / "state.pt").unlink()
    main(call)
    assert {row["method"] for row in rows(out)} == {"bome"}


def test_callbacks_of_a_config_that_watch_or_save_are_left_out(tmp_path: Path, small: Path) -> None:
    mine = [
        "KKTMonitor",
        "TQDMProgressBar",
        "CleaningReport",
        {"class_path": "ModelCheckpoint"},
        {"class_path": "LambdaCallback"},
    ]
    edited(small / "ivsp.yaml", "trainer", "callbacks", value=mine)
    edited(small / "ivsp.yaml", "budget", value="1ms")  # of a fit
    seen: list[list[str]] = []

    class Seen(Recorder):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append([type(callback).__name__ for callback in trainer.callbacks])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare_module, "Recorder", Seen)
        compare([small / "ivsp.yaml"], 0.05, tmp_path / "out", evaluations=1)
    assert seen == [["LambdaCallback", "OptimizationBudget", "Seen", "LastCheckpoint"]]


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
        (lambda f: None, ["--budget=-1s"], "budget '-1s' is not a duration"),
        (lambda f: None, ["--budget", "10 parsecs"], "budget '10 parsecs' is not a duration"),
        (lambda f: None, ["--evaluations", "0"], "`compare --evaluations 0` must be at least 1"),
        (
            lambda f: edited(f / "bome.yaml", "model", "init_args", "n", value=11),
            [],
            "bome differs|ivsp differs",
        ),
        (
            lambda f: edited(f / "bome.yaml", "seed_everything", value=3),
            [],
            "seed_everything \\(0, not 3\\)",
        ),
        (
            lambda f: edited(
                f / "bome.yaml", "model", "init_args", "solver", "class_path", value="BOMB"
            ),
            [],
            "BOMB",
        ),
        (lambda f: [p.unlink() for p in f.iterdir()], [], "there is no config"),
    ],
)
def test_bad_calls(
    tmp_path: Path, small: Path, capsys: Any, prepare: Any, arguments: list[str], words: str
) -> None:
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


def test_different_tasks_may_be_forced_and_have_starts_of_their_own(
    tmp_path: Path, small: Path
) -> None:
    edited(small / "bome.yaml", "model", "init_args", "n", value=11)
    out = tmp_path / "out"
    main(
        [
            "compare",
            str(small),
            "--allow-different-tasks",
            "--budget",
            "50ms",
            "--out",
            str(out),
            "--evaluations",
            "1",
        ]
    )
    starts = {row["method"]: row["x_error"] for row in rows(out) if row["iteration"] == "0"}
    assert set(starts) == {row["method"] for row in rows(out)} == {"ivsp", "bome"}
    assert starts["ivsp"] != starts["bome"]


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
    config = str(small / "bome.yaml")
    call = ["compare", config, "--out", str(out), "--evaluations", "1", "--budget"]
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
        match="is not a duration: write a positive number with ms, s, m or h, such as 60s",
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
            self.last_step = replace(
                self.last_step, optimization_time=float(self.last_step.iteration)
            )

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert self.last_step is not None
            validated.append(self.last_step.iteration)
            super().validation_step(batch, batch_idx)

    recorder = Recorder(times)
    options = {
        "val_check_interval": NEVER,
        "check_val_every_n_epoch": None,
        "num_sanity_val_steps": 0,
    }
    run = trainer(
        tmp_path,
        callbacks=[OptimizationBudget(20), recorder],
        **options,
        limit_val_batches=1.0 if validates else 0,
    )
    run.fit(Clocked(n=3), datamodule=FullBatchDataModule(epoch_length=length))
    assert [row["iteration"] for row in recorder.rows] == [3, 4, 10, 20]
    assert all(("x_error" in row) == validates for row in recorder.rows)
    assert validated == ([3, 4, 10, 20] if validates else [])


def test_report_ranks_and_marks_the_best(tmp_path: Path) -> None:
    results = [
        MethodResult(
            "a",
            "IVSP",
            [{"iteration": 1, "optimization_time": 1.0, "passes": 4, "loss": 0.5, "auroc": 0.9}],
        ),
        MethodResult(
            "b",
            "MEHA",
            [{"iteration": 2, "optimization_time": 1.0, "passes": 8, "loss": 0.7, "auroc": 0.95}],
        ),
        MethodResult(
            "c",
            "SLM",
            [{"iteration": 2, "optimization_time": 0.1, "passes": 8, "loss": 0.1}],
            error="Boom | bang",
        ),
        MethodResult("d", "BOME"),
    ]
    write_summary(tmp_path / "s.md", results, "title")
    text = (tmp_path / "s.md").read_text()
    assert "| a | **0.5** | 0.9 | 1 | 4 | 1.00 |  |" in text
    assert "| b | 0.7 | **0.95** |" in text
    assert "| c | 0.1 |  | 2 | 8 | 0.10 | Boom / bang |" in text
    assert "- **loss**: a, b\n- **AUROC of the weights**: b, a" in text
    write_csv(tmp_path / "r.csv", results)
    assert (tmp_path / "r.csv").read_text().splitlines()[
        0
    ] == "method,solver,iteration,optimization_time,passes,loss,auroc"
    write_figure(tmp_path / "f", results, "title")
    assert (tmp_path / "f.svg").exists()


def test_the_summary_says_who_aims_at_the_kkt_residual(tmp_path: Path) -> None:
    row = {"iteration": 1, "optimization_time": 1.0, "passes": 4, "kkt_residual": 0.5}
    results = [MethodResult("a", "IVSP", [row]), MethodResult("b", "MEHA", [row])]
    write_summary(tmp_path / "s.md", results, "title")
    text = (tmp_path / "s.md").read_text()
    assert "| KKT residual\\* |" in text
    assert "\n\\* The KKT residual is that of the relaxed problem, which IVSP solves. The" in text
    write_figure(tmp_path / "f", results, "title")
    assert "(only IVSP aims at it)" in (tmp_path / "f.svg").read_text()
    del row["kkt_residual"]
    write_summary(tmp_path / "s.md", results, "title")
    assert "KKT" not in (tmp_path / "s.md").read_text()


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
        assert result.solver == "IVSP"
        assert [row["iteration"] == 0 for row in result.rows] == [True, False, False]
        assert result.rows[-1]["optimization_time"] >= 0.2
        assert "kkt_residual" in result.rows[-1]

    def test_a_module_that_is_not_told_its_solver(self, tmp_path: Path) -> None:
        path = self.config(tmp_path, class_path="wrong_modules.Right")
        with pytest.raises(
            ValueError,
            match=r"`Right` is not told its solver by the config: give its `__init__` an argument",
        ):
            compare([path], 0.2, tmp_path / "out")


def test_a_growing_sample_is_a_way_to_solve_the_same_task() -> None:
    full, growing, own = (
        read_config(CONFIGS / "mnist" / f"{name}.yaml")
        for name in ("ivsp", "ivsp_growing", "ivsp_own_growing")
    )
    assert growing.values["data"]["init_args"]["growing"]["factor"] == 4.0
    assert full.values["data"]["init_args"]["growing"] is None
    check_same_task([full, growing, own], allowed=False)
