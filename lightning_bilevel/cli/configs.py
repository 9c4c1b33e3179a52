"""Find and resolve the configs of a comparison, and check that they pose one task."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_bilevel.cli.app import BilevelCLI

__all__ = ["MethodConfig", "check_same_task", "find_configs", "read_config"]


@dataclass(frozen=True)
class MethodConfig:
    """A resolved config, from which the task and the solver are read."""

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
        """The settings that decide data, split and start."""
        values = self.values
        # Solver, rates and units do not change the problem; the envelope is for evaluation only.
        for argument in ("solver", "scheduler", "upper_unit", "lower_unit", "envelope"):
            values["model"]["init_args"].pop(argument, None)
        # A growing sample ends with all data: it is a way to solve the same task.
        (values["data"].get("init_args") or {}).pop("growing", None)
        return {
            "seed_everything": values["seed_everything"],
            "model": values["model"],
            "data": values["data"],
            "precision": str(values["trainer"]["precision"]),
        }


class _ParseOnly(BilevelCLI):
    def instantiate_classes(self) -> None:
        """Make no objects: only the parsed config is needed."""


def read_config(path: Path) -> MethodConfig:
    """Resolve a config; refuse it if it does not name its solver."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
            cli = _ParseOnly(
                ["--config", str(path)], run=False, parser_kwargs={"exit_on_error": False}
            )
    except argparse.ArgumentError as error:
        raise ValueError(f"`compare {path}`: {error}") from None
    parsed = MethodConfig(path.stem, cli.parser.dump(cli.config, skip_none=False))
    model = parsed.values["model"]
    if not isinstance((model.get("init_args") or {}).get("solver"), dict):
        raise ValueError(
            f"`compare {path}`: `{model['class_path'].rsplit('.', 1)[-1]}` is not told its solver "
            "by the config: give its `__init__` an argument `solver: SolverCallable = IVSP`, hand "
            "it to `declare`, and name the solver there."
        )
    return parsed


def find_configs(paths: Sequence[Path]) -> list[Path]:
    """Return the YAML files among the paths, and those in the folders among the paths."""
    found = []
    for path in paths:
        if not path.exists():
            raise ValueError(
                f"`compare {path}`: there is no such file or folder, nor a ready config, as "
                "`lightning-bilevel tasks` lists them."
            )
        found += sorted(path.glob("*.yaml")) if path.is_dir() else [path]
    if not found:
        raise ValueError(
            f"`compare {' '.join(map(str, paths))}`: there is no config (*.yaml) in it."
        )
    names = [path.stem for path in found]
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise ValueError(
            f"`compare` was given several configs named {', '.join(double)}: each method needs a "
            "name of its own."
        )
    return found


def check_same_task(configs: Sequence[MethodConfig], allowed: bool) -> None:
    """Refuse configs that pose different tasks, unless that is allowed."""
    first = configs[0]
    for other in configs[1:]:
        differences = [
            f"{key} ({other.task[key]!r}, not {value!r})"
            for key, value in first.task.items()
            if other.task[key] != value
        ]
        if differences and not allowed:
            raise ValueError(
                f"`compare`: {other.name} differs from {first.name} in {'; '.join(differences)}. "
                "The comparison would be unfair; with --allow-different-tasks it is made all the "
                "same."
            )
