"""What a process saves when there are two: processor time, memory, and what they tell each other.

Exact mode: IVSP on 4,000 + 4,000 random images of MNIST's size. Mini-batches: StreamingIVSP with
AdamW, 512 samples of each level in a step, however many processes share them. The samples are
random, because only time and memory count. In float32 a line search may go another way with two
processes, so that exact mode is compared by the pass.

Run: OMP_NUM_THREADS=1 python -m benchmarks.past_one_machine
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lightning_bilevel import IVSP, FullBatchDataModule, HyperCleaning, TableRMS
from lightning_bilevel.modules.networks import MLP
from lightning_bilevel.stochastic import StreamingIVSP

SAMPLES = 4000
JOINT_BATCH = 512
STEPS = {"exact": 12, "mini-batches": 30}
WARM = 4


class Cost(Callback):
    """Counts processor time, passes and sums over processes, from the fifth step on."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, int, int]] = []
        self.numbers = 0
        self._sum = torch.distributed.all_reduce

    def on_fit_start(self, *args: Any) -> None:
        def counting(tensor: Any, *given: Any, **options: Any) -> Any:
            self.numbers += tensor.numel() * tensor.element_size()
            return self._sum(tensor, *given, **options)

        torch.distributed.all_reduce = counting

    def on_train_start(self, trainer: Any, *args: Any) -> None:
        if isinstance(trainer.model, DistributedDataParallel):
            # The sum that DDP makes by itself goes past `all_reduce`.
            trainer.model.register_comm_hook(None, allreduce_hook)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.marks.append((time.process_time(), pl_module.last_step.passes, self.numbers))

    def result(self) -> dict[str, float]:
        (t0, p0, n0), (t1, p1, n1) = self.marks[WARM], self.marks[-1]
        steps = len(self.marks) - 1 - WARM
        return {
            "ms per step": 1e3 * (t1 - t0) / steps,
            "passes per step": (p1 - p0) / steps,
            "ms per pass": 1e3 * (t1 - t0) / (p1 - p0),
            "MB summed per step": (n1 - n0) / steps / 1e6,
        }


def samples(seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(SAMPLES, 784, generator=generator)
    return images, torch.randint(10, (SAMPLES,), generator=generator), torch.arange(SAMPLES)


def most_memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(mode: str, hidden: int, processes: int) -> dict[str, float]:
    torch.manual_seed(0)
    how: dict[str, Any] = {"solver": partial(IVSP, rho=0.05, sigma=1.0, L_init=1.0)}
    if mode == "mini-batches":
        how = {
            "method": StreamingIVSP(),
            "upper_optimizer": partial(TableRMS, lr=3.0),
            "lower_optimizer": partial(torch.optim.AdamW, lr=1e-4),
        }
    module = HyperCleaning(
        n_train=SAMPLES,
        classifier=MLP(inputs=784, hidden=hidden),
        weighted_mean=False,
        **how,
    )
    upper, lower = samples(1)[:2], samples(2)
    data: Any = FullBatchDataModule(upper, lower)
    if mode == "mini-batches":
        size = JOINT_BATCH // processes
        data = {
            level: DataLoader(TensorDataset(*part), size, shuffle=True, drop_last=True)
            for level, part in (("upper", upper), ("lower", lower))
        }
    cost = Cost()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=STEPS[mode],
        max_epochs=-1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[cost],
        **({"strategy": "ddp", "devices": processes} if processes > 1 else {}),
    )
    before = most_memory()
    trainer.fit(module, data)
    return {**cost.result(), "MB more than before": most_memory() - before}


def main() -> None:
    rows = []
    for mode in STEPS:
        for hidden in (128, 1024):
            for processes in (1, 2):
                with tempfile.TemporaryDirectory() as folder:
                    out = Path(folder, "out.json")
                    call = [mode, str(hidden), str(processes), str(out)]
                    # A process of its own, because the most memory is that of a whole life.
                    command = [sys.executable, "-m", "benchmarks.past_one_machine", *call]
                    subprocess.run(command, check=True, capture_output=True)
                    rows.append((mode, hidden, processes, json.loads(out.read_text())))
                print(*rows[-1][:3], {k: round(v, 3) for k, v in rows[-1][3].items()}, flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        mode, hidden, processes, out = sys.argv[1:]
        found = measure(mode, int(hidden), int(processes))
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:
            Path(out).write_text(json.dumps(found))
