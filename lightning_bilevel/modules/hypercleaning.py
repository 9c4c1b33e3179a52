"""Data hyper-cleaning: find mislabelled training samples and train a classifier despite them."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_bilevel.core.chunks import as_chunks
from lightning_bilevel.core.qualification import (
    Qualification,
    Reweighted,
    ReweightedSigmoidNetwork,
)
from lightning_bilevel.core.sets import Box
from lightning_bilevel.logging import log_figure, run_folder
from lightning_bilevel.modules.figures import draw_samples
from lightning_bilevel.modules.networks import sigmoid_network
from lightning_bilevel.modules.reweighting import Reweighting
from lightning_bilevel.modules.weights import SampleWeights
from lightning_bilevel.solvers.base import SolverCallable
from lightning_bilevel.solvers.ivsp.solver import IVSP

__all__ = ["HyperCleaning"]

# The paper's bounds M and B_y: |x_i| <= M and |y_j| <= B_y.
BOUND = 100.0


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

    It is :class:`~lightning_bilevel.modules.reweighting.Reweighting` with
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
        qualification: Qualification
        if weighted_mean:
            qualification = "not known for the weighted mean"
        elif classifier is None:
            qualification = ReweightedSigmoidNetwork(hidden, classes)
        else:
            qualification = Reweighted()
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

    def suspicion(self, data: Any) -> Tensor:
        # Beyond a logit of 17 all weights are 1 in float32.
        return -self.logits

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
