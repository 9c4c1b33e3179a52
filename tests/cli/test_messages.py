"""A user's mistakes at the real command line: the message names each, without a traceback."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from places import SYNTHETIC
from starting import Forked

from lightning_bilevel.__main__ import main

CONFIG = yaml.safe_load((SYNTHETIC / "ivsp.yaml").read_text())
SOLVER, MODEL = "model.init_args.solver.init_args.", "model.init_args."


def callbacks(name: str, **arguments: Any) -> list[dict[str, Any]]:
    return [{"class_path": name, "init_args": arguments}]


# key, value (... leaves it out), exit code, and what is said: by jsonargparse, or by us
WRONG: list[tuple[str, Any, int, str]] = [
    (SOLVER + "rhoo", 1.0, 2, "Option 'rhoo' is not accepted"),
    (SOLVER + "rho", "high", 2, 'Parser key "rho"'),
    (SOLVER + "rho", 2.0, 1, "`rho=2.0` must be smaller than 1/sigma = 1"),
    (SOLVER + "rho", -1.0, 1, "`IVSP(rho=-1.0)` must be positive and finite"),
    (SOLVER + "block", 1.5, 2, 'Parser key "block"'),
    (SOLVER + "smoothing", "round", 2, 'Parser key "smoothing"'),
    (MODEL + "solver.class_path", "IVPS", 2, "IVPS"),
    (MODEL + "solver.class_path", "torch.optim.SGD", 2, "'torch.optim.SGD' to be a subclass"),
    (MODEL + "n", "many", 2, 'Parser key "n"'),
    ("model.class_path", "SinProblem", 2, "SinProblem"),
    ("model.class_path", "torch.nn.Linear", 2, "not correspond to a subclass of LightningModule"),
    ("model", ..., 2, "required: fit.model"),
    ("data", ..., 2, "required: fit.data"),
    ("data.init_args.epoch_lenght", 3, 2, "Option 'epoch_lenght' is not accepted"),
    ("trainer.maxsteps", 3, 2, "does not accept option 'trainer.maxsteps'"),
    ("trainer.precision", "16-mixed", 1, "is not supported with IVSP on all data"),
    ("trainer.max_epochs", "ten", 2, 'Parser key "trainer.max_epochs"'),
    ("trainer.max_epochs", -5, 1, "`max_epochs` must be a non-negative integer or -1"),
    ("trainer.devices", 0, 1, "`Trainer(devices=0)`"),
    ("trainer.strategy", "nonsense", 1, "strategy='nonsense'"),
    ("trainer.accumulate_grad_batches", 2, 1, "let the loader yield the larger batch"),
    ("trainer.gradient_clip_val", 1.0, 1, "does not reach the steps of a bilevel solver"),
    ("trainer.max_time", "tomorrow", 1, "`Timer(duration='tomorrow')`"),
    ("trainer.default_root_dir", "/proc/nowhere", 1, "'/proc/nowhere'"),
    ("trainer.callbacks", callbacks("OptimizationBudget", budget="soon"), 1, "is not a duration"),
    ("trainer.callbacks", callbacks("OptimisationBudget"), 2, "OptimisationBudget"),
    (
        "trainer.callbacks",
        callbacks("EarlyStopping", monitor="nothing"),
        1,
        "Early stopping conditioned on metric `nothing`",
    ),
    ("seed_everything", "lucky", 2, 'Parser key "seed_everything"'),
    ("ckpt_path", "/nowhere/run.ckpt", 1, "Checkpoint file not found: /nowhere/run.ckpt"),
    ("extra", 1, 2, "does not accept option 'extra'"),
]
# What a declaration and a first step refuse; the other sentences are tested where they are made.
MODULES: list[tuple[str, int, str]] = [
    ("OneLevel", 1, "No `training_step()` method defined"),
    ("NoUpperLoss", 1, "`NoUpperLoss` must define `upper_loss(batch)`"),
    ("Undeclared", 1, "`Undeclared` has not declared its levels: call `self.declare("),
    ("WrongBox", 1, "has 2 bounds, the variable has 3 coordinates"),
    ("NoSet", 1, "`NoSet.declare(lower_set=...)` has 8 sets: it must be one set"),
    ("Vector", 1, "The upper-level function f returned a tensor of shape (3,)"),
    ("Undefined", 1, "The lower-level function g returned a value nan"),
    ("Dropout", 1, "The upper-level function f was"),
]


def config(tmp_path: Path, *changes: tuple[str, Any]) -> Path:
    content = copy.deepcopy(CONFIG)
    content["model"]["init_args"]["n"] = 5
    content["data"]["init_args"]["epoch_length"] = 3
    quiet = {
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    content["trainer"] |= {**quiet, "default_root_dir": str(tmp_path)}
    for key, value in changes:
        *path, last = key.split(".")
        inner = content
        for name in path:
            inner = inner.setdefault(name, {})
        if value is ...:
            del inner[last]
        else:
            inner[last] = value
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(content))
    return tmp_path / "wrong.yaml"


def told(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", str(path)])
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    return stop.value.code, errors[errors.index("lightning-bilevel: ") :]


@pytest.fixture(autouse=True)
def _command_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-bilevel"])


@pytest.mark.filterwarnings("ignore:.*bfloat16", "ignore:You passed `Trainer")
@pytest.mark.parametrize(
    ("key", "value", "code", "words"),
    WRONG,
    ids=[f"{key}={value}"[:60] for key, value, *_ in WRONG],
)
def test_a_wrong_config(
    tmp_path: Path, capsys: Any, key: str, value: Any, code: int, words: str
) -> None:
    found, sentence = told(config(tmp_path, (key, value)), capsys)
    assert found == code
    assert words in sentence
    # before training, but for a metric that could have been logged by its first epoch
    assert bool(list(tmp_path.glob("checkpoints/*"))) == ("Early stopping" in words)


@pytest.mark.parametrize(("name", "code", "words"), MODULES, ids=[name for name, *_ in MODULES])
def test_a_wrong_module(tmp_path: Path, capsys: Any, name: str, code: int, words: str) -> None:
    found, sentence = told(
        config(tmp_path, ("model", {"class_path": f"wrong_modules.{name}"})), capsys
    )
    assert found == code
    assert words in sentence


def test_the_right_module_runs(tmp_path: Path) -> None:
    main(
        ["fit", "--config", str(config(tmp_path, ("model", {"class_path": "wrong_modules.Right"})))]
    )
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: [1, 2", "config"),
        ("- a\n- list\n", "config"),
        ("model: !!python/object/apply:os.system ['touch owned']", "config"),
    ],
)
def test_what_is_no_config(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.yaml").write_text(text)
    code, sentence = told(tmp_path / "wrong.yaml", capsys)
    assert code == 2
    assert words in sentence
    assert not (tmp_path / "owned").exists()  # YAML is data: nothing in it is run


def test_a_config_that_is_not_there(tmp_path: Path, capsys: Any) -> None:
    code, sentence = told(tmp_path / "nowhere.yaml", capsys)
    assert code == 2
    assert "nowhere.yaml" in sentence


WRONG_CALLS = [
    (
        ["fit", "--config", "wrong.yaml", "--model.solver.init_args.rho", "2.0"],
        1,
        "`rho=2.0` must be smaller than 1/sigma",
    ),
    (["fit", "--model", "wrong_modules.Left", "--data=FullBatchDataModule"], 2, "wrong_modules"),
    (["fit", "--model", "SinProblem", "--data=FullBatchDataModule"], 2, "SinProblem"),
    (["compare", "nowhere"], 2, "File does not exist"),
]


@pytest.mark.parametrize(("arguments", "code", "words"), WRONG_CALLS)
def test_a_wrong_call(
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    config(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == code
    errors = capsys.readouterr().err
    assert words in errors
    assert "Traceback" not in errors


@pytest.mark.integration
@pytest.mark.parametrize(("arguments", "code", "words"), WRONG_CALLS[:2])
def test_in_a_process_of_its_own(
    tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    config(tmp_path)
    process = Forked("-m", "lightning_bilevel", *arguments, cwd=tmp_path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == code
    assert words in errors
    assert "Traceback" not in errors


def test_a_users_own_error_keeps_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        main(
            [
                "fit",
                "--config",
                str(config(tmp_path, ("model", {"class_path": "wrong_modules.Broken"}))),
            ]
        )
