"""A run on mini-batches, as Lightning's hooks see it: optimisers, schedulers, logging, resume."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.lr_scheduler import ReduceLROnPlateau
from typing_extensions import override

from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.levels import Declaration, check_all_declared, check_batch
from lightning_bilevel.plugin.torch_optimizers import by_level, step_schedulers, without_monitors
from lightning_bilevel.plugin.whole_data import Data, evaluating, gathered, kept, problem_on_data
from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.record import StreamInfo
from lightning_bilevel.stochastic.penalties import F2SA
from lightning_bilevel.stochastic.shadow import Shadow, copy_optimizer
from lightning_bilevel.stochastic.step import Step

__all__ = ["MiniBatches"]

# So many of the first batches are kept for monitors.
SAMPLE = 8


class MiniBatches(Callback):
    """Makes the steps of a module whose ``configure_optimizers`` returns torch optimisers.

    It is idle where that returns a bilevel solver. A bilevel module brings it along.
    """

    step: Step | None = None

    def __init__(self) -> None:
        self._saved: dict[str, Any] | None = None
        self._random: dict[str, Any] | None = None
        self._watched = False
        self._moved = 0
        self._monitors: dict[int, dict[str, Any]] = {}
        self._sample: list[Any] = []
        self._known: tuple[tuple[bool, int], tuple[BilevelProblem, str]] | None = None
        self._loaders: Any = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Keep the monitors of the schedulers, which Lightning drops in manual optimisation."""
        own, attributes = pl_module.configure_optimizers, vars(pl_module)
        before = {k: v for k, v in attributes.items() if k == "configure_optimizers"}

        def configure_optimizers() -> Any:
            attributes.pop("configure_optimizers", None)
            attributes.update(before)
            return without_monitors(own(), self._monitors)

        if stage == "fit":
            attributes["configure_optimizers"] = configure_optimizers

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        if any(isinstance(optimizer, BilevelOptimizer) for optimizer in trainer.optimizers):
            return
        if trainer.precision == "16-mixed":
            raise MisconfigurationException(
                '`Trainer(precision="16-mixed")` rescales the gradients of one optimiser, and a '
                "bilevel step has three after shared backward passes: use bf16-mixed."
            )
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        self._watched = any(getattr(c, "looks_at_certificates", False) for c in callbacks)
        declared = pl_module._declared()
        declared.resolve()
        check_all_declared(pl_module, declared)
        for config in trainer.lr_scheduler_configs:
            known = self._monitors.get(id(config.scheduler), {})
            config.reduce_on_plateau = isinstance(config.scheduler, ReduceLROnPlateau)
            vars(config).update(known)
            if config.reduce_on_plateau and config.monitor is None:
                raise MisconfigurationException(
                    f"`{type(pl_module).__name__}.configure_optimizers`: `ReduceLROnPlateau` needs "
                    'a metric: return {"scheduler": ..., "monitor": "val_loss"}.'
                )
        wrapped = pl_module.optimizers()
        wrapped = wrapped if isinstance(wrapped, list) else [wrapped]
        pairs = list(zip(wrapped, trainer.optimizers, strict=True))
        solved = pl_module.batch_gradients is not None
        upper, lower = by_level(type(pl_module).__name__, pairs, declared, lower_is_solved=solved)
        shadow = Shadow(declared.lower.parameters, _written_buffers(pl_module, declared))
        copies = dict(zip(shadow.parameters, shadow.z, strict=True))
        self.step = Step(
            module=pl_module,
            method=declared.method or F2SA(),
            options=declared.options,
            upper=declared.upper.parameters,
            shadow=shadow,
            sets=(declared.upper.feasible, declared.lower.feasible),
            upper_optimizers=upper,
            lower_optimizers=lower,
            shadow_optimizers=[copy_optimizer(o.optimizer, copies) for o in lower],
        )
        self._resume()

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # In the middle of an epoch the loaders had started before the state was saved.
        if self._random is not None and batch_idx > 0:
            _restore_random_state(pl_module.device, self._random)
        self._random = None
        self._step_plateaus(pl_module)

    def training_step(self, module: Any, batch: Any, batch_idx: int) -> StreamInfo:
        """Evaluate a batch, step the schedulers, and log at the interval; return the record."""
        assert self.step is not None
        check_batch(type(module).__name__, batch)
        numbers, moved = self.step(batch)
        trainer = module.trainer
        if self._watched and len(self._sample) < SAMPLE:
            self._sample.append(move_data_to_device(batch, "cpu"))
        last: bool = trainer.is_last_batch
        if moved:
            step_schedulers(module, "step", batch_idx + 1, plateau=False)
            self._moved = batch_idx + 1
        if last:
            step_schedulers(module, "epoch", trainer.current_epoch + 1, plateau=False)
        info = self.step.record(numbers)
        # At the end of an epoch other callbacks may monitor it.
        if last or (trainer.fit_loop.total_batch_idx + 1) % max(trainer.log_every_n_steps, 1) == 0:
            shown = {"bilevel/upper": numbers.upper, "bilevel/gap": info.gap}
            module.log_dict(shown, prog_bar=True, sync_dist=True)
            more = {"bilevel/lower": info.lower, "bilevel/multiplier": info.multiplier}
            module.log_dict({**more, "bilevel/skipped": float(info.skipped)}, sync_dist=True)
        return info

    def evaluated(self, batch: Any, sample: bool, batches: int) -> tuple[BilevelProblem, str]:
        """Return f and g on the data of a certificate, and what these are.

        Args:
            batch: A batch; None is the sample or all data.
            sample: Whether to take the first few batches of the run.
            batches: The most batches of a level.
        """
        assert self.step is not None
        module = self.step.module
        trainer = module.trainer

        def on(data: Data) -> tuple[BilevelProblem, str]:
            return problem_on_data(module, module._declared(), trainer, data), data.name

        if batch is not None:
            check_batch(type(module).__name__, batch)
            return on(Data(batch, "the given batch, in eval mode"))
        sample = sample and bool(self._sample)
        asked = sample, len(self._sample) if sample else batches
        if self._known is None or self._known[0] != asked:
            whole = partial(gathered, trainer, batches, self._loaders)
            data = kept(trainer, self._sample) if sample else whole()
            # The same problem again, so that a certificate of the same point is known.
            self._known = asked, on(data)
        return self._known[1]

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context for the evaluation of a certificate."""
        assert self.step is not None
        return evaluating(self.step.module)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._loaders = trainer.train_dataloader

    def _step_plateaus(self, module: Any) -> None:
        """Step the schedulers that monitor a metric, after a validation that followed the step."""
        if self._moved:
            step_schedulers(module, "step", self._moved, plateau=True)
            self._moved = 0

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.step is not None:
            if self.step.k == 0 and self.step.skipped[0] == 0 and self.step.first:
                raise MisconfigurationException(
                    f"`{type(pl_module).__name__}` made no step in a whole epoch: its loaders must "
                    "yield batches."
                )
            self._step_plateaus(pl_module)
            if trainer.is_last_batch and not trainer.fit_loop.restarting:
                step_schedulers(pl_module, "epoch", trainer.current_epoch + 1, plateau=True)

    @override
    def state_dict(self) -> dict[str, Any]:
        if self.step is None:
            return {}
        return {**self.step.state(), "random": _random_state(self.step.module.device)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict
        self._resume()

    def _resume(self) -> None:
        """Go on from a saved state; a strategy may load it before or after the run begins."""
        if self.step is None or self._saved is None:
            return
        self.step.load(self._saved)
        # Before the loaders start, because they draw the order of the samples.
        self._random = self._saved["random"]
        _restore_random_state(self.step.module.device, self._random)
        self._saved = None


def _written_buffers(module: nn.Module, declared: Declaration) -> list[Tensor]:
    """Return the buffers that evaluations of the lower level may write to.

    These are the running statistics of all layers, and every buffer of a layer that has a
    lower-level parameter.
    """
    lower = {id(p) for p in declared.lower.parameters}
    layers = [
        layer
        for layer in module.modules()
        if isinstance(layer, _NormBase)
        or any(id(p) in lower for p in layer.parameters(recurse=False))
    ]
    return [buffer for layer in layers for buffer in layer.buffers(recurse=False)]


def _random_state(device: torch.device) -> dict[str, Any]:
    state = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state["device"] = getattr(torch, device.type).get_rng_state(device)
    return state


def _restore_random_state(device: torch.device, state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"].cpu())
    if "device" in state and device.type != "cpu":
        getattr(torch, device.type).set_rng_state(state["device"].cpu(), device)
