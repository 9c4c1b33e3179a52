"""A run on mini-batches, as Lightning sees it: optimisers, schedulers, logging, resume."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import ReduceLROnPlateau
from typing_extensions import override

from lightning_bilevel.core.passes import Calls
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.declaration import Declaration, check_all_declared, check_batch
from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.record import Progress, StreamInfo
from lightning_bilevel.stochastic.penalties import F2SA
from lightning_bilevel.stochastic.shadow import Shadow
from lightning_bilevel.stochastic.step import Step, wide
from lightning_bilevel.whole_data import Data, gathered, kept, problem_on

# So many of the first batches are kept for monitors.
SAMPLE = 8
# The passes of a step on a batch, as reports count them.
PASSES = 3


class MiniBatches(Callback):
    """Makes the steps of a module whose ``configure_optimizers`` returns torch optimisers.

    It is idle where that returns a bilevel solver. A bilevel module brings it along. To reports it
    is the solver of the run, with its name, progress and constants.
    """

    step: Step | None = None
    proved: ClassVar[None] = None
    chosen: ClassVar[list[tuple[str, str]]] = []

    def __init__(self) -> None:
        self._saved: dict[str, Any] | None = None
        self._watched = False
        # The batches of the epoch after which those that monitor a metric are still to step.
        self._moved = 0
        self._sample: list[Any] = []
        self._known: tuple[tuple[int, int], BilevelProblem, str] | None = None
        self._loaders: Any = None

    @property
    def name(self) -> str:
        """The name of the method."""
        return type(self._running().method).__name__

    @property
    def progress(self) -> Progress:
        """How far the run has come."""
        step = self._running()
        inner = step.k * step.module.inner_iterations
        return Progress(step.k, inner, optimization_time=step.seconds)

    @property
    def hyper_parameters(self) -> dict[str, Any]:
        """The constants of the method, for loggers."""
        constants = vars(self._running().method)
        return {name: c for name, c in constants.items() if isinstance(c, (int, float))}

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
        for scheduler in (config.scheduler for config in trainer.lr_scheduler_configs):
            if isinstance(scheduler, ReduceLROnPlateau) and not hasattr(scheduler, "monitor"):
                raise MisconfigurationException(
                    "Lightning drops the `monitor` of a scheduler in manual optimisation: take "
                    '`lightning.pytorch.cli.ReduceLROnPlateau(optimizer, monitor="val_loss")`.'
                )
        upper, lower = _by_level(pl_module, declared)
        self.step = Step(
            module=pl_module,
            method=declared.method or F2SA(),
            options=declared.options,
            upper=declared.upper.parameters,
            shadow=Shadow(pl_module, declared.lower.parameters),
            sets=(declared.upper.feasible, declared.lower.feasible),
            upper_optimizers=upper,
            lower_optimizers=lower,
        )
        if self._saved is not None:
            self.step.load(self._saved)
            # Before the loaders start, because they draw the order of the samples.
            _restore_random_state(pl_module.device, self._saved["random"])

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # In the middle of an epoch the loaders had started before the state was saved.
        if self._saved is not None and batch_idx > 0:
            _restore_random_state(pl_module.device, self._saved["random"])
        self._saved = None
        self._step_monitoring()

    def training_step(self, module: Any, batch: Any, batch_idx: int) -> StreamInfo:
        """Evaluate a batch, step the schedulers, and log at the interval; return the record."""
        step, trainer = self._running(), module.trainer
        if step.k == 0:
            check_batch(type(module).__name__, batch)
        numbers, moved = step(batch)
        if self._watched and len(self._sample) < SAMPLE:
            self._sample.append(move_data_to_device(batch, "cpu"))
        last: bool = trainer.is_last_batch
        if moved:
            self._step_schedulers("step", batch_idx + 1)
            self._moved = batch_idx + 1
        if last:
            self._step_schedulers("epoch", trainer.current_epoch + 1)
        # They are tensors until somebody reads them.
        known: Any = numbers
        gap: Any = wide(numbers.lower) - wide(numbers.inner)
        info = StreamInfo(
            upper=known.upper,
            lower=known.lower,
            gap=gap,
            multiplier=known.multiplier,
            inner_iterations=module.inner_iterations,
            iteration=step.k,
            calls=Calls(upper=1, lower=2),
            passes=PASSES * step.k * step.options.accumulate,
            optimization_time=step.seconds,
            skipped=step.skipped[0],
        )
        # At the end of an epoch other callbacks may monitor it.
        if last or (trainer.fit_loop.total_batch_idx + 1) % max(trainer.log_every_n_steps, 1) == 0:
            for name in ("upper", "gap", "lower", "multiplier", "skipped"):
                shown = name in ("upper", "gap")
                module.log(f"bilevel/{name}", getattr(info, name), prog_bar=shown, sync_dist=True)
        return info

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.step is None:
            return
        # An evaluation after the run takes their place in the Trainer.
        self._loaders = trainer.train_dataloader
        self._step_monitoring()
        if trainer.is_last_batch and not trainer.fit_loop.restarting:
            self._step_schedulers("epoch", trainer.current_epoch + 1, monitoring=True)

    def evaluated(self, batch: Any, sample: bool, batches: int) -> tuple[BilevelProblem, str]:
        """Return f and g on the data of a certificate, and what these are.

        Args:
            batch: A batch; None is the sample or all data.
            sample: Whether to take the first few batches of the run.
            batches: The most batches of a level.
        """
        module = self._running().module
        if batch is not None:
            check_batch(type(module).__name__, batch)
            return problem_on(module, Data(batch, "the given batch"))
        asked = len(self._sample) if sample else 0, batches
        if self._known is None or self._known[0] != asked:
            first = self._sample[: asked[0]]
            data = kept(first) if first else gathered(module.trainer, batches, self._loaders)
            # The same problem again, so that a certificate of the same point is known.
            self._known = asked, *problem_on(module, data)
        return self._known[1:]

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the module into eval mode, with gradients and without autocast, and back."""
        module: LightningModule = self._running().module
        trained = [layer for layer in module.modules() if layer.training]
        module.eval()
        try:
            autocast = torch.autocast(module.device.type, enabled=False)
            with torch.inference_mode(False), torch.enable_grad(), autocast:
                yield
        finally:
            for layer in trained:
                layer.training = True

    @override
    def state_dict(self) -> dict[str, Any]:
        if self.step is None:
            return {}
        generators = _generators(self.step.module.device)
        return {**self.step.state(), "random": [g.get_rng_state() for g in generators]}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict

    def _running(self) -> Step:
        assert self.step is not None
        return self.step

    def _step_schedulers(self, interval: str, count: int, *, monitoring: bool = False) -> None:
        """Step the schedulers of an interval, as Lightning does under automatic optimisation.

        Args:
            interval: ``"step"`` or ``"epoch"``.
            count: The number of batches of the epoch, or of epochs, so far.
            monitoring: Whether those that monitor a metric, or the others.
        """
        module = self._running().module
        known = module.trainer.callback_metrics
        for config in module.trainer.lr_scheduler_configs:
            # That of Lightning's `ReduceLROnPlateau`.
            monitor = getattr(config.scheduler, "monitor", None)
            asked = config.interval == interval and (monitor is not None) is monitoring
            if not asked or count % config.frequency:
                continue
            if monitoring and monitor not in known:
                raise MisconfigurationException(
                    f"the scheduler monitors {monitor!r}, which is not logged yet; there are "
                    f"{', '.join(sorted(known))}."
                )
            module.lr_scheduler_step(config.scheduler, known[monitor] if monitoring else None)

    def _step_monitoring(self) -> None:
        """Step the schedulers that monitor a metric, after a validation that followed the step."""
        if self._moved:
            self._step_schedulers("step", self._moved, monitoring=True)
            self._moved = 0


def default_optimizers(declared: Declaration) -> list[dict[str, Any]]:
    """Return the optimisers and schedulers that were declared, for ``configure_optimizers``."""
    usual = partial(AdamW, lr=1e-2, weight_decay=0.0), partial(AdamW, lr=1e-4)
    made: list[dict[str, Any]] = []
    for level, given, other, schedule in zip(
        declared.levels, declared.optimizers, usual, declared.schedulers, strict=True
    ):
        optimizer = (given or other)(level.parameters)
        made.append({"optimizer": optimizer})
        if schedule is not None:
            scheduler = schedule(optimizer)
            interval = "epoch" if isinstance(scheduler, ReduceLROnPlateau) else "step"
            made[-1]["lr_scheduler"] = {"scheduler": scheduler, "interval": interval}
    return made


def _by_level(module: Any, declared: Declaration) -> tuple[list[Any], list[Any]]:
    """Return the module's optimisers of x and of y, in Lightning's wrapper.

    Whose an optimiser is, is known by its parameters. A lower level that is solved on each batch
    has none.
    """
    call, found = f"{type(module).__name__}.configure_optimizers", module.optimizers()
    optimizers = found if isinstance(found, list) else [found]
    solved = module.batch_gradients is not None
    owned = [
        {p for group in wrapped.param_groups for p in group["params"] if p.requires_grad}
        for wrapped in optimizers
    ]
    upper, lower = (
        [o for o, own in zip(optimizers, owned, strict=True) if own and own <= {*level.parameters}]
        for level in declared.levels
    )
    if len(upper) + len(lower) < len(optimizers) or not upper or not (lower or solved):
        names = ", ".join(type(wrapped.optimizer).__name__ for wrapped in optimizers)
        raise MisconfigurationException(
            f"`{call}` returned {names}: {len(upper)} with parameters of the "
            f"upper level alone, {len(lower)} of the lower. Each belongs to one level:\n"
            "    return AdamW(upper_parameters, lr=1e-2), AdamW(lower_parameters, lr=1e-4)"
        )
    trained = declared.upper.parameters if solved else declared.parameters
    if left := set(trained).difference(*owned):
        rank_zero_warn(f"{len(left)} parameters are in no optimiser of `{call}`: they stay.")
    return upper, lower


def _generators(device: torch.device) -> list[Any]:
    """Return what draws random numbers in a run on this device."""
    return [torch] if device.type == "cpu" else [torch, getattr(torch, device.type)]


def _restore_random_state(device: torch.device, states: list[Tensor]) -> None:
    for generator, state in zip(_generators(device), states, strict=False):
        generator.set_rng_state(state.cpu())
