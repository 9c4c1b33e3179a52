"""``lightning-bilevel compare``: several methods on one task, each with the same optimisation time."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.utilities import rank_zero_only
from tqdm.auto import tqdm
from typing_extensions import override

from lightning_bilevel.callbacks.certificate_report import CertificateReport
from lightning_bilevel.callbacks.last_checkpoint import LastCheckpoint
from lightning_bilevel.callbacks.monitor import Monitor
from lightning_bilevel.callbacks.optimization_budget import OptimizationBudget, seconds
from lightning_bilevel.cli.app import BilevelCLI
from lightning_bilevel.cli.catalogue import ready
from lightning_bilevel.cli.configs import MethodConfig, check_same_task, find_configs, read_config
from lightning_bilevel.cli.messages import own_error
from lightning_bilevel.cli.recorder import NEVER, Recorder
from lightning_bilevel.cli.results import MethodResult, write_csv, write_figure, write_summary
from lightning_bilevel.core.errors import CheckpointError
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.files import write_whole

__all__ = ["compare", "main"]


# How often a run is saved, from where a comparison that was interrupted goes on.
SAVE_EVERY: str | float = "10s"


class _Method(BilevelCLI):
    """Model, data and Trainer of a config, from the same seed every time.

    The Trainer has what the comparison gives it, and nothing that watches, saves or shows a fit.

    Args:
        out: The folder of the comparison.
        config: The config.
        added: The comparison's callbacks.
        options: Arguments of the Trainer, besides the usual ones of a comparison.
    """

    def __init__(
        self, out: Path, config: MethodConfig, added: Sequence[Callback] = (), **options: Any
    ) -> None:
        self.added = added
        usual = {
            "max_epochs": -1,
            "max_steps": -1,
            "check_val_every_n_epoch": "null",
            "val_check_interval": NEVER,
        }
        usual |= dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), "false")
        usual |= {
            "num_sanity_val_steps": 0,
            "default_root_dir": str(out),
            "enable_checkpointing": "true" if added else "false",
        }
        options = {**usual, **options}
        args = [
            "--config",
            str(out / config.name / "config.yaml"),
            *(f"--trainer.{k}={v}" for k, v in options.items()),
        ]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
            super().__init__(args, run=False)

    @override
    def before_instantiate_classes(self) -> None:
        self.save_config_callback = None  # it lies in the folder of the method already

    @override
    def callbacks(self, named: list[Callback]) -> list[Callback]:
        others = (CertificateReport, Checkpoint, Monitor, ProgressBar)
        return [*(callback for callback in named if not isinstance(callback, others)), *self.added]


def compare(
    configs: Sequence[Path],
    budget: float,
    out: Path,
    *,
    evaluations: int = 40,
    log_spaced: bool = False,
    allow_different_tasks: bool = False,
) -> list[MethodResult]:
    """Run each config for the same optimisation time and write results.csv, summary.md and the
    figure.

    Args:
        configs: YAML files of LightningCLI, or folders of them.
        budget: Seconds of optimisation for each method.
        out: The folder to write to; a comparison that was interrupted goes on from there.
        evaluations: At how many times, spread over the budget, each method is evaluated.
        log_spaced: Spread them evenly on a logarithmic axis, from a thousandth of the budget on.
        allow_different_tasks: Compare although data or start differ.
    """
    parsed = [read_config(path) for path in find_configs(configs)]
    check_same_task(parsed, allow_different_tasks)
    _check_folder(
        out, parsed, {"budget": budget, "evaluations": evaluations, "log_spaced": log_spaced}
    )
    times = [
        budget * (1000 ** ((i + 1) / evaluations - 1) if log_spaced else (i + 1) / evaluations)
        for i in range(evaluations)
    ]
    envelope = next((_Method(out, c).model.envelope for c in parsed if c.solver == "IVSP"), None)
    _warm_up(out, parsed[0])
    results = []
    shape = "{l_bar}{bar}| {n:.1f}/{total:.1f} s, {remaining} left"
    with tqdm(total=len(parsed) * budget, unit="s", bar_format=shape, disable=not _first()) as bar:
        for number, config in enumerate(parsed):
            bar.set_description(f"{config.name:8s}")

            def shown(spent: float, start: float = number * budget) -> None:
                bar.n = start + min(spent, budget)
                bar.update(0)

            results.append(_run(out, config, budget, times, envelope, shown))
            bar.n = (number + 1) * budget
            if _first():
                write_csv(out / "results.csv", results)
        bar.refresh()
    title = f"{parsed[0].task['model']['class_path'].rsplit('.', 1)[-1]}, {budget:g} s of optimisation each"
    if _first():
        write_summary(out / "summary.md", results, title)
        write_figure(out / "figure", results, title)
    return results


def _first() -> bool:
    """Whether this is the process that writes and prints."""
    return bool(getattr(rank_zero_only, "rank", 0) == 0)


def _run(
    out: Path,
    config: MethodConfig,
    budget: float,
    times: Sequence[float],
    envelope: Envelope | None,
    shown: Callable[[float], None],
) -> MethodResult:
    folder = out / config.name
    done = folder / "result.json"
    if done.exists():
        return MethodResult(**json.loads(done.read_text()))
    result = MethodResult(config.name, config.solver)
    recorder, last = Recorder(times, shown, envelope), folder / "last.ckpt"
    method = _Method(
        out, config, [OptimizationBudget(budget), recorder, LastCheckpoint(folder, SAVE_EVERY)]
    )
    if config.solver == "IVSP":
        # The envelope that its config gives; where it chooses one in the run, the declared one.
        recorder.envelope = method.model.envelope
    try:
        method.trainer.fit(
            method.model, datamodule=method.datamodule, ckpt_path="last" if last.exists() else None
        )
    except (OSError, CheckpointError):
        raise  # a full disk is no fault of the method: called again, it goes on
    except Exception as error:  # one method that fails must not end the others; its row says why
        result.error = f"{type(error).__name__}: {error}".splitlines()[0]
    result.rows = recorder.rows
    if method.trainer.is_global_zero:
        write_whole(done, json.dumps(asdict(result)).encode())
        last.unlink(missing_ok=True)
    return result


def _warm_up(out: Path, config: MethodConfig) -> None:
    """Make the process's first evaluations, which are slow, before anybody's time runs."""
    method = _Method(out, config, max_steps=2, limit_val_batches=0)
    method.trainer.fit(method.model, datamodule=method.datamodule)


def _check_folder(out: Path, configs: Sequence[MethodConfig], protocol: dict[str, Any]) -> None:
    """Claim an empty folder for this comparison, or recognise it as this comparison's."""
    identity = {**protocol, "task": configs[0].task}
    note = out / "comparison.json"
    if note.exists():
        if json.loads(note.read_text()) != json.loads(json.dumps(identity)):
            raise ValueError(
                f"`compare --out {out}`: that folder has another comparison (task, budget or "
                "evaluations differ)."
            )
    elif out.exists() and any(path.name != f".{note.name}.part" for path in out.iterdir()):
        raise ValueError(
            f"`compare --out {out}`: that folder has something else in it; name an empty or a new "
            "one."
        )
    for config in configs:
        folder = out / config.name
        if (folder / "state.pt").exists() and not (folder / "result.json").exists():
            raise ValueError(
                f"`compare --out {out}`: {config.name}/state.pt is of an earlier version of "
                "lightning-bilevel, and this one cannot go on from it; delete it to start that "
                "method anew, or name another folder."
            )
        resolved = folder / "config.yaml"
        if resolved.exists() and resolved.read_text() != config.text:
            raise ValueError(
                f"`compare --out {out}`: {config.name} was run there with other settings; name "
                "another folder."
            )
    # The note first: what is killed here is recognised by it.
    out.mkdir(parents=True, exist_ok=True)
    write_whole(note, json.dumps(identity, indent=1).encode())
    for config in configs:
        (out / config.name).mkdir(exist_ok=True)
        write_whole(out / config.name / "config.yaml", config.text.encode())


def main(args: Sequence[str] | None = None) -> None:
    """Run ``lightning-bilevel compare``."""
    parser = argparse.ArgumentParser(
        "lightning-bilevel compare",
        description="Compare methods on one task, with equal optimisation time.",
    )
    about = "YAML files, or folders of them; of your own, or ready ones such as synthetic"
    parser.add_argument(
        "configs", nargs="+", type=lambda name: ready(Path(name)), metavar="CONFIG", help=about
    )
    parser.add_argument(
        "--budget",
        default="1s",
        help="optimisation time of each method, such as 1s, 10m (default: 1s)",
    )
    parser.add_argument(
        "--out", type=Path, help="folder for the results (default: comparison-NAME-BUDGET)"
    )
    parser.add_argument(
        "--evaluations",
        type=int,
        default=40,
        help="evaluations spread over the budget (default: 40)",
    )
    parser.add_argument(
        "--log-spaced",
        action="store_true",
        help="spread the evaluations evenly on a logarithmic time axis",
    )
    parser.add_argument(
        "--allow-different-tasks", action="store_true", help="compare although data or start differ"
    )
    given = parser.parse_args(args)
    try:
        budget = seconds(given.budget)
        if given.evaluations < 1:
            raise ValueError(f"`compare --evaluations {given.evaluations}` must be at least 1.")
        first = given.configs[0].resolve()
        out = given.out or Path(
            f"comparison-{first.name if first.is_dir() else first.parent.name}-{given.budget}"
        )
        options = {"evaluations": given.evaluations, "log_spaced": given.log_spaced}
        compare(
            given.configs, budget, out, **options, allow_different_tasks=given.allow_different_tasks
        )
    except ValueError as error:
        parser.error(str(own_error(error) or error))
    if not _first():
        return
    print((out / "summary.md").read_text())
    print(
        f"Written to {out}: results.csv, summary.md, figure.png, figure.svg, and the resolved config of each method.",
        file=sys.stderr,
    )
