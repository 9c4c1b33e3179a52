"""The end of a cleaning run: simple methods beside it, and a picture of the suspicious samples."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_bilevel.baselines.cleaning import check_data, cleaning_baselines
from lightning_bilevel.baselines.row import Baseline
from lightning_bilevel.callbacks.monitor import solver_of
from lightning_bilevel.core.chunks import as_chunks
from lightning_bilevel.data.cleaning import CleaningData
from lightning_bilevel.files import write_whole
from lightning_bilevel.modules.hypercleaning import HyperCleaning
from lightning_bilevel.plugin.loggers import run_folder
from lightning_bilevel.table import columns

__all__ = ["CleaningReport"]


class CleaningReport(Callback):
    """Ends a fit of HyperCleaning with a table of simple methods and a contact sheet.

    The first row of the table is the run, below it are those of
    :func:`~lightning_bilevel.baselines.cleaning.cleaning_baselines` on the same samples, with the
    same network and the seed of the data. The contact sheet, ``suspicious.png`` in the folder of
    the run, has the training images of lowest weight. A run that ends early by a fault or Ctrl-C
    has neither.

    Args:
        count: The number of images on the contact sheet.

    Attributes:
        rows: The rows of the table, once fit has ended.
    """

    def __init__(self, count: int = 32) -> None:
        if count < 1:
            raise ValueError(f"`CleaningReport(count={count})` must be at least 1.")
        self.count = count
        self.rows: list[Baseline] = []

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data: Any = getattr(trainer, "datamodule", None)
        if not (isinstance(pl_module, HyperCleaning) and isinstance(data, CleaningData)):
            raise MisconfigurationException(
                f"`CleaningReport` was given {type(pl_module).__name__} and "
                f"{'no data module' if data is None else type(data).__name__}: it is for a "
                "`HyperCleaning` on a `CleaningData`, so leave it out here."
            )
        check_data(data)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        folder = run_folder(trainer)
        # A trial run of a few steps has no folder, and no result to compare.
        if folder is None or pl_module.last_step is None or not trainer.is_global_zero:
            return
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        print("\nSimple methods on the same samples ...", flush=True)
        simple = cleaning_baselines(data, data.seed, pl_module.fresh_classifier)
        names = dict.fromkeys(name for row in simple for name in row.metrics)
        found = {
            name: float(trainer.callback_metrics[name])
            for name in names
            if name in trainer.callback_metrics
        }
        spent = pl_module.last_step.optimization_time
        self.rows = [Baseline(type(solver_of(trainer)).__name__, found, spent), *simple]
        print(_table(self.rows, list(names)))
        if "auroc" in names:
            print("AUROC: how well a method ranks the wrong labels before the right ones.")
        if len(data.image_shape) == 3:
            print(self._sheet(folder / "suspicious.png", pl_module, data))

    def _sheet(self, path: Path, pl_module: HyperCleaning, data: CleaningData) -> str:
        """Write the contact sheet and return a sentence about it."""
        parts = as_chunks(data.lower).batches
        images, labels = (torch.cat([part[i] for part in parts]) for i in (0, 1))
        picture = io.BytesIO()
        figure = pl_module.suspicious_figure(images, labels, self.count)
        figure.savefig(picture, dpi=120, format="png")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, picture.getvalue())
        lowest = pl_module.suspicious(self.count).cpu()
        known = ""
        if data.corrupted is not None:
            known = f", {int(data.corrupted[lowest].sum())} of which have a wrong label"
        return f"The {len(lowest)} samples of lowest weight{known}: {path}"


def _table(rows: list[Baseline], metrics: list[str]) -> str:
    """Lay out the rows; the best of each metric is not marked, because the oracle is no method."""
    head = ["", *(_HEADS[name] for name in metrics), "seconds", ""]
    lines = [
        [
            row.name,
            *(f"{row.metrics[name]:.3f}" if name in row.metrics else "" for name in metrics),
            f"{row.seconds:.1f}",
            "",
        ]
        for row in rows
    ]
    return columns([head, *lines], left=1)


_HEADS = {"test_error": "test error", "auroc": "AUROC", "missed_errors": "wrong labels missed"}
