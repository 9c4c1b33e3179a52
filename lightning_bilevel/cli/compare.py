"""``lightning-bilevel compare``: several methods on one task, each with the same optimisation time."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.utilities import rank_zero_only
from tqdm.auto import tqdm

from lightning_bilevel.callbacks.certificate_report import CertificateReport
from lightning_bilevel.callbacks.monitor import Monitor
from lightning_bilevel.callbacks.optimization_budget import OptimizationBudget, seconds
from lightning_bilevel.cli.app import BilevelCLI
from lightning_bilevel.cli.catalogue import ready
from lightning_bilevel.cli.messages import own_error, parsing_error
from lightning_bilevel.cli.recorder import Recorder
from lightning_bilevel.cli.results import MethodResult, write_csv, write_figure, write_summary
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.files import write_whole

__all__ = ["compare", "main"]


@dataclass(frozen=True)
class _Config:
    """A config as it was resolved: the task that it poses and the solver that it names."""

    name: str
    text: str

    @property
    def values(self) -> dict[str, Any]:
        resolved: dict[str, Any] = yaml.safe_load(self.text)
        return resolved

    @property
    def solver(self) -> str:
        return str(self.values["model"]["init_args"]["solver"]["class_path"]).rsplit(".", 1)[-1]

    @property
    def task(self) -> dict[str, Any]:
        """All that decides data, split and start."""
        values = self.values
        # Neither the solver nor the unit that it measures a level in changes the problem, and an envelope is for evaluation.
        for how in ("solver", "upper_unit", "lower_unit", "envelope"):
            values["model"]["init_args"].pop(how, None)
        return {
            "seed_everything": values["seed_everything"],
            "model": values["model"],
            "data": values["data"],
            "precision": str(values["trainer"]["precision"]),
        }


class _TimedEpochs:
    """A loader whose epochs end when the next evaluation is due, so that Lightning validates there."""

    def __init__(self, loader: Iterable[Any], times: Sequence[float], clock: Callable[[], float]) -> None:
        self.loader, self.times, self.clock = loader, times, clock

    def __iter__(self) -> Iterator[Any]:
        due = next((t for t in self.times if t > self.clock()), float("inf"))
        while True:
            for batch in self.loader:
                yield batch
                if self.clock() >= due:
                    return


def compare(
    configs: Sequence[Path],
    budget: float,
    out: Path,
    *,
    evaluations: int = 40,
    log_spaced: bool = False,
    allow_different_tasks: bool = False,
) -> list[MethodResult]:
    """Run each config for the same optimisation time and write results.csv, summary.md and the figure.

    Args:
        configs: YAML files of LightningCLI, or folders of them.
        budget: Seconds of optimisation for each method.
        out: The folder to write to; a comparison that was interrupted goes on from there.
        evaluations: At how many times, spread over the budget, each method is evaluated.
        log_spaced: Spread them evenly on a logarithmic axis, from a thousandth of the budget on.
        allow_different_tasks: Compare although data or start differ.
    """
    parsed = [_parse(path) for path in _files(configs)]
    _check_same_task(parsed, allow_different_tasks)
    _check_folder(out, parsed, {"budget": budget, "evaluations": evaluations, "log_spaced": log_spaced})
    times = [budget * (1000 ** ((i + 1) / evaluations - 1) if log_spaced else (i + 1) / evaluations) for i in range(evaluations)]
    envelope = next((_build(out, c).model.envelope for c in parsed if c.solver == "IVSP"), None)
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
    out: Path, config: _Config, budget: float, times: Sequence[float], envelope: Envelope | None, shown: Callable[[float], None]
) -> MethodResult:
    folder = out / config.name
    done = folder / "result.json"
    if done.exists():
        return MethodResult(**json.loads(done.read_text()))
    result = MethodResult(config.name, config.solver)
    cli = _build(out, config)
    trainer, module = cli.trainer, cli.model
    trainer.callbacks[:] = [c for c in trainer.callbacks if not isinstance(c, (CertificateReport, Monitor))]
    # IVSP is evaluated with the envelope that its config gives; where it chooses one in the run, with the declared one.
    recorder = Recorder(result, folder, shown, module.envelope if config.solver == "IVSP" else envelope)
    trainer.callbacks += [OptimizationBudget(budget), recorder]

    def clock() -> float:
        return float(trainer.optimizers[0].memory["optimization_time"])

    class Timed(type(cli.datamodule)):  # type: ignore[misc]
        def train_dataloader(self) -> _TimedEpochs:
            return _TimedEpochs(super().train_dataloader(), times, clock)

    cli.datamodule.__class__ = Timed
    try:
        trainer.fit(module, datamodule=cli.datamodule)
    except OSError:
        raise  # a full disk is no fault of the method: called again, it goes on
    except Exception as error:  # one method that fails must not end the others; its row says why
        result.error = f"{type(error).__name__}: {error}".splitlines()[0]
    if trainer.is_global_zero:
        write_whole(done, json.dumps(asdict(result)).encode())
        (folder / "state.pt").unlink(missing_ok=True)
    return result


def _build(out: Path, config: _Config) -> Any:
    """Make model, data and Trainer of a config, from the same seed every time."""
    options = ["max_epochs=-1", "max_steps=-1", "logger=false", "enable_checkpointing=false", "enable_progress_bar=false"]
    options += ["enable_model_summary=false", "num_sanity_val_steps=0", "check_val_every_n_epoch=1", f"default_root_dir={out}"]
    args = ["--config", str(out / config.name / "config.yaml"), *(f"--trainer.{option}" for option in options)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
        return BilevelCLI(args, run=False)


def _warm_up(out: Path, config: _Config) -> None:
    """Make the process's first evaluations, which are slow, before anybody's time runs."""
    cli = _build(out, config)
    cli.trainer.callbacks.clear()
    cli.trainer.fit_loop.epoch_loop.max_steps = 2
    cli.trainer.limit_val_batches = 0
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)


class _ParseOnly(BilevelCLI):
    def instantiate_classes(self) -> None:
        """Leave it at the parsed config."""


def _parse(path: Path) -> _Config:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
            cli = _ParseOnly(["--config", str(path)], run=False, parser_kwargs={"exit_on_error": False})
    except argparse.ArgumentError as error:
        raise ValueError(f"`compare {path}`: {parsing_error(str(error))}") from None
    parsed = _Config(path.stem, cli.parser.dump(cli.config, skip_none=False))
    model = parsed.values["model"]
    if not isinstance((model.get("init_args") or {}).get("solver"), dict):
        raise ValueError(
            f"`compare {path}`: `{model['class_path'].rsplit('.', 1)[-1]}` is not told its solver by the config: give its "
            "`__init__` an argument `solver: SolverCallable = IVSP`, hand it to `declare`, and name the solver there."
        )
    return parsed


def _files(paths: Sequence[Path]) -> list[Path]:
    found = []
    for path in paths:
        if not path.exists():
            raise ValueError(
                f"`compare {path}`: there is no such file or folder, nor a ready config, as `lightning-bilevel tasks` lists them."
            )
        found += sorted(path.glob("*.yaml")) if path.is_dir() else [path]
    if not found:
        raise ValueError(f"`compare {' '.join(map(str, paths))}`: there is no config (*.yaml) in it.")
    names = [path.stem for path in found]
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise ValueError(f"`compare` was given several configs named {', '.join(double)}: each method needs a name of its own.")
    return found


def _check_same_task(configs: Sequence[_Config], allowed: bool) -> None:
    first = configs[0]
    for other in configs[1:]:
        wrong = [f"{key} ({other.task[key]!r}, not {value!r})" for key, value in first.task.items() if other.task[key] != value]
        if wrong and not allowed:
            raise ValueError(
                f"`compare`: {other.name} differs from {first.name} in {'; '.join(wrong)}. The comparison would be unfair; with "
                "--allow-different-tasks it is made all the same."
            )


def _check_folder(out: Path, configs: Sequence[_Config], protocol: dict[str, Any]) -> None:
    """Claim an empty folder for this comparison, or recognise it as this comparison's."""
    identity = {**protocol, "task": configs[0].task}
    note = out / "comparison.json"
    if note.exists():
        if json.loads(note.read_text()) != json.loads(json.dumps(identity)):
            raise ValueError(f"`compare --out {out}`: that folder has another comparison (task, budget or evaluations differ).")
    elif out.exists() and any(path.name != f".{note.name}.part" for path in out.iterdir()):
        raise ValueError(f"`compare --out {out}`: that folder has something else in it; name an empty or a new one.")
    for config in configs:
        resolved = out / config.name / "config.yaml"
        if resolved.exists() and resolved.read_text() != config.text:
            raise ValueError(f"`compare --out {out}`: {config.name} was run there with other settings; name another folder.")
    # The note first: what is killed here is recognised by it.
    out.mkdir(parents=True, exist_ok=True)
    write_whole(note, json.dumps(identity, indent=1).encode())
    for config in configs:
        (out / config.name).mkdir(exist_ok=True)
        write_whole(out / config.name / "config.yaml", config.text.encode())


def main(args: Sequence[str] | None = None) -> None:
    """Run ``lightning-bilevel compare``."""
    parser = argparse.ArgumentParser(
        "lightning-bilevel compare", description="Compare methods on one task, with equal optimisation time."
    )
    about = "YAML files, or folders of them; of your own, or ready ones such as synthetic"
    parser.add_argument("configs", nargs="+", type=lambda name: ready(Path(name)), metavar="CONFIG", help=about)
    parser.add_argument("--budget", default="1s", help="optimisation time of each method, such as 1s, 10m (default: 1s)")
    parser.add_argument("--out", type=Path, help="folder for the results (default: comparison-NAME-BUDGET)")
    parser.add_argument("--evaluations", type=int, default=40, help="evaluations spread over the budget (default: 40)")
    parser.add_argument("--log-spaced", action="store_true", help="spread the evaluations evenly on a logarithmic time axis")
    parser.add_argument("--allow-different-tasks", action="store_true", help="compare although data or start differ")
    given = parser.parse_args(args)
    try:
        budget = seconds(given.budget)
        if given.evaluations < 1:
            raise ValueError(f"`compare --evaluations {given.evaluations}` must be at least 1.")
        first = given.configs[0].resolve()
        out = given.out or Path(f"comparison-{first.name if first.is_dir() else first.parent.name}-{given.budget}")
        options = {"evaluations": given.evaluations, "log_spaced": given.log_spaced}
        compare(given.configs, budget, out, **options, allow_different_tasks=given.allow_different_tasks)
    except ValueError as error:
        parser.error(str(own_error(error) or error))
    if not _first():
        return
    print((out / "summary.md").read_text())
    print(
        f"Written to {out}: results.csv, summary.md, figure.png, figure.svg, and the resolved config of each method.",
        file=sys.stderr,
    )
