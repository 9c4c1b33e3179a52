"""``lightning-bilevel compare``: several methods on one task, with equal optimisation time."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only
from tqdm.auto import tqdm

from lightning_bilevel.callbacks.last_checkpoint import LastCheckpoint
from lightning_bilevel.callbacks.optimization_budget import OptimizationBudget, seconds
from lightning_bilevel.cli.baselines import find_baselines
from lightning_bilevel.cli.catalogue import ready
from lightning_bilevel.cli.configs import MethodConfig, check_same_task, find_configs, read_config
from lightning_bilevel.cli.messages import own_error
from lightning_bilevel.cli.method import Method, start_row, warm_up
from lightning_bilevel.cli.recorder import Recorder
from lightning_bilevel.cli.results import MethodResult, write_csv, write_figure, write_summary
from lightning_bilevel.core.errors import CheckpointError
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.files import write_whole

__all__ = ["compare", "main"]


# The interval of the checkpoints from which an interrupted comparison resumes.
SAVE_EVERY: str | float = "10s"


def compare(
    configs: Sequence[Path],
    budget: float,
    out: Path,
    *,
    evaluations: int = 40,
    log_spaced: bool = False,
    allow_different_tasks: bool = False,
    baselines: bool = False,
) -> list[MethodResult]:
    """Run each config for the same time; write results.csv, summary.md and the figure.

    Args:
        configs: YAML files of LightningCLI, or folders of them.
        budget: Seconds of optimisation for each method.
        out: The folder of the results; an interrupted comparison resumes from it.
        evaluations: The number of evaluations of each method, spread over the budget.
        log_spaced: Spread them evenly on a logarithmic axis, from a thousandth of the budget on.
        allow_different_tasks: Compare even if data or start differ.
        baselines: Show the simple baselines of the first config's task as well. They are computed
            once, and a few-shot network is trained for as long as a method.
    """
    parsed = [read_config(path) for path in find_configs(configs)]
    check_same_task(parsed, allow_different_tasks)
    _check_folder(
        out, parsed, {"budget": budget, "evaluations": evaluations, "log_spaced": log_spaced}
    )
    shares = [(i + 1) / evaluations for i in range(evaluations)]
    if log_spaced:
        shares = [1000 ** (share - 1) for share in shares]
    times = [budget * share for share in shares]
    envelope = next((Method(out, c).model.envelope for c in parsed if c.solver == "IVSP"), None)
    warm_up(out, parsed[0])
    results = []
    starts: dict[str, dict[str, float]] = {}
    layout = "{l_bar}{bar}| {n:.1f}/{total:.1f} s, {remaining} left"
    with tqdm(total=len(parsed) * budget, unit="s", bar_format=layout, disable=not _first()) as bar:
        for number, config in enumerate(parsed):
            bar.set_description(f"{config.name:8s}")

            def shown(spent: float, start: float = number * budget) -> None:
                bar.n = start + min(spent, budget)
                bar.update(0)

            results.append(_run(out, config, budget, times, envelope, shown, starts))
            bar.n = (number + 1) * budget
            if _first():
                write_csv(out / "results.csv", results)
        bar.refresh()
    model = parsed[0].task["model"]["class_path"].rsplit(".", 1)[-1]
    title = f"{model}, {budget:g} s of optimisation each"
    if _first():
        found = find_baselines(out, parsed[0], budget) if baselines else []
        write_summary(out / "summary.md", results, title, found)
        write_figure(out / "figure", results, title, found)
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
    starts: dict[str, dict[str, float]],
) -> MethodResult:
    folder = out / config.name
    done = folder / "result.json"
    if done.exists():
        return MethodResult(**json.loads(done.read_text()))
    result = MethodResult(config.name, config.solver)
    last = folder / "last.ckpt"
    recorder = Recorder(times, shown, envelope)
    method = Method(
        out, config, [OptimizationBudget(budget), recorder, LastCheckpoint(folder, SAVE_EVERY)]
    )
    if config.solver == "IVSP":
        # The envelope of its config; if IVSP chooses one during the run, the declared one.
        recorder.envelope = method.model.envelope
    try:
        if not last.exists():
            # Methods of one task start at the same point, which is evaluated once.
            start = json.dumps([config.task, repr(recorder.envelope)])
            if start not in starts:
                starts[start] = start_row(out, config, recorder.envelope)
            recorder.rows = [starts[start]]
        method.trainer.fit(
            method.model, datamodule=method.datamodule, ckpt_path="last" if last.exists() else None
        )
    except (OSError, CheckpointError):
        raise  # a full disk is not the method's fault: the next call of `compare` resumes
    except Exception as error:  # the other methods still run; the row of this one has the error
        result.error = f"{type(error).__name__}: {error}".splitlines()[0]
    result.rows = recorder.rows
    if method.trainer.is_global_zero:
        write_whole(done, json.dumps(asdict(result)).encode())
        last.unlink(missing_ok=True)
    return result


def _check_folder(out: Path, configs: Sequence[MethodConfig], protocol: dict[str, Any]) -> None:
    """Prepare a new folder for this comparison, or check that it belongs to this comparison."""
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
    # The note comes first, so that a comparison that is killed here recognises its folder.
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
    parser.add_argument(
        "--baselines",
        action="store_true",
        help="show simple baselines beside the methods, for data of cleaning and of few-shot "
        "learning; a few-shot network is trained for the budget too",
    )
    given = parser.parse_args(args)
    try:
        budget = seconds(given.budget)
        if given.evaluations < 1:
            raise ValueError(f"`compare --evaluations {given.evaluations}` must be at least 1.")
        first = given.configs[0].resolve()
        name = first.name if first.is_dir() else first.parent.name
        out = given.out or Path(f"comparison-{name}-{given.budget}")
        options = {
            "evaluations": given.evaluations,
            "log_spaced": given.log_spaced,
            "baselines": given.baselines,
        }
        compare(
            given.configs, budget, out, **options, allow_different_tasks=given.allow_different_tasks
        )
    except ValueError as error:
        parser.error(str(own_error(error) or error))
    if not _first():
        return
    print((out / "summary.md").read_text())
    print(
        f"Written to {out}: results.csv, summary.md, figure.png, figure.svg, and the resolved "
        "config of each method.",
        file=sys.stderr,
    )
