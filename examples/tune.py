"""Choose the settings of each method by its validation loss, with the same time for each run.

On a machine that others use too, `--passes` gives each run the same number of passes through f or g
instead of the same time.

A grid is a YAML file, {config: [changes, ...]}: each entry is one run of `<folder>/<config>.yaml`
with these arguments of its solver changed; a leading dot means an argument of the model. The
changes under `common`, such as another data set, apply to every config. Give each method the same
number of runs. The choice does not use the test set. `--test` shows it too, to report settings that
were chosen before.

Run: python examples/tune.py configs/mnist examples/grids/digits.yaml --budget 2s
     python examples/tune.py configs/omniglot examples/grids/omniglot_cpu.yaml --budget 30s
     python examples/tune.py configs/omniglot_cpu examples/grids/omniglot_cited.yaml --passes 300
     python examples/tune.py configs/omniglot_cpu examples/grids/as_is.yaml --passes 300 --test
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Callback, Trainer

from lightning_bilevel import BilevelError
from lightning_bilevel.callbacks.ends import seconds
from lightning_bilevel.cli.compare import Method, compare


class PassBudget(Callback):
    """Stops fit when the solver has made its passes."""

    def __init__(self, passes: int) -> None:
        self.passes = passes

    def on_train_batch_end(self, trainer: Trainer, module: Any, *args: Any) -> None:
        trainer.should_stop = module.last_step.passes >= self.passes


def loss_after(passes: int, file: Path, test: bool = False) -> float:
    """Return the validation loss of a config after so many passes, or inf if the run failed.

    With ``test`` all metrics of the validation and the test set are printed.
    """
    method = Method(file, budget=1.0)
    try:
        method.fit([PassBudget(passes)])
        method.trainer.validate(method.model, datamodule=method.datamodule, verbose=False)
    except BilevelError as error:
        print(f"{file.stem}: {error}", flush=True)
        return float("inf")
    loss = float(method.trainer.callback_metrics["val_loss"])
    print(f"{file.stem}: {loss:.4g} after {method.model.last_step.passes} passes", flush=True)
    if test:
        found = dict(method.trainer.callback_metrics)
        method.trainer.test(method.model, datamodule=method.datamodule, verbose=False)
        found.update(method.trainer.callback_metrics)
        for name in sorted(name for name in found if not name.startswith("bilevel/")):
            print(f"  {name} {float(found[name]):.4g}", flush=True)
    return loss


def merge(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(config)
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            merged[key] = merge(config[key], value)
        else:
            merged[key] = value
    return merged


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("grid", type=Path)
    parser.add_argument("--budget", default="2s")
    parser.add_argument("--passes", type=int, help="passes of each run, in place of the budget")
    parser.add_argument("--test", action="store_true", help="with --passes: the test set too")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", help="configs to tune; all of the grid if not given")
    given = parser.parse_args()
    grid = yaml.safe_load(given.grid.read_text())
    common = grid.pop("common", {})
    grid = {name: runs for name, runs in grid.items() if not given.only or name in given.only}
    label = f"{given.passes}-passes" if given.passes else given.budget
    out = given.out or Path(f"tuning-{given.grid.stem}-{label}")
    variants = out / "configs"
    variants.mkdir(parents=True, exist_ok=True)
    changes = {}
    for name, runs in grid.items():
        base = merge(yaml.safe_load((given.folder / f"{name}.yaml").read_text()), common)
        for number, change in enumerate(runs):
            config = copy.deepcopy(base)
            model = config["model"]["init_args"]
            for key, value in change.items():
                if key.startswith("."):
                    model[key[1:]] = value
                else:
                    model["solver"]["init_args"][key] = value
            changes[f"{name}-{number}"] = change
            (variants / f"{name}-{number}.yaml").write_text(yaml.safe_dump(config))
    files = [variants / f"{name}.yaml" for name in changes]
    if given.passes:
        losses = {file.stem: loss_after(given.passes, file, given.test) for file in files}
    else:
        results = compare(files, seconds(given.budget), out / "runs", evaluations=2)
        losses = {
            r.name: r.rows[-1]["val_loss"] if r.rows and not r.error else float("inf")
            for r in results
        }
    for name in grid:
        mine = sorted((loss, run) for run, loss in losses.items() if run.rsplit("-", 1)[0] == name)
        for loss, run in mine:
            print(f"{name:8s} {loss:10.4g}  {changes[run]}")


if __name__ == "__main__":
    main()
