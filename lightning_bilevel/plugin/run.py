"""The state of one run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_bilevel.plugin.batches import Batches
from lightning_bilevel.plugin.buffers import WrittenBuffers
from lightning_bilevel.plugin.certifier import Certifier
from lightning_bilevel.solvers.base import BilevelOptimizer

__all__ = ["RESTORED", "Run"]

# The name of a point that `restore` has written into the module.
RESTORED = "an earlier point of the run, which was restored"


@dataclass
class Run:
    """The state of a module's run. Each run has a new one, so nothing is left of an earlier run.

    Attributes:
        solver: The solver.
        certifier: The last certificate, and what belongs to it.
        batches: The problem of the current batch.
        buffers: The buffers that evaluations write to.
        last: The weights that the run goes on from, if :meth:`BilevelMixin.restore` has written
            earlier ones into the module.
        shown: Which point the module shows, in words, if it is not the last iterate.
        stamp: The norms of the parameters when the last epoch ended. Others afterwards tell that
            somebody else has written to them, as callbacks that average weights do.
    """

    solver: BilevelOptimizer
    certifier: Certifier = field(default_factory=Certifier)
    batches: Batches = field(default_factory=Batches)
    buffers: WrittenBuffers = field(default_factory=WrittenBuffers)
    last: dict[str, Any] | None = None
    shown: str = ""
    stamp: Tensor | None = None

    def has_moved(self) -> None:
        """Forget which point was written into the module: the run has gone on from there."""
        self.shown, self.stamp, self.last = "", None, None
        self.certifier.multiplier = None

    def point_name(self, norms: Tensor) -> str:
        """Name the point in the module; the name is empty before the first iteration.

        Args:
            norms: Those of the parameters now.
        """
        iterations = self.solver.progress.iterations
        if self.shown or iterations == 0:
            return self.shown
        if self.stamp is not None and not torch.equal(self.stamp, norms.to(self.stamp)):
            return f"weights that were written after iteration {iterations}, such as an average"
        return f"the last iterate, iteration {iterations}"

    def __getstate__(self) -> dict[str, Any]:
        # Functions of a batch cannot be pickled. They are made again for the next batch.
        return {
            **vars(self),
            "certifier": replace(self.certifier, last=None),
            "batches": Batches(),
            "buffers": WrittenBuffers(),
            "stamp": None,
        }
