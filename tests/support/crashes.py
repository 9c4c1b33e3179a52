"""Trains in processes that are killed; as a script, it prints what came of it as JSON.

    python crashes.py FOLDER SEED KILLS SOLVER [SOLVER ...]

Each process is forked from this one, which has imported everything: a kill then costs a second and
not ten. What runs in it is the command line as a user calls it, with the same arguments each time.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from records import same
from tables import SOLVERS

from lightning_bilevel import BilevelOptimizer, output
from lightning_bilevel.__main__ import main
from lightning_bilevel.cli import compare

STEPS = 300


def config(folder: Path, solver: str, interval: str, steps: int = STEPS) -> list[str]:
    """The arguments of a run in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    last = {
        "class_path": "LastCheckpoint",
        "init_args": {"dirpath": str(folder), "interval": interval},
    }
    trainer = {
        "accelerator": "cpu",
        "precision": "64-true",
        "max_steps": steps,
        "max_epochs": -1,
        "callbacks": [last],
    }
    trainer |= {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(folder),
    }
    model = {
        "n": 40,
        "solver": {
            "class_path": SOLVERS[solver].kind.__name__,
            "init_args": SOLVERS[solver].constants,
        },
    }
    content = {
        "seed_everything": 0,
        "trainer": trainer,
        "model": {"class_path": "SineProblem", "init_args": model},
        "data": {"class_path": "FullBatchDataModule", "init_args": {"epoch_length": 50}},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(content))
    return ["fit", "--config", str(folder / "run.yaml"), "--ckpt_path", "last"]


def launch(arguments: list[str], folder: Path, prepare: Callable[[], None] | None = None) -> int:
    """Start the command line in a process of its own."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv = ["lightning-bilevel"]
        if prepare is not None:
            prepare()
        main(arguments)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    finally:
        sys.stdout.flush()
        os._exit(code)


def outcome(child: int) -> int:
    """The exit code; negative is the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_about(steps: int, dice: random.Random) -> Callable[[], None]:
    """Kill the process some milliseconds after so many steps of its own, whatever it does then."""
    pause = dice.uniform(0.0, 0.01)

    def prepare() -> None:
        step, countdown = BilevelOptimizer.step, [steps]

        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            countdown[0] -= 1
            if countdown[0] == 0:
                threading.Timer(pause, die).start()
            return step(self, *args, **kwargs)

        BilevelOptimizer.step = counted  # type: ignore[method-assign]

    return prepare


def dies_while_writing(moment: int, dice: random.Random) -> Callable[[], None]:
    """Kill the process at a write of a checkpoint: amid its bytes, before or after its naming."""

    def prepare() -> None:
        writes, countdown = ["bytes", "sync", "rename", "renamed"], [moment]
        where = dice.choice(writes)
        sync, replace, save = os.fsync, os.replace, torch.save

        def now(place: str) -> bool:
            countdown[0] -= place == where
            return place == where and countdown[0] < 0

        def torn_save(content: Any, file: Any) -> None:
            if now("bytes"):
                file.write(b"PK\x03\x04 half of a checkpoint")
                file.flush()
                die()
            save(content, file)

        def fsync(number: int) -> None:
            if now("sync"):
                die()
            sync(number)

        def rename(a: Any, b: Any) -> None:
            if now("rename"):
                die()
            replace(a, b)
            if now("renamed"):
                die()

        torch.save, output.os.fsync, output.os.replace = torn_save, fsync, rename  # type: ignore[assignment]

    return prepare


def state(folder: Path) -> dict[str, Any]:
    """What a run has come to; its checkpoint is whole, or this fails."""
    saved = torch.load(folder / "last.ckpt", weights_only=True)
    memory = saved["optimizer_states"][0]["state"]
    del memory["progress"]["optimization_time"]
    return {
        "parameters": saved["state_dict"],
        "memory": memory,
        "constants": saved["optimizer_states"][0]["param_groups"],
        "global_step": saved["global_step"],
    }


def kill_often(folder: Path, solver: str, kills: int, dice: random.Random) -> dict[str, Any]:
    """Run once undisturbed and once with kills; compare the ends.

    Every other kill comes while a checkpoint is written.
    """
    # It saves about every step, so that half of the steps suffice for all kills.
    length = min(10 * kills, STEPS)
    undisturbed = quiet(folder / "quiet", solver, length)
    disturbed = folder / "killed"
    steps = []
    killed = 0
    writing = 0
    arguments = config(disturbed, solver, "1ms", length)
    while True:
        prepare: Callable[[], None] | None = None
        if killed < kills:
            prepare = (
                dies_while_writing(dice.randrange(3), dice)
                if killed % 2
                else dies_about(dice.randint(1, max(length // (2 * kills), 1)), dice)
            )
        code = outcome(launch(arguments, disturbed, prepare))
        writing += killed % 2 if code == -signal.SIGKILL else 0
        if (disturbed / "last.ckpt").exists():
            steps.append(state(disturbed)["global_step"])
        if code != -signal.SIGKILL:
            break
        killed += 1
    equal = same(state(disturbed), undisturbed)
    left = sorted(path.name for path in disturbed.iterdir())
    return {
        "solver": solver,
        "killed": killed,
        "writing": writing,
        "code": code,
        "equal": equal,
        "steps": steps,
        "left": left,
    }


def quiet(folder: Path, solver: str, steps: int = STEPS) -> dict[str, Any]:
    """The state at the end of a run that nothing disturbs."""
    assert outcome(launch(config(folder, solver, "1h", steps), folder)) == 0
    return state(folder)


def told_to_end(ended_early: Path, number: int, undisturbed: dict[str, Any]) -> dict[str, Any]:
    """Send a signal amid a run, then resume it; compare the end with an undisturbed run."""
    arguments = config(ended_early, "paper", "1h")
    child = launch(arguments, ended_early, lambda: announce(ended_early))
    while not (ended_early / "began").exists():
        time.sleep(0.005)
    time.sleep(0.1)
    os.kill(child, number)
    code, step = outcome(child), state(ended_early)["global_step"]
    resumed = outcome(launch(arguments, ended_early))
    return {
        "code": code,
        "step": step,
        "resumed": resumed,
        "equal": same(state(ended_early), undisturbed),
    }


def announce(folder: Path) -> None:
    from lightning_bilevel import LastCheckpoint

    begin = LastCheckpoint.on_train_start

    def on_train_start(self: Any, *args: Any) -> None:
        begin(self, *args)
        (folder / "began").touch()

    LastCheckpoint.on_train_start = on_train_start  # type: ignore[method-assign]


def compare_often_killed(folder: Path, kills: int, dice: random.Random) -> dict[str, Any]:
    """Kill a comparison now and then, every other time while it writes; each call resumes it."""
    methods, killed, code = ("own", "meha"), 0, -1
    for method in methods:
        content = yaml.safe_load(Path(config(folder / "configs", method, "1h")[2]).read_text())
        content["trainer"].pop("callbacks")
        (folder / "configs" / f"{method}.yaml").write_text(yaml.safe_dump(content))
    (folder / "configs" / "run.yaml").unlink()
    arguments = [
        "compare",
        str(folder / "configs"),
        "--budget",
        "600ms",
        "--evaluations",
        "6",
        "--out",
        str(folder / "out"),
    ]

    def prepared(dies: Callable[[], None] | None) -> Callable[[], None]:
        def prepare() -> None:
            compare.SAVE_EVERY = 1e-9
            if dies is not None:
                dies()

        return prepare

    while code:
        dies = None
        if killed < kills:
            dies = (
                dies_while_writing(dice.randrange(2), dice)
                if killed % 2
                else dies_about(dice.randint(5, 30), dice)
            )
        code = outcome(launch(arguments, folder, prepared(dies)))
        killed += code == -signal.SIGKILL
        if code > 0:
            break
    results = (
        [json.loads((folder / "out" / m / "result.json").read_text()) for m in methods]
        if code == 0
        else []
    )
    return {
        "killed": killed,
        "code": code,
        "results": results,
        "log": (folder / "log.txt").read_text()[-2000:],
    }


def run(folder: Path, seed: int, kills: int, solvers: list[str]) -> dict[str, Any]:
    torch.set_num_threads(1)
    dice = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    undisturbed = quiet(folder / "quiet", "paper")
    return {
        "kills": [kill_often(folder / solver, solver, kills, dice) for solver in solvers],
        "compare": compare_often_killed(folder / "compare", max(kills // 3, 2), dice),
        "SIGTERM": told_to_end(folder / "term", signal.SIGTERM, undisturbed),
        "SIGINT": told_to_end(folder / "int", signal.SIGINT, undisturbed),
    }


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])))
