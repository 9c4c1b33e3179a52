"""Runs over two nodes, which torchrun starts, one process on each.

    torchrun --nnodes 2 --nproc-per-node 1 ... two_nodes.py OUT

writes what each run ended with, in both processes.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import parallel
import torch

EXACT = ("cleaning/own/64-true", "cleaning/paper/64-true", "fewshot/own/64-true")


def run(case: str, folder: Path, **options: Any) -> dict[str, Any]:
    return parallel.run(case, default_root_dir=folder, **options)[2]


def main(out: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    facts = {case: run(case, out.parent, strategy="ddp", devices=1, num_nodes=2) for case in EXACT}
    facts["node"] = {"rank": int(os.environ["GROUP_RANK"]), "process": os.getpid()}
    everywhere: list[Any] = [None, None]
    torch.distributed.all_gather_object(everywhere, facts)
    if torch.distributed.get_rank() == 0:
        torch.save(everywhere, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
