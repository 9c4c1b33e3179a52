"""Choose the settings of each method by its validation loss, with the same time for each run.

A grid is a YAML file, {config: [changes, ...]}: each entry is one run of `<folder>/<config>.yaml`
with these arguments of its solver changed; a leading dot means an argument of the model. The
changes under `common`, such as another data set, apply to every config. Give each method the same
number of runs. The choice does not use the test set.

Run: python examples/tune.py configs/mnist examples/grids/digits.yaml --budget 2s
     python examples/tune.py configs/omniglot examples/grids/omniglot_cpu.yaml --budget 30s
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import yaml

from lightning_bilevel.callbacks.optimization_budget import seconds
from lightning_bilevel.cli.compare import compare


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
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", help="configs to tune; all of the grid if not given")
    given = parser.parse_args()
    grid = yaml.safe_load(given.grid.read_text())
    common = grid.pop("common", {})
    grid = {name: runs for name, runs in grid.items() if not given.only or name in given.only}
    out = given.out or Path(f"tuning-{given.grid.stem}-{given.budget}")
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
    results = compare(files, seconds(given.budget), out / "runs", evaluations=2)
    losses = {
        r.name: r.rows[-1]["val_loss"] if r.rows and not r.error else float("inf") for r in results
    }
    for name in grid:
        mine = sorted((loss, run) for run, loss in losses.items() if run.rsplit("-", 1)[0] == name)
        for loss, run in mine:
            print(f"{name:8s} {loss:10.4g}  {changes[run]}")


if __name__ == "__main__":
    main()
