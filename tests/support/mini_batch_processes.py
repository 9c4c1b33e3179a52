"""Runs on mini-batches over two processes, and runs that are killed.

    python mini_batch_processes.py ddp OUT
    python mini_batch_processes.py kill FOLDER

The first writes where each case ends, in both processes; Lightning starts the second one itself.
The second kills a run and resumes it, and writes its end and that of a run which was left alone.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from by_hand import OPTIONS, Batch, Cleaner, Stateful, batches, loader
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from lightning_bilevel import LastCheckpoint
from lightning_bilevel.stochastic import DARTS, F2SA, MEHA, SOBA, Method, StreamingIVSP

METHODS: dict[str, Method] = {
    "F2SA": F2SA(0.7),
    "StreamingIVSP": StreamingIVSP(rho=5.0),
    "MEHA": MEHA(gamma=2.0),
    "DARTS": DARTS(xi=0.5),
    "SOBA": SOBA(),
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "view": {"view": True},
    "accumulated view": {"accumulate": 2, "view": True},
}
KILLED_AT = 11


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def half(batch: Batch, rank: int) -> Batch:
    return {
        level: tuple(t[rank * len(t) // 2 : (rank + 1) * len(t) // 2] for t in part)
        for level, part in batch.items()
    }


def run(method: str, way: str, data: Any, **options: Any) -> list[torch.Tensor]:
    """x, y and z after five steps."""
    torch.manual_seed(0)
    given = {key: value for key, value in WAYS[way].items() if key != "view"}
    module = Cleaner(METHODS[method], net=plain, gradient_clip_val=0.5, **given).double()
    trainer = Trainer(
        max_epochs=1, precision="64-true", enable_checkpointing=False, **OPTIONS, **options
    )
    trainer.fit(module, loader(data))
    assert module.mini_batches is not None
    assert module.mini_batches.step is not None
    return [*(p.detach() for p in module.parameters()), *module.mini_batches.step.shadow.z]


def all_batches(way: str) -> list[Batch]:
    return batches(5 * WAYS[way].get("accumulate", 1))


def over_two_processes(out: Path) -> None:
    found = {}
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    for method in METHODS:
        for way, facts in WAYS.items():
            strategy = DDPStrategy(
                gradient_as_bucket_view=facts.get("view", False),
                # f alone does not depend on x.
                find_unused_parameters=method in ("DARTS", "SOBA"),
            )
            data = [half(batch, rank) for batch in all_batches(way)]
            options = {"strategy": strategy, "devices": 2, "use_distributed_sampler": False}
            mine = [t.detach() for t in run(method, way, data, **options)]
            everywhere: list[Any] = [None, None]
            torch.distributed.all_gather_object(everywhere, mine)
            found[method, way] = everywhere
    if rank == 0:
        torch.save(found, out)


class Dies(Callback):
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, *callbacks: Callback) -> None:
    """Three epochs of six steps; the same call begins and resumes."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    module = Cleaner(StreamingIVSP())
    trainer = Trainer(
        max_epochs=3, callbacks=[LastCheckpoint(folder, "1ms"), *callbacks], **OPTIONS
    )
    trainer.fit(module, Stateful(batches(6, torch.float32)), ckpt_path="last")


def in_a_child(folder: Path, *callbacks: Callback) -> int:
    child = os.fork()
    if not child:
        code = 70
        try:
            train(folder, *callbacks)
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed(folder: Path) -> None:
    assert in_a_child(folder / "killed", Dies()) == -signal.SIGKILL
    saved = torch.load(folder / "killed" / "last.ckpt", weights_only=True)
    assert 0 < saved["global_step"] < KILLED_AT
    assert in_a_child(folder / "killed") == 0
    train(folder / "quiet")


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    {"ddp": over_two_processes, "kill": killed}[sys.argv[1]](Path(sys.argv[2]))
