"""The ready configs and their locations; ``lightning-bilevel tasks`` lists them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_bilevel.output import table

_HERE = Path(__file__).parents[1]
_FOOT = """\
Each task is followed by its methods: `lightning-bilevel fit --config synthetic/ivsp` solves it.
Data are downloaded, or read from the folder $LIGHTNING_BILEVEL_DATA. The files lie in {}."""


def folder() -> Path:
    """Return the folder of the ready configs: in the installed package, or beside a checkout."""
    installed = _HERE / "configs"
    return installed if installed.is_dir() else _HERE.parent / "configs"


def tasks() -> dict[str, str]:
    """Return the folders of ready configs, each with its problem, its data, and the time of a fit.

    The time is that of IVSP on two CPU cores.
    """
    lines = (folder() / "tasks.txt").read_text("utf-8").splitlines()
    return dict(line.split(": ", 1) for line in lines)


def ready(path: Path) -> Path:
    """Return the ready config, or folder of configs, of that name; an existing path is unchanged.

    Example:
        >>> ready(Path("synthetic/ivsp")) == folder() / "synthetic" / "ivsp.yaml"
        True
        >>> ready(Path("my/own.yaml"))
        PosixPath('my/own.yaml')
    """
    found = folder() / path
    return next((p for p in (path, found, Path(f"{found}.yaml")) if p.exists()), path)


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


def main(args: Sequence[str] | None = None) -> None:
    """Run ``lightning-bilevel tasks``."""
    about = "List the ready configs, with what they need."
    argparse.ArgumentParser("lightning-bilevel tasks", description=about).parse_args(args)
    rows = [
        (name, f"{words}: {', '.join(sorted(path.stem for path in (folder() / name).iterdir()))}")
        for name, words in tasks().items()
    ]
    print(table("ready configs", rows), _FOOT.format(folder()), sep="\n")
