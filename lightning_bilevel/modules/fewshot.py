"""Few-shot learning: learn features on which linear heads generalise from a few examples."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn.functional import cross_entropy

from lightning_bilevel.callbacks.tensorboard import show_figure
from lightning_bilevel.core.chunks import Chunks, as_chunks
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.qualification import ConstantAffineSegments
from lightning_bilevel.core.sets import Box
from lightning_bilevel.data.episodes import Episodes
from lightning_bilevel.modules.figures import draw_episode
from lightning_bilevel.modules.networks import Conv4, TaskHeads, adapt
from lightning_bilevel.plugin.mixin import BilevelModule
from lightning_bilevel.solvers.base import SolverCallable
from lightning_bilevel.solvers.ivsp.solver import IVSP

__all__ = ["FewShot"]


class FewShot(BilevelModule):
    r"""A shared feature extractor above, a linear head per training task below.

    .. math::
        \min_{x, y} \frac{1}{T} \sum_{i=1}^T \mathcal L_{Q_i}(x, y_i) \quad\text{s.t.}\quad
        y \in \arg\min_{y'} \frac{1}{T} \sum_{i=1}^T \mathcal L_{S_i}(x, y'_i)

    with the mean cross-entropy :math:`\mathcal L` on the query set :math:`Q_i` or the support set
    :math:`S_i` of task i, x in [-5, 5] and y in [-20, 20]. The lower level is convex in y
    and constant along its affine segments, so the constraint qualification holds for each delta.
    The ReLU and the max-pooling of the encoder are not differentiable, so the convergence theorem
    does not cover it in the letter.

    Validation fits new heads to unseen classes by 10 gradient steps of 0.1, and logs their loss and
    error on the queries: ``val_loss``, ``val_error``, ``test_loss`` and ``test_error``.

    Args:
        tasks: The number of training episodes, T.
        ways: Classes of an episode.
        channels: Channels of each convolution.
        image_size: Height and width of an image.
        chunk_images: The number of images that are evaluated at once: enough to keep the cores
            busy, few enough that the tensors saved for the backward pass fit into the caches. The
            chunk size does not change the loss or its gradient.
        lower_unit: The unit of y for the solver. Losses are means over tasks, so the gradient in y
            shrinks as 1/T: solver settings for 128 tasks need a unit of about sqrt(T/128).
        envelope: The Moreau envelope (rho, sigma, delta) of the certificate, for solvers that have
            none of their own.
        solver: The solver and its arguments.
    """

    def __init__(
        self,
        tasks: int = 128,
        ways: int = 10,
        channels: int = 64,
        image_size: int = 28,
        chunk_images: int = 50,
        lower_unit: float = 1.0,
        envelope: Envelope | None = None,
        solver: SolverCallable = IVSP,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("tasks", tasks, 1),
            ("ways", ways, 2),
            ("channels", channels, 1),
        ):
            if value < least:
                raise ValueError(f"`FewShot({name}={value})` must be at least {least}.")
        if image_size < 16:
            raise ValueError(
                f"`FewShot(image_size={image_size})` must be at least 16: four times halved, "
                "nothing is left of it."
            )
        if chunk_images < 1:
            raise ValueError(f"`FewShot(chunk_images={chunk_images})` must be at least 1.")
        self.tasks = tasks
        self.ways = ways
        self.image_size = image_size
        self.chunk_images = chunk_images
        self.encoder = Conv4(channels, image_size)
        self.heads = TaskHeads(tasks, ways, self.encoder.features)
        self.declare(
            upper=self.encoder,
            lower=self.heads,
            upper_set=Box(-5.0, 5.0),
            lower_set=Box(-20.0, 20.0),
            lower_unit=lower_unit,
            solver=solver,
            envelope=envelope,
            qualification=ConstantAffineSegments("linear softmax heads"),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the features (E, N, d) of images (E, N, C, H, W), a few tasks at a time."""
        return torch.cat(
            [self.encoder(part) for part in torch.split(images, self._tasks_at_once(images))]
        )

    def upper_loss(self, batch: Any) -> Tensor:
        """The mean loss on the query sets."""
        images, labels, index = batch
        return _loss(self.heads(self.encoder(images), index), labels)

    def lower_features(self, batch: Any) -> Tensor:
        """The features of the support sets: g depends on x only through them."""
        features: Tensor = self(batch[0])
        return features

    def lower_loss(self, batch: Any, features: Tensor) -> Tensor:
        """The mean loss on the support sets, all heads in one product."""
        _, labels, index = batch
        return _loss(self.heads(features, index), labels)

    def bilevel_problem(self, batch: dict[str, Any]) -> BilevelProblem:
        """Return f and g as functions of flat x and y; f is evaluated in chunks."""
        if isinstance(batch, dict) and "upper" in batch:
            batch = {**batch, "upper": self._in_chunks(batch["upper"])}
        return super().bilevel_problem(batch)

    def _in_chunks(self, batch: Any) -> Chunks:
        chunks = as_chunks(batch)
        parts = []
        weights = []
        for whole, share in zip(chunks.batches, chunks.shares, strict=True):
            size = self._tasks_at_once(whole[0])
            for part in zip(*(torch.split(tensor, size) for tensor in whole), strict=True):
                parts.append(part)
                weights.append(share * len(part[0]) / len(whole[0]))
        return Chunks(parts, weights)

    def _tasks_at_once(self, images: Tensor) -> int:
        return max(1, self.chunk_images // int(images.shape[1]))

    def setup(self, stage: str) -> None:
        """Before training, refuse data that do not fit the module."""
        data: Any = getattr(self.trainer, "datamodule", None)
        for argument, data_attribute, what in (
            ("tasks", "n_train", "training episodes"),
            ("ways", "ways", "classes in an episode"),
        ):
            expected = getattr(self, argument)
            actual = getattr(data, data_attribute, expected)
            if actual != expected:
                raise MisconfigurationException(
                    f"`FewShot({argument}={expected})` was given {actual} {what}: they must agree."
                )
        shape = getattr(data, "image_shape", None)
        if shape is not None and tuple(shape) != (1, self.image_size, self.image_size):
            raise MisconfigurationException(
                f"`FewShot(image_size={self.image_size})` was given images of "
                f"{'x'.join(map(str, shape))}: they must agree."
            )

    def predict(self, episodes: Episodes) -> Tensor:
        """Fit new heads to the support sets and return the logits (E, N, ways) of the queries."""
        weight, bias = adapt(self(episodes.support), episodes.support_labels, self.ways)
        return torch.baddbmm(bias.unsqueeze(1), self(episodes.query), weight.transpose(1, 2))

    def validation_step(self, batch: Episodes, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._log_queries("test" if dataloader_idx else "val", batch, add_dataloader_idx=False)

    def test_step(self, batch: Episodes, batch_idx: int) -> None:
        self._log_queries("test", batch)

    def predict_step(self, batch: Episodes, batch_idx: int) -> Tensor:
        return self.predict(batch)

    def _log_queries(self, name: str, episodes: Episodes, **options: Any) -> None:
        logits = self.predict(episodes)
        wrong = (logits.argmax(-1) != episodes.query_labels).float().mean()
        # Processes have the same batch or parts of it: the mean over them is right for both.
        options |= {"prog_bar": True, "sync_dist": True, "batch_size": len(logits)}
        self.log(f"{name}_loss", _loss(logits, episodes.query_labels), **options)
        self.log(f"{name}_error", wrong, **options)

    def on_train_end(self) -> None:
        """Show some validation episodes in TensorBoard."""
        episodes = getattr(getattr(self.trainer, "datamodule", None), "validation", None)
        if isinstance(episodes, Episodes):
            for number in range(min(3, len(episodes.support))):
                one = Episodes(*(tensor[number : number + 1] for tensor in episodes))
                draw = partial(self.episode_figure, one)
                show_figure(
                    self.trainer, f"validation episode {number}", draw, self.trainer.global_step
                )

    def episode_figure(self, episode: Episodes) -> Any:
        """Draw one episode, one class per row; misclassified queries have a frame."""
        with torch.no_grad():
            logits = self.predict(Episodes(*(tensor.to(self.device) for tensor in episode)))
        return draw_episode(episode, logits[0].argmax(-1).tolist())


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten())
