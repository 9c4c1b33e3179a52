"""Python in processes of its own: new ones, and copies of one that has imported everything."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from places import ROOT, SUPPORT, SYNTHETIC

# Torch and Lightning take seconds to import. All that `lightning_bilevel.__main__` imports, and not
# itself: Python warns of a module that was imported before it is run.
IMPORTED = ["starting", "lightning_bilevel.cli.compare"]


def environment() -> dict[str, str]:
    """The environment of a process that finds the package and what is in this folder."""
    ranks = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_PORT")
    return {
        **{name: value for name, value in os.environ.items() if name not in ranks},
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(SUPPORT)]),
        "OMP_NUM_THREADS": "1",
    }


def started(*command: Any, **options: Any) -> subprocess.Popen[str]:
    """A new process, as a user starts it."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [sys.executable, *map(str, command)], env=environment(), **{**pipes, **options}
    )


class Forked:
    """A process that runs a command as :func:`started` does, without the seconds of the imports.

    It is a copy of a process that has imported everything, and the further processes of Lightning
    are copies of it.

    Args:
        command: The arguments of Python: ``-m``, a module and its arguments, or a script and its.
        cwd: The folder that it runs in.
    """

    def __init__(self, *command: Any, cwd: Path) -> None:
        self._printed = Path(tempfile.mkdtemp(dir=cwd.parent, prefix="printed-"))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        arguments = ([str(word) for word in command], cwd, environment(), self._printed)
        self._process = context.Process(target=_begin, args=arguments)
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]  # of the server, which starts here
        try:
            self._process.start()
        finally:
            del os.environ["PYTHONPATH"]
            if before is not None:
                os.environ["PYTHONPATH"] = before
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for its end; return what it has printed, and its errors."""
        self._process.join(timeout)
        printed, errors = ((self._printed / name).read_text() for name in ("out", "err"))
        if self.returncode is None:
            raise TimeoutError(f"it has not ended after {timeout} s: {errors}")
        return printed, errors


def _begin(command: list[str], cwd: Path, given: Mapping[str, str], printed: Path) -> None:
    """Become a process of one's own: session, files and folder."""
    os.setsid()
    os.chdir(cwd)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(printed / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    from lightning.pytorch.strategies.launchers import subprocess_script

    subprocess_script.subprocess = SimpleNamespace(Popen=_Twin)  # type: ignore[attr-defined]
    _run(command, given)


def _run(command: Sequence[str], given: Mapping[str, str]) -> None:
    """Do what Python does with these arguments."""
    os.environ.clear()
    os.environ.update(given)
    if command[0] == "-m":
        sys.argv = list(command[1:])
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command)
        runpy.run_path(command[0], run_name="__main__")


class _Twin:
    """What Lightning uses of a ``subprocess.Popen``, for a copy of the first process."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: None = None) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            _run(command[1:], env)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


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
    content["data"]["init_args"]["epoch_length"] = 40
    content["trainer"] |= {
        "strategy": "ddp",
        "devices": 2,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **trainer,
    }
    (folder / "ivsp.yaml").write_text(yaml.safe_dump(content))
    return folder / "ivsp.yaml"
