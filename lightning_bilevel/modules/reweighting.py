"""Reweighting: a model below, weights for its training data above; hyper-cleaning is a case."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics.functional.classification import binary_auroc

from lightning_bilevel.core.chunks import as_chunks
from lightning_bilevel.core.qualification import (
    Qualification,
    Reweighted,
    ReweightedSigmoidNetwork,
)
from lightning_bilevel.core.sets import Box
from lightning_bilevel.logging import log_figure
from lightning_bilevel.module import BilevelModule
from lightning_bilevel.modules.networks import sigmoid_network
from lightning_bilevel.modules.weights import SampleWeights, SourceWeights
from lightning_bilevel.solvers.base import SolverCallable
from lightning_bilevel.solvers.ivsp.solver import IVSP
from lightning_bilevel.stochastic.penalties import StreamingIVSP
from lightning_bilevel.stochastic.step import Method

# The paper's bounds M and B_y: |x_i| <= M and |y_j| <= B_y.
BOUND = 100.0


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
    labels, source). :class:`~lightning_bilevel.data.samples.Numbered` adds both to any Dataset.
    For batches of another form, such as dicts, override :meth:`split` and :meth:`key`.

    The result is ``weights.values()``: write them to a file, and train again as you always do.
    Validation logs
    ``val_loss`` and, for classes, ``val_error``; a second validation loader is taken for test data.
    If the data know which labels are wrong (``datamodule.corrupted``), it logs two measures of how
    well low weights identify them: ``auroc``, and ``missed_errors``, the share of wrong labels that
    are not among as many samples of lowest weight as there are wrong labels. The weights of sources
    and classes are logged by their numbers, ``weight/0`` and so on.

    Args:
        model: The model, a LightningModule or any other; its parameters are the start. Only its
            ``forward`` is used, and frozen parameters stay as they are.
        weights: The weights. A module of your own may have the attributes ``entry`` (the place in a
            lower batch of what its ``forward`` takes; None for the losses; the last if it has
            none), ``feasible`` (its set) and ``optimizer`` (what makes its torch optimiser).
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
        # Where a lower batch has what the weights are found by; None where they take the losses.
        self.entry: Any = getattr(weights, "entry", -1)
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
                f"`{type(self).__name__}` was given a {type(batch).__name__} as a batch, not "
                "(inputs, labels, ...): override `split(batch)` and `key(batch)`."
            )
        return batch[0], batch[1]

    def key(self, batch: Any) -> Any:
        """Return what the weights of a lower batch are found by: its entry ``weights.entry``."""
        # The labels are no key, unless the weights ask for them.
        if (self.entry not in (0, 1) and len(batch) < 3) or self.entry >= len(batch):
            raise ValueError(
                f"`{type(self).__name__}` was given a lower batch of {len(batch)} entries: its "
                f"{type(self.weights).__name__} needs (inputs, labels, number or source), as "
                "`Numbered(dataset)` makes them."
            )
        return batch[self.entry]

    def upper_loss(self, batch: Any) -> Tensor:
        """The mean loss on trusted data."""
        return self._judged(batch)[1].mean()

    def lower_outputs(self, batch: Any) -> Tensor:
        """The loss of each training sample: g depends on y only through them."""
        return self._judged(batch)[1]

    def lower_loss(self, batch: Any, losses: Tensor) -> Tensor:
        """The weighted mean of the losses."""
        weights: Tensor = self.weights(losses.detach() if self.entry is None else self.key(batch))
        return weights @ losses.to(weights) / weights.sum()

    def suspicion(self, data: Any) -> Tensor | None:
        """Return a number per training sample, larger where a wrong label is more likely."""
        if self.entry is None:
            return None
        if isinstance(self.weights, SampleWeights):
            # Beyond a logit of 17 all weights are 1 in float32.
            return -self.weights.logits
        return -torch.cat([self.weights(self.key(part)) for part in as_chunks(data.lower).batches])

    def setup(self, stage: str) -> None:
        """Before training, refuse data that do not fit the weights."""
        if isinstance(self.weights, SampleWeights):
            n = len(self.weights.logits)
            samples = getattr(getattr(self.trainer, "datamodule", None), "n_train", n)
            if samples != n:
                raise ValueError(
                    f"`{type(self).__name__}` has the weights of {n} samples and was given "
                    f"{samples} training samples: they must agree."
                )

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._log_quality("test" if dataloader_idx else "val", batch, add_dataloader_idx=False)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._log_quality("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the model's outputs; labels are ignored."""
        return self(self.split(batch)[0])

    @torch.no_grad()
    def on_validation_epoch_end(self) -> None:
        if isinstance(self.weights, SourceWeights):
            weights = {f"weight/{i}": weight for i, weight in enumerate(self.weights.values())}
            self.log_dict(weights, sync_dist=True)
        data: Any = getattr(self.trainer, "datamodule", None)
        corrupted = getattr(data, "corrupted", None)
        # Without a wrong or without a right label there is nothing to tell apart.
        if corrupted is None or not 0 < int(corrupted.sum()) < len(corrupted):
            return
        suspicion = self.suspicion(data)
        if suspicion is not None:
            for name, value in detection(suspicion.cpu(), corrupted.cpu()).items():
                self._log(name, torch.tensor(value))

    def _judged(self, batch: Any) -> tuple[Any, Tensor]:
        """Return the outputs of the model and the loss of each sample."""
        inputs, labels = self.split(batch)
        outputs = self.model(inputs)
        losses = self.loss(outputs, labels)
        if losses.ndim != 1 or (isinstance(labels, Tensor) and len(losses) != len(labels)):
            raise ValueError(
                f"`Reweighting(loss=...)` returned a tensor of shape {tuple(losses.shape)}: it "
                'must return one loss per sample, as `CrossEntropyLoss(reduction="none")` does. '
                "Of a loss per token or pixel take the mean over each sample."
            )
        return outputs, losses

    def _log_quality(self, name: str, batch: Any, **options: Any) -> None:
        outputs, losses = self._judged(batch)
        labels = self.split(batch)[1]
        self._log(f"{name}_loss", losses.mean(), len(losses), **options)
        classes = isinstance(labels, Tensor) and labels.ndim == 1 and not labels.is_floating_point()
        if classes and outputs.ndim == 2:
            wrong = (outputs.argmax(1) != labels).float().mean()
            self._log(f"{name}_error", wrong, len(losses), **options)

    def _log(self, name: str, value: Tensor, batch_size: int | None = None, **options: Any) -> None:
        # Processes have the same batch or parts of it: the mean over them is right for both.
        options |= {"prog_bar": True, "sync_dist": True, "batch_size": batch_size}
        self.log(name, value.to(self.device), **options)


class HyperCleaning(Reweighting):
    r"""One weight per training sample above, a classifier below.

    .. math::
        \min_{x, y} \frac{1}{|V|} \sum_{(u, q) \in V} \ell(h_y(u), q) \quad\text{s.t.}\quad
        y \in \arg\min_{y'} \frac{1}{n} \sum_{i=1}^n \sigma(x_i) \, \ell(h_{y'}(u_i), \tilde q_i)

    with clean validation data V, noisy training labels :math:`\tilde q_i`, the sigmoid
    :math:`\sigma`, cross-entropy :math:`\ell`, and all variables in [-100, 100]. Weights start at
    1/2; the weight of a sample falls if its label contradicts the validation data.

    With ``weighted_mean`` the lower level is :math:`\sum_i w_i \ell_i / \sum_i w_i` with
    :math:`w_i = \sigma(x_i)`, for mini-batches and few clean samples. A common factor of all
    weights changes no minimiser of either form, but it changes the value of the mean above, which
    all weights together then bring down. Of a batch (or a chunk) it is the mean of that batch, so
    over several it is not quite the one of all samples.

    It is :class:`Reweighting` with
    :class:`~lightning_bilevel.modules.weights.SampleWeights`, on all data by IVSP if nothing else
    is said, and shows the most suspicious samples in the loggers.

    Args:
        n_train: The number of training samples, n.
        inputs: The number of pixels of an image.
        hidden: The hidden units of the default classifier, a two-layer sigmoid network whose
            parameters start at 0.01 times a standard normal.
        classes: The number of classes.
        classifier: Another classifier, from images to one logit per class; its parameters are the
            start.
        upper_unit: The unit of x for the solver. The gradient in x is about n times smaller than
            the gradient in y. With a unit of 1 the weights hardly move while the classifier is
            trained; with a unit of some hundreds they separate.
        weighted_mean: Whether to divide by the sum of the weights, not by n.
        upper_bound: The bound of x. At 8 a weight is 0 or 1 to three digits; mini-batches then need
            not move it back from far away.
        options: What else ``Reweighting`` takes: ``solver`` for an exact run, IVSP by default; or
            ``method``, ``upper_optimizer``, ``lower_optimizer`` and so on for mini-batches.
    """

    default_solver: ClassVar[SolverCallable | None] = IVSP

    def __init__(
        self,
        n_train: int = 5000,
        inputs: int = 784,
        hidden: int = 32,
        classes: int = 10,
        classifier: nn.Module | None = None,
        upper_unit: float = 1.0,
        weighted_mean: bool = False,
        upper_bound: float = BOUND,
        **options: Any,
    ) -> None:
        qualification: Qualification = Reweighted()
        if weighted_mean:
            qualification = "not known for the weighted mean"
        elif classifier is None:
            qualification = ReweightedSigmoidNetwork(hidden, classes)
        super().__init__(
            sigmoid_network(inputs, hidden, classes) if classifier is None else classifier,
            SampleWeights(n_train, upper_bound),
            loss=None,
            lower_set=Box(-BOUND, BOUND),
            upper_unit=upper_unit,
            qualification=qualification,
            **options,
        )
        self.weighted_mean = weighted_mean

    @property
    def logits(self) -> nn.Parameter:
        """The upper variable x, one logit per training sample."""
        logits: nn.Parameter = self.weights.logits  # type: ignore[assignment]
        return logits

    @property
    def classifier(self) -> nn.Module:
        """The lower level."""
        return self.model

    def suspicious(self, count: int) -> Tensor:
        """Return the indices of the ``count`` training samples of lowest weight, lowest first."""
        return torch.argsort(self.logits.detach())[:count]

    def upper_loss(self, batch: Any) -> Tensor:
        """The mean loss on clean data, without the losses of samples in between."""
        images, labels = batch
        return cross_entropy(self.model(images), labels)

    def lower_loss(self, batch: Any, losses: Tensor) -> Tensor:
        """The mean weighted loss on noisy data, or the weighted mean."""
        if self.weighted_mean:
            return super().lower_loss(batch, losses)
        weights: Tensor = self.weights(batch[2])
        return (weights * losses).mean()

    def on_train_end(self) -> None:
        """Show the most suspicious samples in the loggers."""
        data: Any = getattr(self.trainer, "datamodule", None)
        if len(getattr(data, "image_shape", ())) == 3:
            draw = partial(self.suspicious_figure, data.lower)
            log_figure(self.trainer, "suspicious samples", draw, self.trainer.global_step)

    @torch.no_grad()
    def suspicious_figure(self, lower: Any, count: int = 32) -> Any:
        """Draw the training samples of lowest weight, with their given and predicted labels.

        Args:
            lower: The batch of the lower level, or its chunks.
            count: The number of samples to draw.
        """
        from matplotlib.figure import Figure

        images, labels, _ = map(torch.cat, zip(*as_chunks(lower).batches, strict=True))
        index = self.suspicious(count).to(labels.device)
        images, labels = images[index], labels[index]
        predicted = self(images.to(self.logits)).argmax(1)
        figure = Figure(figsize=(8.8, 0.7 + 1.3 * math.ceil(len(index) / 8)))
        figure.suptitle("lowest weights: given label → predicted label", fontsize=10)
        axes = figure.subplots(math.ceil(len(index) / 8), 8, squeeze=False).ravel()
        for axis in axes:
            axis.set_axis_off()
        shown = (images - images.min()) / (images.max() - images.min())
        for axis, image, *named in zip(axes, shown.cpu(), labels, predicted, strict=False):
            axis.imshow(image.movedim(0, -1).numpy(), cmap="gray_r")
            axis.set_title("{} → {}".format(*named), fontsize=9)
        return figure


def missed_errors(suspicion: Tensor, corrupted: Tensor) -> float:
    r"""Return the share of wrong labels that are missed at a budget equal to the noise rate.

    With n_wrong wrong labels, the n_wrong most suspicious samples S are looked at:

    .. math:: 1 - \frac{|S \cap \text{wrong}|}{n_\text{wrong}}

    Where samples at the border of S are equally suspicious, it is the expectation over a random
    choice among them. A score that knows nothing misses the share of right labels.

    Args:
        suspicion: One number per sample, larger where a wrong label is more likely.
        corrupted: The mask of the samples whose label is wrong.

    Example:
        >>> corrupted = torch.tensor([True, True, False, False])
        >>> missed_errors(torch.tensor([0.9, 0.2, 0.3, 0.1]), corrupted)
        0.5
    """
    budget = int(corrupted.sum())
    border = suspicion.topk(budget).values[-1]
    above, at_border = suspicion > border, suspicion == border
    places = budget - int(above.sum())
    found = int((above & corrupted).sum())
    found_at_border = places * int((at_border & corrupted).sum()) / int(at_border.sum())
    return 1 - (found + found_at_border) / budget


def detection(suspicion: Tensor, corrupted: Tensor) -> dict[str, float]:
    """Return both measures of a score of suspicion: ``auroc`` and ``missed_errors``.

    AUROC is the probability that a wrong label is more suspicious than a right one.

    Args:
        suspicion: One number per sample, larger where a wrong label is more likely.
        corrupted: The mask of the samples whose label is wrong.
    """
    # torchmetrics puts scores outside [0, 1] through a sigmoid, which makes large ones equal. Ranks
    # are equal only where the score is.
    values, ranks = torch.unique(suspicion, return_inverse=True)
    score = ranks.double() / max(len(values) - 1, 1)
    return {
        "auroc": float(binary_auroc(score, corrupted.int())),
        "missed_errors": missed_errors(suspicion, corrupted),
    }
