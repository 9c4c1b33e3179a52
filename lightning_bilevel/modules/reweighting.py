"""Reweighting: any model below, weights for its training data above."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_bilevel.core.chunks import as_chunks
from lightning_bilevel.logging import log_figure
from lightning_bilevel.module import BilevelModule
from lightning_bilevel.modules.detection import detection
from lightning_bilevel.modules.weights import SampleWeights
from lightning_bilevel.solvers.base import SolverCallable
from lightning_bilevel.stochastic.penalties import StreamingIVSP
from lightning_bilevel.stochastic.step import Method

__all__ = ["Reweighting"]

_LAST = -1


class Reweighting(BilevelModule):
    r"""Decide which data to learn from: weights above, a model below, trusted data as the judge.

    .. math::
        \min_{x, y} \frac{1}{|V|} \sum_{(u, q) \in V} \ell(h_y(u), q) \quad\text{s.t.}\quad
        y \in \arg\min_{y'} \frac{\sum_i w_i(x) \, \ell(h_{y'}(u_i), \tilde q_i)}{\sum_i w_i(x)}

    with trusted samples V, training samples :math:`(u_i, \tilde q_i)`, and the weights w of one of
    :class:`~lightning_bilevel.modules.weights.SampleWeights`,
    :class:`~lightning_bilevel.modules.weights.SourceWeights`,
    :class:`~lightning_bilevel.modules.weights.ClassWeights`,
    :class:`~lightning_bilevel.modules.weights.WeightNet`, or of any module of your own. On
    mini-batches the fraction is that of the batch.

    An upper batch is (inputs, labels). A lower batch begins in the same way and carries what the
    weights are found by: (inputs, labels, number), (inputs, labels, number, source) or (inputs,
    labels, source). :class:`~lightning_bilevel.data.numbered.Numbered` adds both to any Dataset.
    For batches of another form, such as dicts, override :meth:`split` and :meth:`key`.

    The result is the weights: export them, and train again as you always do. Validation logs
    ``val_loss`` and, for classes, ``val_error``; a second validation loader is taken for test data.
    If the data know which labels are wrong (``datamodule.corrupted``), it logs two measures of how
    well low weights identify them: ``auroc``, and ``missed_errors``, the share of wrong labels that
    are not among as many samples of lowest weight as there are wrong labels. The loggers get a
    picture of the weights at the end.

    Args:
        model: The model, a LightningModule or any other; its parameters are the start. Only its
            ``forward`` is used, and frozen parameters stay as they are.
        weights: The weights. A module of your own may have the attributes ``entry`` (the place in a
            lower batch of what its ``forward`` takes; None for the losses; the last if it has
            none), ``feasible`` (its set), ``optimizer`` (what makes its torch optimiser) and
            ``figure()``.
        loss: The loss of each sample, from the model's outputs and the labels; None is the
            cross-entropy.
        method: The method on mini-batches; None is
            :class:`~lightning_bilevel.stochastic.penalties.StreamingIVSP`.
        upper_optimizer: Makes the torch optimiser of the weights; None is ``weights.optimizer``.
        lower_optimizer: That of the model; None is AdamW with a rate of 1e-4. This rate is the
            setting that decides: at the full rate a model learns a small trusted set by heart, and
            then nothing tells the samples apart. Start with a tenth of the rate that you would
            train with, and choose it by trusted samples that are held out.
        solver: The solver of an exact run on all data, in place of a method and its optimisers.
        options: What else :meth:`~lightning_bilevel.module.BilevelMixin.declare` takes:
            ``upper_scheduler``, ``lower_scheduler``, ``gradient_clip_val``, ``accumulate``,
            ``envelope``.
    """

    # The solver where neither a solver nor a method is given; None runs on mini-batches.
    default_solver: ClassVar[SolverCallable | None] = None

    def __init__(
        self,
        model: nn.Module,
        weights: nn.Module,
        loss: Callable[[Any, Any], Tensor] | None = None,
        method: Method | None = None,
        upper_optimizer: OptimizerCallable | None = None,
        lower_optimizer: OptimizerCallable | None = None,
        solver: SolverCallable | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.model = model
        self.weights = weights
        self.loss = partial(cross_entropy, reduction="none") if loss is None else loss
        given = method is not None or upper_optimizer is not None or lower_optimizer is not None
        if solver is None and (given or type(self).default_solver is None):
            method = method or StreamingIVSP()
            upper_optimizer = upper_optimizer or getattr(weights, "optimizer", None)
        self.declare(
            upper=weights,
            lower=model,
            upper_set=getattr(weights, "feasible", None),
            solver=solver,
            method=method,
            upper_optimizer=upper_optimizer,
            lower_optimizer=lower_optimizer,
            **options,
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model does."""
        return self.model(*args, **kwargs)

    def split(self, batch: Any) -> tuple[Any, Any]:
        """Return the inputs and the labels of a batch of either level: its first two entries."""
        if not isinstance(batch, (tuple, list)):
            raise TypeError(
                f"`{type(self).__name__}` was given a {type(batch).__name__} as a batch: it must "
                "be (inputs, labels, ...). For another form, override `split(batch)` and "
                "`key(batch)`."
            )
        return batch[0], batch[1]

    def key(self, batch: Any) -> Any:
        """Return what the weights of a lower batch are found by: its entry ``weights.entry``."""
        entry = getattr(self.weights, "entry", _LAST)
        # The labels are no key, unless the weights ask for them.
        if (entry not in (0, 1) and len(batch) < 3) or entry >= len(batch):
            raise ValueError(
                f"`{type(self).__name__}` was given a lower batch of {len(batch)} entries: its "
                f"{type(self.weights).__name__} needs (inputs, labels, number or source), as "
                "`Numbered(dataset)` makes them."
            )
        return batch[entry]

    def upper_loss(self, batch: Any) -> Tensor:
        """The mean loss on trusted data."""
        return self._sample_losses(batch).mean()

    def lower_outputs(self, batch: Any) -> Tensor:
        """The loss of each training sample: g depends on y only through them."""
        return self._sample_losses(batch)

    def lower_loss(self, batch: Any, losses: Tensor) -> Tensor:
        """The weighted mean of the losses."""
        weights: Tensor = self.weights(losses.detach() if self._by_losses else self.key(batch))
        return weights @ losses.to(weights) / weights.sum()

    def suspicion(self, data: Any) -> Tensor | None:
        """Return a number per training sample, larger where a wrong label is more likely."""
        if self._by_losses:
            return None
        return -torch.cat([self.weights(self.key(part)) for part in as_chunks(data.lower).batches])

    def setup(self, stage: str) -> None:
        """Before training, refuse data that do not fit the weights."""
        samples = getattr(getattr(self.trainer, "datamodule", None), "n_train", None)
        if isinstance(self.weights, SampleWeights) and samples is not None:
            n = len(self.weights.logits)
            if samples != n:
                raise ValueError(
                    f"`{type(self).__name__}` has the weights of {n} samples and was given "
                    f"{samples} training samples: they must agree."
                )

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        name = "val" if dataloader_idx == 0 else "test"
        self._log_quality(name, batch, add_dataloader_idx=False)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._log_quality("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the model's outputs; labels are ignored."""
        return self(self.split(batch)[0])

    @torch.no_grad()
    def on_validation_epoch_end(self) -> None:
        data: Any = getattr(self.trainer, "datamodule", None)
        corrupted = getattr(data, "corrupted", None)
        # Without a wrong or without a right label there is nothing to tell apart.
        if corrupted is None or not 0 < int(corrupted.sum()) < len(corrupted):
            return
        suspicion = self.suspicion(data)
        if suspicion is not None:
            for name, value in detection(suspicion.cpu(), corrupted.cpu()).items():
                self._log(name, torch.tensor(value))

    def on_train_end(self) -> None:
        """Show the weights in the loggers."""
        draw = getattr(self.weights, "figure", None)
        if draw is not None:
            log_figure(self.trainer, "weights", draw, self.trainer.global_step)

    @property
    def _by_losses(self) -> bool:
        return getattr(self.weights, "entry", _LAST) is None

    def _sample_losses(self, batch: Any) -> Tensor:
        inputs, labels = self.split(batch)
        return self._checked(self.loss(self.model(inputs), labels), labels)

    def _checked(self, losses: Tensor, labels: Any) -> Tensor:
        if losses.ndim != 1 or (isinstance(labels, Tensor) and len(losses) != len(labels)):
            raise ValueError(
                f"`Reweighting(loss=...)` returned a tensor of shape {tuple(losses.shape)}: it "
                'must return one loss per sample, as `CrossEntropyLoss(reduction="none")` does. '
                "Of a loss per token or pixel take the mean over each sample."
            )
        return losses

    def _log_quality(self, name: str, batch: Any, **options: Any) -> None:
        inputs, labels = self.split(batch)
        outputs = self(inputs)
        losses = self._checked(self.loss(outputs, labels), labels)
        self._log(f"{name}_loss", losses.mean(), len(losses), **options)
        if _are_classes(outputs, labels):
            wrong = (outputs.argmax(1) != labels).float().mean()
            self._log(f"{name}_error", wrong, len(losses), **options)

    def _log(self, name: str, value: Tensor, batch_size: int | None = None, **options: Any) -> None:
        # Processes have the same batch or parts of it: the mean over them is right for both.
        self.log(
            name,
            value.to(self.device),
            prog_bar=True,
            sync_dist=True,
            batch_size=batch_size,
            **options,
        )


def _are_classes(outputs: Any, labels: Any) -> bool:
    return (
        isinstance(outputs, Tensor)
        and isinstance(labels, Tensor)
        and outputs.ndim == 2
        and labels.ndim == 1
        and not labels.is_floating_point()
    )
