"""The ready configs and their locations; ``lightning-bilevel tasks`` lists them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["TASKS", "Task", "folder", "listing", "main", "ready", "with_ready_configs"]

# The names of tasks on mini-batches begin and end like this.
_TRUSTED = "trusted/"
_STREAMED = "_mini_batches"
_HERE = Path(__file__).parents[1]


class Task(NamedTuple):
    """A folder of configs, one for each method. Mini-batches are for the streaming methods alone.

    Attributes:
        name: The name of the folder, within that of the ready configs.
        about: A description of the problem.
        data: The data that it needs besides the library.
        time: The duration of a fit with IVSP (StreamingIVSP) on one or two CPU cores.
    """

    name: str
    about: str
    data: str
    time: str


def _trusted(data: str, things: str, needs: str) -> list[Task]:
    """Return the tasks with a few trusted samples beside 59,000 noisy ones."""
    about = {
        "pair_100": f"59,000 {things}, 60 % in the next class, 100 trusted",
        "pair_1000": f"59,000 {things}, 60 % in the next class, 1,000 trusted",
        "uniform_100": f"59,000 {things}, half in any class, 100 trusted",
    }
    return [
        Task(
            f"{_TRUSTED}{data}_{name}",
            words,
            f"{needs}, 53 MB",
            "half a minute",
        )
        for name, words in about.items()
    ]


TASKS = (
    Task("synthetic", "a nonconvex lower level with a known solution", "none", "seconds"),
    Task("digits", "find wrong labels among 600 digits", "none", "seconds"),
    Task("glyphs", "few-shot learning of drawn characters", "none", "1 to 2 minutes"),
    Task(
        "mnist",
        "find wrong labels among 5,000 digits",
        "MNIST, 53 MB",
        "about a minute",
    ),
    Task(
        "fashion_mnist",
        "find wrong labels among 5,000 garments",
        "FashionMNIST, 53 MB",
        "about a minute",
    ),
    Task(
        "digits_mini_batches",
        "1,000 digits, 100 trusted, mini-batches",
        "none",
        "half a minute",
    ),
    Task(
        "mnist_mini_batches",
        "59,000 digits, 100 trusted, mini-batches",
        "MNIST, 53 MB",
        "half a minute",
    ),
    Task(
        "fashion_mnist_mini_batches",
        "59,000 garments, 100 trusted, mini-batches",
        "FashionMNIST, 53 MB",
        "half a minute",
    ),
    *_trusted("mnist", "digits", "MNIST"),
    *_trusted("fashion_mnist", "garments", "FashionMNIST"),
    Task(
        "omniglot_cpu",
        "few-shot learning, a size for two CPU cores",
        "Omniglot, 14 MB",
        "5 minutes",
    ),
    Task(
        "omniglot",
        "few-shot learning, the paper's size",
        "Omniglot, 14 MB",
        "an hour, or a GPU",
    ),
    Task(
        "glyphs_mini_batches",
        "few-shot learning on fresh episodes",
        "none",
        "about a minute",
    ),
    Task(
        "omniglot_mini_batches",
        "few-shot learning on fresh episodes",
        "Omniglot, 14 MB",
        "1 to 2 minutes",
    ),
)


def folder() -> Path:
    """Return the folder of the ready configs: in the installed package, or beside a checkout."""
    installed = _HERE / "configs"
    return installed if installed.is_dir() else _HERE.parent / "configs"


def ready(path: Path) -> Path:
    """Return the ready config, or folder of configs, of that name; an existing path is unchanged.

    Example:
        >>> ready(Path("synthetic/ivsp")) == folder() / "synthetic" / "ivsp.yaml"
        True
        >>> ready(Path("my/own.yaml"))
        PosixPath('my/own.yaml')
    """
    if path.exists() or path.is_absolute():
        return path
    name = Path(*path.parts[1:]) if path.parts[:1] == ("configs",) else path
    if not name.parts or ".." in name.parts:
        return path
    found = folder() / name
    for candidate in (found, found.with_name(f"{found.name}.yaml")):
        if candidate.exists():
            return candidate
    return path


def with_ready_configs(args: Sequence[str]) -> list[str]:
    """Return the arguments of a command; ready configs after ``--config`` become paths.

    Example:
        >>> with_ready_configs(["fit", "--config", "mine.yaml", "--seed_everything", "1"])
        ['fit', '--config', 'mine.yaml', '--seed_everything', '1']
    """
    result = list(args)
    for i, (before, argument) in enumerate(zip(["", *args], args, strict=False)):
        if before in ("-c", "--config"):
            result[i] = str(ready(Path(argument)))
        elif argument.startswith("--config="):
            result[i] = f"--config={ready(Path(argument.removeprefix('--config=')))}"
    return result


def listing() -> str:
    """Return the ready configs as a table, with the methods of each task."""
    titles = Task("TASK", "WHAT IT IS", "DATA", "TIME")
    widths = [max(len(row[i]) for row in (titles, *TASKS)) for i in range(3)]
    rows = [
        [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row.time]
        for row in (titles, *TASKS)
    ]
    methods = {
        task.name: sorted(path.stem for path in (folder() / task.name).glob("*.yaml"))
        for task in TASKS
    }
    streamed = {
        name: methods.pop(name)
        for name in list(methods)
        if name.endswith(_STREAMED) or name.startswith(_TRUSTED)
    }
    shared = sorted(set.intersection(*map(set, methods.values())))
    on_mini_batches = sorted(set.intersection(*map(set, streamed.values())))
    further = {
        name: [method for method in own_methods if method not in shared]
        for name, own_methods in methods.items()
    }
    more = [f"  {name} has {', '.join(added)} too" for name, added in further.items() if added]
    return "\n".join(
        [
            *map("  ".join, rows),
            "",
            f"Each task has one config per method: {', '.join(shared)}.",
            *more,
            "PBGD-Free needs an f that depends on x, so no task on wrong labels has it; Lu-Mei is "
            "for tiny convex problems.",
            f"Those on mini-batches have: {', '.join(on_mini_batches)}.",
            "  lightning-bilevel fit --config synthetic/ivsp                   solve it",
            "  lightning-bilevel fit --config synthetic/ivsp --print_config    "
            "see all settings; write your own from them",
            "  lightning-bilevel compare synthetic --budget 1s                 "
            "all methods, the same time for each",
            "",
            "TIME is that of a fit with IVSP on two CPU cores. Data are downloaded, or read from "
            "the folder that the environment",
            f"variable LIGHTNING_BILEVEL_DATA names. The files lie in {folder()}.",
        ]
    )


def main(args: Sequence[str] | None = None) -> None:
    """Run ``lightning-bilevel tasks``."""
    about = "List the ready configs, with what they need."
    argparse.ArgumentParser("lightning-bilevel tasks", description=about).parse_args(args)
    print(listing())
