"""Runs over two nodes, one process on each, which the agents of torchrun start.

    python two_nodes.py OUT NODE PORT

is one of the two nodes. The first one writes what each run ended with, in both processes.
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
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

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


def node(out: Path, rank: int, port: int) -> None:
    """Do what ``torchrun --nnodes 2 --nproc-per-node 1 --node-rank ... two_nodes.py`` does.

    Its process is a copy of this one, without the seconds of the imports.
    """
    config = LaunchConfig(
        min_nodes=2,
        max_nodes=2,
        nproc_per_node=1,
        run_id="none",
        rdzv_backend="static",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"rank": rank},
        max_restarts=0,
        start_method="fork",
    )
    elastic_launch(config, main)(out)


if __name__ == "__main__":
    node(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
