"""What all monitors cost on hyper-cleaning of MNIST, as a share of one run's time.

They run at their default intervals.

Every hook of every monitor is timed where the Trainer calls it, within one `lightning-bilevel fit`
of configs/mnist/ivsp.yaml, by the time of this process alone: a machine that others use does not
lengthen it.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

from benchmarks.results import Row, Section
from benchmarks.tasks import CONFIGS, Size
from lightning_bilevel import CertificateMonitor, PenaltyMonitor, SolverMonitor
from lightning_bilevel.cli.app import BilevelCLI

HOOKS = (
    "on_fit_start",
    "on_train_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_end",
)


def build(folder: str, size: Size) -> BilevelCLI:
    options = {
        "trainer.default_root_dir": folder,
        "trainer.enable_model_summary": False,
        "trainer.enable_progress_bar": False,
        "trainer.max_epochs": size.steps // 2,
        "model.init_args.n_train": size.samples,
        "data.init_args.n_train": size.samples,
        "data.init_args.n_validation": size.samples,
    }
    given = [
        f"--{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in options.items()
    ]
    return BilevelCLI(["--config", str(CONFIGS / "mnist" / "ivsp.yaml"), *given], run=False)


def timed(hook: Callable[..., None], spent: dict[str, float], name: str) -> Callable[..., None]:
    def call(*args: Any, **kwargs: Any) -> None:
        began = time.process_time()
        hook(*args, **kwargs)
        spent[name] = spent.get(name, 0.0) + time.process_time() - began

    return call


def run(size: Size) -> Section:
    warnings.filterwarnings("ignore")
    spent: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        cli = build(folder, size)
        for callback in cli.trainer.callbacks:
            if isinstance(callback, (CertificateMonitor, PenaltyMonitor, SolverMonitor)):
                for hook in HOOKS:
                    setattr(
                        callback,
                        hook,
                        timed(getattr(callback, hook), spent, type(callback).__name__),
                    )
        began = time.process_time()
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
        whole = time.process_time() - began
    of_each = ", ".join(
        f"{name} {100 * seconds / whole:.2g} %" for name, seconds in sorted(spent.items())
    )
    note = f"of {cli.trainer.global_step} iterations, {whole:.3g} s of processor time: {of_each}"
    return Section(
        "Monitors",
        [Row("all monitors", 100 * sum(spent.values()) / whole, "%", at_most=3.0, note=note)],
    )
