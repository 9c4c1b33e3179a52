"""Random numbers that a resumed run draws again: those of the losses and those of the loaders.

Lightning does not save them. The losses (dropout) have a stream of their own, so what a loader
draws when it starts again does not shift their masks. Loaders draw from torch's and Python's
generators, as always. numpy's generator is not saved, and neither is what workers have drawn: they
get new seeds from torch's generator at each start. So a run that resumes between two epochs has the
same batches as one that was not interrupted, and within an epoch it is up to the loader. Over
several processes the numbers are those of the first.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["LossNumbers", "generators", "restore_generators"]


class LossNumbers:
    """The random numbers of the losses.

    Args:
        device: The device of the parameters.
        state: Where an earlier run stood; None starts at a seed that torch's generator draws.
    """

    def __init__(self, device: torch.device, state: dict[str, Tensor] | None = None) -> None:
        self._cuda = device if device.type == "cuda" else None
        if state is None:
            seed = int(torch.randint(2**62, (), device="cpu"))
            state = {"cpu": torch.Generator("cpu").manual_seed(seed).get_state()}
            if self._cuda is not None:
                state["cuda"] = torch.Generator(self._cuda).manual_seed(seed).get_state()
        self.state = state

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Let torch draw from this stream."""
        outside = self._read()
        self._write(self.state)
        try:
            yield
        finally:
            self.state = self._read()
            self._write(outside)

    def _read(self) -> dict[str, Tensor]:
        state = {"cpu": torch.get_rng_state()}
        if self._cuda is not None:
            state["cuda"] = torch.cuda.get_rng_state(self._cuda)
        return state

    def _write(self, state: dict[str, Tensor]) -> None:
        torch.set_rng_state(state["cpu"])
        # A run that was saved on another kind of device has none for this one.
        if self._cuda is not None and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self._cuda)


def generators() -> dict[str, Any]:
    """Return where torch's and Python's generators stand, as plain data for a checkpoint."""
    version, numbers, following = random.getstate()
    return {"torch": torch.get_rng_state(), "python": [version, list(numbers), following]}


def restore_generators(saved: dict[str, Any]) -> None:
    """Let torch's and Python's generators go on from where they stood."""
    torch.set_rng_state(saved["torch"])
    version, numbers, following = saved["python"]
    random.setstate((version, tuple(numbers), following))
