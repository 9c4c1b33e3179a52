"""The ready configs and their locations; ``lightning-bilevel tasks`` lists them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_bilevel.table import table

__all__ = ["TASKS", "folder", "main", "ready", "with_ready_configs"]

_HERE = Path(__file__).parents[1]
# A folder of configs, one for each method: the problem, its data, and the time of a fit with IVSP
# on two CPU cores.
TASKS = {
    "synthetic": "a nonconvex lower level with a known solution (no data, seconds)",
    "digits": "find wrong labels among 600 digits (no download, seconds)",
    "mnist": "find wrong labels among 5,000 digits (MNIST, 53 MB; a minute)",
    "fashion_mnist": "find wrong labels among 5,000 garments (FashionMNIST, 53 MB; a minute)",
    "glyphs": "few-shot learning of drawn characters (no download, 2 minutes)",
    "omniglot": "few-shot learning, the paper's size (Omniglot, 14 MB; an hour, or a GPU)",
    "omniglot_cpu": "few-shot learning, a size for two cores (Omniglot, 14 MB; 5 minutes)",
    "digits_mini_batches": "1,000 digits, 100 trusted (no download, half a minute)",
    "mnist_mini_batches": "59,000 digits, 100 trusted (MNIST, 53 MB; half a minute)",
    "fashion_mnist_mini_batches": "59,000 garments, 100 trusted (FashionMNIST; half a minute)",
    "glyphs_mini_batches": "few-shot learning on fresh episodes (no download, a minute)",
    "omniglot_mini_batches": "few-shot learning on fresh episodes (Omniglot; 2 minutes)",
    "trusted": "59,000 images with wrong labels, few trusted (half a minute; F2SA, StreamingIVSP)",
}
_FOOT = """\
Each task is followed by its methods:
  lightning-bilevel fit --config synthetic/ivsp                   solve it
  lightning-bilevel fit --config synthetic/ivsp --print_config    see all settings
  lightning-bilevel compare synthetic --budget 1s                 all methods, equal time
Data are downloaded, or read from the folder $LIGHTNING_BILEVEL_DATA.
The files lie in {}."""


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
        for name, words in TASKS.items()
    ]
    print(table("ready configs", rows))
    print(_FOOT.format(folder()))
