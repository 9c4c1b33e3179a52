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
import streaming_processes
import torch

EXACT = ("cleaning/own/64-true", "cleaning/paper/64-true", "fewshot/own/64-true")
STREAMING = ("plain", "streaming ivsp")


def run(case: str, folder: Path, data: Any = None, **options: Any) -> dict[str, Any]:
    if case in EXACT:
        return parallel.run(case, default_root_dir=folder, **options)[2]
    return streaming_processes.run(case, folder, data, **{"max_epochs": 2, **options})


def main(out: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    facts = {
        case: run(case, out.parent, strategy="ddp", devices=1, num_nodes=2)
        for case in (*EXACT, *STREAMING)
    }
    facts["node"] = {"rank": int(os.environ["GROUP_RANK"]), "process": os.getpid()}
    everywhere: list[Any] = [None, None]
    torch.distributed.all_gather_object(everywhere, facts)
    if torch.distributed.get_rank() == 0:
        torch.save(everywhere, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
