"""Python in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from places import ROOT, SUPPORT, SYNTHETIC


def started(*command: Any, **options: Any) -> subprocess.Popen[str]:
    """A process that finds the package and what is in this folder."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(SUPPORT)]),
        "OMP_NUM_THREADS": "1",
    }
    for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_PORT"):
        environment.pop(name, None)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [sys.executable, *map(str, command)], env=environment, **{**pipes, **options}
    )


def gone(pid: int) -> bool:
    """Whether a process has ended (what is left of it waits for its parent)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def two_process_config(folder: Path, **trainer: Any) -> Path:
    """A small problem of the synthetic kind whose config asks for two processes."""
    content = yaml.safe_load((SYNTHETIC / "ivsp.yaml").read_text())
    content["model"]["init_args"]["n"] = 10
    content["trainer"] |= {
        "strategy": "ddp",
        "devices": 2,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **trainer,
    }
    (folder / "ivsp.yaml").write_text(yaml.safe_dump(content))
    return folder / "ivsp.yaml"
