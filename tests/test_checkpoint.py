"""A run that is stopped anywhere and resumed is the run that was not, bit for bit."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import parallel
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from modules import PAPER, Weighting, weighting_data
from records import Recorder, same
from running import trainer
from torch.torch_version import TorchVersion

from lightning_bilevel import BOME, CertificateMonitor, FullBatchDataModule, SineProblem
from lightning_bilevel.checkpoint import KEY, WholeFileIO

STEPS, EPOCH = 9, 3
# Everything but the wall clock.
TIMES = ("optimization_time", "bilevel/optimization_time")


class Everything(Recorder):
    """Keeps the record of each step, and a checkpoint of each point where it is asked to."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module)
        if not trainer.is_last_batch:
            self.save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.save(trainer)  # after its validation, which Lightning would not make up for

    def save(self, trainer: Trainer) -> None:
        if self.folder is not None:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def make(case: str, tmp_path: Path, **fit: Any) -> dict[str, Any]:
    """Make a run and say all that is known of it afterwards."""
    task, solver, precision = case.split("/")
    module, data = parallel.problem(task, parallel.SOLVERS[solver])
    data.epoch_length = EPOCH
    records, logger = Everything(fit.pop("folder", None)), CSVLogger(tmp_path)
    callbacks = [records, CertificateMonitor(share=math.inf)]  # its own limit is one of time
    run = trainer(
        tmp_path,
        max_steps=STEPS,
        precision=precision,
        callbacks=callbacks,
        logger=logger,
        log_every_n_steps=EPOCH,
        max_epochs=-1,
    )
    run.fit(module, datamodule=data, **fit)
    state = run.optimizers[0].state_dict()
    memory = {**state["state"], "progress": dict(state["state"]["progress"])}
    del memory["progress"]["optimization_time"]
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        logged = [
            {k: v for k, v in row.items() if v and k not in TIMES} for row in csv.DictReader(file)
        ]
    return {
        "parameters": module.state_dict(),
        "memory": memory,
        "constants": state["param_groups"],
        "steps": records.steps,
        "logged": logged,
        "metrics": {k: float(v) for k, v in run.callback_metrics.items() if k not in TIMES},
        "epoch": run.current_epoch,
    }


def cases() -> list[tuple[str, range]]:
    """Runs and where they are stopped: every solver at every iteration, in one of its two runs.

    Which of them is stopped at the odd iterations changes from solver to solver, so that each task
    and each precision is stopped at every iteration too.
    """
    runs = parallel.alternating(("sine", "cleaning"))  # two of each solver
    return [
        (case, range(1 + (place + place // 4) % 2, STEPS, 2)) for place, case in enumerate(runs)
    ]


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:LuMei ended outer iteration")
@pytest.mark.parametrize(("case", "stops"), cases(), ids=str)
def test_from_any_iteration_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, stops: range
) -> None:
    # Nobody looks at the picture, which takes longer than the run.
    monkeypatch.setattr("lightning_bilevel.modules.reweighting.log_figure", lambda *args: None)
    whole = make(case, tmp_path, folder=tmp_path)
    for stop in stops:
        resumed = make(case, tmp_path, ckpt_path=tmp_path / f"{stop}.ckpt", weights_only=True)
        for what in ("parameters", "memory", "constants", "metrics", "epoch"):
            assert same(resumed[what], whole[what]), (stop, what)
        assert same(resumed["steps"], whole["steps"][stop:]), stop
        assert logged_after(stop, resumed) == logged_after(stop, whole), stop


def logged_after(stop: int, run: dict[str, Any]) -> list[dict[str, str]]:
    rows = [row for row in run["logged"] if int(row["step"]) > stop]
    if stop % EPOCH == 0:
        # Resumed from the end of an epoch, Lightning counts one batch too many on the axis of what
        # `self.log` logs.
        rows = [row if "bilevel/upper" in row else {**row, "step": ""} for row in rows]
    return rows


def saved(tmp_path: Path, module: Any = None, data: Any = None, steps: int = 3) -> Path:
    run = trainer(tmp_path, max_steps=steps)
    run.fit(module or Weighting(), datamodule=data or weighting_data())
    run.save_checkpoint(tmp_path / "saved.ckpt")
    return tmp_path / "saved.ckpt"


class TestRefusals:
    """A checkpoint that does not belong to the run is refused before training, with a sentence."""

    def refused(self, tmp_path: Path, module: Any, path: Path, data: Any = None) -> str:
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        with pytest.raises(MisconfigurationException) as caught:
            trainer(tmp_path, max_steps=5).fit(
                module, datamodule=data or weighting_data(), ckpt_path=path
            )
        assert all(
            torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items()
        )
        return str(caught.value)

    def test_of_another_solver(self, tmp_path: Path) -> None:
        told = self.refused(tmp_path, Weighting(solver=BOME), saved(tmp_path))
        assert told.startswith(
            "the checkpoint given to `Weighting` was written by IVSP, whose state BOME cannot go "
            "on from"
        )

    def test_of_another_size(self, tmp_path: Path) -> None:
        told = self.refused(tmp_path, Weighting(29), saved(tmp_path), weighting_data(count=29))
        assert (
            "has 30 upper-level and 9 lower-level variables, the module has 29 and 9: it belongs "
            "to another problem" in told
        )
        path = saved(tmp_path, SineProblem(n=4, solver=PAPER), FullBatchDataModule())
        told = self.refused(tmp_path, SineProblem(n=5, solver=PAPER), path, FullBatchDataModule())
        assert "has 1 upper-level and 4 lower-level variables, the module has 1 and 5" in told

    def test_of_another_kind_of_module(self, tmp_path: Path) -> None:
        path = saved(tmp_path)
        content = torch.load(path, weights_only=True)
        del content[KEY]
        torch.save(content, path)
        assert "is not of a bilevel run" in self.refused(tmp_path, Weighting(), path)

    def test_for_validation_the_solver_does_not_matter_but_the_size_does(
        self, tmp_path: Path
    ) -> None:
        path = saved(tmp_path)
        trainer(tmp_path).validate(
            Weighting(solver=BOME), datamodule=weighting_data(), ckpt_path=path, verbose=False
        )
        with pytest.raises(MisconfigurationException, match="it belongs to another problem"):
            trainer(tmp_path).validate(
                Weighting(29), datamodule=weighting_data(), ckpt_path=path, verbose=False
            )

    def test_a_checkpoint_without_a_trainer_is_the_users_own_affair(self, tmp_path: Path) -> None:
        module = Weighting.load_from_checkpoint(saved(tmp_path), weights_only=True)
        assert isinstance(module, Weighting)

    @pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn", b"not a checkpoint at all"])
    def test_a_torn_file_is_named(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "torn.ckpt").write_bytes(content)
        with pytest.raises(
            MisconfigurationException,
            match=(
                r"`ckpt_path='.*torn.ckpt'` is not a whole checkpoint of tensors and plain values"
            ),
        ):
            WholeFileIO().load_checkpoint(tmp_path / "torn.ckpt")


def test_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> Any:
            return Path.write_text, (tmp_path / "pwned", "yes")

    torch.save({"state_dict": Payload()}, tmp_path / "bad.ckpt")
    # Torch's own default, which a bare Trainer takes, is the safe one from 2.6 on; before,
    # SECURITY.md says to ask for it.
    given = {
        "ckpt_path": tmp_path / "bad.ckpt",
        "weights_only": None if TorchVersion(torch.__version__) >= "2.6" else True,
    }
    for load in (
        lambda: WholeFileIO().load_checkpoint(tmp_path / "bad.ckpt"),
        lambda: trainer(tmp_path, max_steps=1).fit(
            Weighting(), datamodule=weighting_data(), **given
        ),
    ):
        with pytest.raises(
            Exception,
            match=r"not a whole checkpoint of tensors and plain values|Weights only load failed",
        ):
            load()
    assert not (tmp_path / "pwned").exists()
