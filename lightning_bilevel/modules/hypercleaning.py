"""Data hyper-cleaning: find mislabelled training samples, and train a classifier that is not fooled by them."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics.functional.classification import binary_auroc, multiclass_accuracy

from lightning_bilevel.core.chunks import as_chunks
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.sets import Box
from lightning_bilevel.plugin.mixin import BilevelModule
from lightning_bilevel.solvers.base import SolverCallable
from lightning_bilevel.solvers.ivsp.solver import IVSP

__all__ = ["HyperCleaning"]

# The paper's: |x_i| <= M and |y_j| <= B_y.
BOUND = 100.0


class HyperCleaning(BilevelModule):
    r"""One weight per training sample above, a classifier below.

    .. math::
        \min_{x, y} \frac{1}{|V|} \sum_{(u, q) \in V} \ell(h_y(u), q) \quad\text{s.t.}\quad
        y \in \arg\min_{y'} \frac{1}{n} \sum_{i=1}^n \sigma(x_i) \, \ell(h_{y'}(u_i), \tilde q_i)

    with clean validation data V, noisy training labels :math:`\tilde q_i`, the sigmoid :math:`\sigma`, cross-entropy
    :math:`\ell`, and all variables in [-100, 100]. Weights start at 1/2; those of samples whose labels contradict the
    validation data fall.

    Validation logs ``val_loss``, ``test_error`` and, where the data know which labels are wrong, ``auroc``: how well low weights
    tell them.

    Args:
        n_train: The number of training samples, n.
        inputs: The number of pixels of an image.
        hidden: The hidden units of the default classifier, a two-layer sigmoid network that starts at 0.01 times normal.
        classes: The number of classes.
        classifier: Another classifier, from images to one logit per class; it starts as it is.
        upper_unit: The unit that the solver measures x in. The gradient in x is about n times smaller than that in y, so
            with a unit of 1 the weights hardly move while the classifier is trained; with some hundreds they separate.
        envelope: The Moreau envelope (rho, sigma, delta) of the certificate, for solvers that have none of their own.
        solver: The solver and its arguments.
    """

    def __init__(
        self,
        n_train: int = 5000,
        inputs: int = 784,
        hidden: int = 32,
        classes: int = 10,
        classifier: nn.Module | None = None,
        upper_unit: float = 1.0,
        envelope: Envelope | None = None,
        solver: SolverCallable = IVSP,
    ) -> None:
        super().__init__()
        for name, value in (("n_train", n_train), ("inputs", inputs), ("hidden", hidden), ("classes", classes)):
            if value < (2 if name == "classes" else 1):
                raise ValueError(f"`HyperCleaning({name}={value})` must be at least {2 if name == 'classes' else 1}.")
        self.classes = classes
        self.logits = nn.Parameter(torch.zeros(n_train))
        if classifier is None:
            self.classifier: nn.Module = _sigmoid_network(inputs, hidden, classes)
        else:
            self.classifier = classifier
        # Corollary on sigmoid sample weights: ENNAMCQ holds if delta > (2 B_y (d_h + 1) + log m) / (1 + e^M).
        threshold = (2 * BOUND * (hidden + 1) + math.log(classes)) / (1 + math.exp(BOUND))

        def qualification(envelope: Envelope) -> str:
            if classifier is not None:
                return "not known for this classifier"
            holds, sign = ("holds", ">") if envelope.delta > threshold else ("not known", "<=")
            return f"{holds}: delta = {envelope.delta:g} {sign} {threshold:.2g} (sigmoid weights, two-layer sigmoid network)"

        self.declare(
            upper=self.logits,
            lower=self.classifier,
            upper_set=Box(-BOUND, BOUND),
            lower_set=Box(-BOUND, BOUND),
            upper_unit=upper_unit,
            solver=solver,
            envelope=envelope,
            qualification=qualification,
        )

    @property
    def weights(self) -> Tensor:
        """The weight of each training sample, between 0 and 1."""
        return self.logits.detach().sigmoid()

    def suspicious(self, count: int) -> Tensor:
        """Return the indices of the ``count`` training samples of lowest weight, the lowest first."""
        return torch.argsort(self.logits.detach())[:count]

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of the classes."""
        logits: Tensor = self.classifier(images)
        return logits

    def upper_loss(self, batch: Any) -> Tensor:
        """The mean loss on clean data."""
        images, labels = batch
        return cross_entropy(self.classifier(images), labels)

    def lower_outputs(self, batch: Any) -> Tensor:
        """The loss of each noisy sample, which is all of g that depends on y."""
        images, labels, _ = batch
        return cross_entropy(self.classifier(images), labels, reduction="none")

    def lower_loss(self, batch: Any, losses: Tensor) -> Tensor:
        """The mean weighted loss on noisy data; a batch carries the indices of its samples."""
        # index_select: the backward pass of plain indexing takes longer than the sigmoid and the mean together.
        return (self.logits.index_select(0, batch[2]).sigmoid() * losses).mean()

    def setup(self, stage: str) -> None:
        """Refuse data that do not fit the module before anything is trained."""
        data: Any = getattr(self.trainer, "datamodule", None)
        if getattr(data, "n_train", len(self.logits)) != len(self.logits):
            raise ValueError(
                f"`HyperCleaning(n_train={len(self.logits)})` was given {data.n_train} training samples: they must agree."
            )
        if getattr(data, "classes", self.classes) > self.classes:
            raise ValueError(f"`HyperCleaning(classes={self.classes})` was given labels of {data.classes} classes.")
        first = next((layer for layer in self.classifier.modules() if isinstance(layer, nn.Linear)), None)
        shape = getattr(data, "image_shape", None)
        if shape is not None and isinstance(self.classifier, _SigmoidNetwork) and first and math.prod(shape) != first.in_features:
            raise ValueError(
                f"`HyperCleaning(inputs={first.in_features})` was given images of {'x'.join(map(str, shape))} = "
                f"{math.prod(shape)} pixels: they must agree."
            )

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        images, labels = batch
        logits = self(images)
        if dataloader_idx == 0:
            self.log("val_loss", cross_entropy(logits, labels), prog_bar=True, add_dataloader_idx=False, batch_size=len(labels))
        else:
            self._log_error(logits, labels, add_dataloader_idx=False)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        self._log_error(self(images), labels)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the logits of the classes; labels, if there are any, are not looked at."""
        logits: Tensor = self(batch[0])
        return logits

    def _log_error(self, logits: Tensor, labels: Tensor, **options: Any) -> None:
        accuracy = multiclass_accuracy(logits, labels, num_classes=self.classes, average="micro")
        self.log("test_error", 1 - accuracy, prog_bar=True, batch_size=len(labels), **options)

    def on_validation_epoch_end(self) -> None:
        corrupted = getattr(getattr(self.trainer, "datamodule", None), "corrupted", None)
        if corrupted is not None:
            self.log("auroc", binary_auroc(-self.logits.detach().cpu(), corrupted.int().cpu()), prog_bar=True)

    def on_train_end(self) -> None:
        """Show the most suspicious samples in TensorBoard."""
        loggers = [logger for logger in self.trainer.loggers if isinstance(logger, TensorBoardLogger)]
        data: Any = getattr(self.trainer, "datamodule", None)
        if loggers and len(getattr(data, "image_shape", None) or ()) == 3:
            parts = as_chunks(data.lower).batches
            images, labels = (torch.cat([part[i] for part in parts]) for i in (0, 1))
            figure = self.suspicious_figure(images, labels)
            for logger in loggers:
                logger.experiment.add_figure("suspicious samples", figure, global_step=self.trainer.global_step)

    def suspicious_figure(self, images: Tensor, labels: Tensor, count: int = 32) -> Any:
        """Draw the training samples of lowest weight, each with its given and its predicted label.

        Args:
            images: All training images.
            labels: Their given labels.
            count: How many to draw.
        """
        from matplotlib.figure import Figure

        index = self.suspicious(min(count, len(images))).cpu()
        with torch.no_grad():
            predicted = self(images[index].to(self.logits)).argmax(1).cpu()
        figure = Figure(figsize=(8 * 1.1, math.ceil(len(index) / 8) * 1.35), layout="constrained")
        axes = list(figure.subplots(math.ceil(len(index) / 8), 8, squeeze=False).flat)
        for axis in axes:
            axis.set_axis_off()
        for axis, i, guess in zip(axes, index.tolist(), predicted.tolist(), strict=False):
            pixels = images[i].cpu().squeeze(0) if len(images[i]) == 1 else images[i].cpu().movedim(0, -1)
            axis.imshow(pixels.numpy(), cmap="gray_r")
            axis.set_title(f"{int(labels[i])} → {guess}", fontsize=9)
        figure.suptitle("lowest weights: given label → predicted label", fontsize=10)
        return figure


class _SigmoidNetwork(nn.Sequential):
    """The paper's classifier."""


def _sigmoid_network(inputs: int, hidden: int, classes: int) -> _SigmoidNetwork:
    network = _SigmoidNetwork(nn.Flatten(), nn.Linear(inputs, hidden), nn.Sigmoid(), nn.Linear(hidden, classes))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(0.01 * torch.randn_like(parameter))
    return network
