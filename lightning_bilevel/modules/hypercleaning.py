"""Data hyper-cleaning: find mislabelled training samples and train a classifier despite them."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics.functional.classification import multiclass_accuracy

from lightning_bilevel.core.chunks import as_chunks
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.qualification import (
    Qualification,
    Reweighted,
    ReweightedSigmoidNetwork,
)
from lightning_bilevel.core.sets import Box
from lightning_bilevel.modules.detection import detection
from lightning_bilevel.modules.figures import draw_samples
from lightning_bilevel.modules.networks import sigmoid_network
from lightning_bilevel.plugin.loggers import log_figure, run_folder
from lightning_bilevel.plugin.mixin import BilevelModule
from lightning_bilevel.plugin.schedulers import SchedulerCallable
from lightning_bilevel.solvers.base import SolverCallable
from lightning_bilevel.solvers.ivsp.solver import IVSP

__all__ = ["HyperCleaning"]

# The paper's bounds M and B_y: |x_i| <= M and |y_j| <= B_y.
BOUND = 100.0


class HyperCleaning(BilevelModule):
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

    Validation logs ``val_loss``, ``test_error`` and, if the data know which labels are wrong,
    two measures of how well low weights identify wrong labels: ``auroc``, and ``missed_errors``,
    the share of wrong labels that are not among as many samples of lowest weight as there are wrong
    labels.

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
        envelope: The Moreau envelope (rho, sigma, delta) of the certificate, for solvers that have
            none of their own.
        solver: The solver and its arguments.
        scheduler: Makes a torch scheduler from the solver, which then steps at every iteration; for
            solvers with torch optimisers.
    """

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
        envelope: Envelope | None = None,
        solver: SolverCallable = IVSP,
        scheduler: SchedulerCallable | None = None,
    ) -> None:
        super().__init__()
        self.classes = classes
        self.weighted_mean = weighted_mean
        self.logits = nn.Parameter(torch.zeros(n_train))
        self.classifier = (
            sigmoid_network(inputs, hidden, classes) if classifier is None else classifier
        )
        qualification: Qualification
        if weighted_mean:
            qualification = "not known for the weighted mean"
        elif classifier is None:
            qualification = ReweightedSigmoidNetwork(hidden, classes)
        else:
            qualification = Reweighted()
        self.declare(
            upper=self.logits,
            lower=self.classifier,
            upper_set=Box(-upper_bound, upper_bound),
            lower_set=Box(-BOUND, BOUND),
            upper_unit=upper_unit,
            solver=solver,
            envelope=envelope,
            qualification=qualification,
            scheduler=None if scheduler is None else {"scheduler": scheduler, "interval": "step"},
        )

    @property
    def weights(self) -> Tensor:
        """The weight of each training sample, between 0 and 1."""
        return self.logits.detach().sigmoid()

    def suspicious(self, count: int) -> Tensor:
        """Return the indices of the ``count`` training samples of lowest weight, lowest first."""
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
        """The loss of each noisy sample: g depends on y only through them."""
        images, labels = batch[:2]
        return cross_entropy(self.classifier(images), labels, reduction="none")

    def lower_loss(self, batch: Any, losses: Tensor) -> Tensor:
        """The mean weighted loss on noisy data; a batch carries the indices of its samples."""
        # The backward pass of plain indexing takes longer than the sigmoid and the mean together,
        # so we use index_select.
        weights = self.logits.index_select(0, batch[2]).sigmoid()
        if self.weighted_mean:
            return weights @ losses / weights.sum()
        return (weights * losses).mean()

    def upper_indices(self, batch: Any) -> Tensor:
        """The weights that a batch speaks of: those of its samples."""
        index: Tensor = batch[2]
        return index

    def setup(self, stage: str) -> None:
        """Before training, refuse data that do not fit the module."""
        data: Any = getattr(self.trainer, "datamodule", None)
        if getattr(data, "n_train", len(self.logits)) != len(self.logits):
            raise ValueError(
                f"`HyperCleaning(n_train={len(self.logits)})` was given {data.n_train} training "
                "samples: they must agree."
            )

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        images, labels = batch
        logits = self(images)
        if dataloader_idx == 0:
            self._log(
                "val_loss", cross_entropy(logits, labels), len(labels), add_dataloader_idx=False
            )
        else:
            self._log_error(logits, labels, add_dataloader_idx=False)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        self._log_error(self(images), labels)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the logits of the classes; labels are ignored."""
        logits: Tensor = self(batch[0])
        return logits

    def _log_error(self, logits: Tensor, labels: Tensor, **options: Any) -> None:
        accuracy = multiclass_accuracy(logits, labels, num_classes=self.classes, average="micro")
        self._log("test_error", 1 - accuracy, len(labels), **options)

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

    def on_validation_epoch_end(self) -> None:
        corrupted = getattr(getattr(self.trainer, "datamodule", None), "corrupted", None)
        # Without a wrong or without a right label there is nothing to tell apart.
        if corrupted is not None and 0 < int(corrupted.sum()) < len(corrupted):
            for name, value in detection(-self.logits.detach().cpu(), corrupted.cpu()).items():
                self._log(name, torch.tensor(value))

    def on_train_end(self) -> None:
        """Show the most suspicious samples in the loggers, and in the folder of the run."""
        data: Any = getattr(self.trainer, "datamodule", None)
        if len(getattr(data, "image_shape", None) or ()) == 3:
            folder = run_folder(self.trainer)

            def draw() -> Any:
                parts = as_chunks(data.lower).batches
                images, labels = (torch.cat([part[i] for part in parts]) for i in (0, 1))
                figure = self.suspicious_figure(images, labels)
                if folder is not None:
                    folder.mkdir(parents=True, exist_ok=True)
                    figure.savefig(folder / "suspicious.png", dpi=120)
                    rank_zero_info(f"The samples of lowest weight: {folder / 'suspicious.png'}")
                return figure

            log_figure(self.trainer, "suspicious samples", draw, self.trainer.global_step)

    def suspicious_figure(self, images: Tensor, labels: Tensor, count: int = 32) -> Any:
        """Draw the training samples of lowest weight, with their given and predicted labels.

        Args:
            images: All training images.
            labels: Their labels in the data.
            count: The number of samples to draw.
        """
        index = self.suspicious(min(count, len(images))).cpu()
        with torch.no_grad():
            predicted = self(images[index].to(self.logits)).argmax(1).tolist()
        title = "lowest weights: given label → predicted label"
        return draw_samples(images[index], labels[index].tolist(), predicted, title)
