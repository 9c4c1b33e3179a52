"""Few-shot learning: features such that linear heads fitted on a few examples generalise."""

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
    :math:`S_i` of task i, x in [-5, 5] and y in [-20, 20]. The lower level is convex in y, so the
    constraint qualification holds for each delta.

    Validation logs the query loss and error of heads that are fitted anew to unseen classes, by 10
    gradient steps of 0.1:
    ``val_loss``, ``val_error``, ``test_loss`` and ``test_error``.

    Args:
        tasks: The number of training episodes, T.
        ways: Classes of an episode.
        channels: Channels of each convolution.
        image_size: Height and width of an image.
        chunk_images: How many images are evaluated at once: enough to keep the cores busy, few
            enough that what a chunk leaves for the backward pass stays in their caches. Values and
            gradients are those of the whole batch.
        lower_unit: The unit that the solver measures y in. Losses are means over tasks, so a
            gradient in y shrinks as 1/T: settings for 128 tasks need about sqrt(T/128).
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
        self.tasks, self.ways, self.image_size, self.chunk_images = (
            tasks,
            ways,
            image_size,
            chunk_images,
        )
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
            qualification="holds: the lower level is convex (linear softmax heads), so for each delta > 0",
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
        """The features of the support sets, which is all of g that depends on x."""
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
        chunks, parts, weights = as_chunks(batch), [], []
        for whole, share in zip(chunks.batches, chunks.shares, strict=True):
            for part in zip(
                *(torch.split(tensor, self._tasks_at_once(whole[0])) for tensor in whole),
                strict=True,
            ):
                parts.append(part)
                weights.append(share * len(part[0]) / len(whole[0]))
        return Chunks(parts, weights)

    def _tasks_at_once(self, images: Tensor) -> int:
        return max(1, self.chunk_images // int(images.shape[1]))

    def setup(self, stage: str) -> None:
        """Refuse data that do not fit the module before anything is trained."""
        data: Any = getattr(self.trainer, "datamodule", None)
        for mine, theirs, what in (
            ("tasks", "n_train", "training episodes"),
            ("ways", "ways", "classes in an episode"),
        ):
            given = getattr(data, theirs, getattr(self, mine))
            if given != getattr(self, mine):
                raise MisconfigurationException(
                    f"`FewShot({mine}={getattr(self, mine)})` was given {given} {what}: they must "
                    "agree."
                )
        shape = getattr(data, "image_shape", None)
        if shape is not None and tuple(shape) != (1, self.image_size, self.image_size):
            raise MisconfigurationException(
                f"`FewShot(image_size={self.image_size})` was given images of "
                f"{'x'.join(map(str, shape))}: they must agree."
            )

    def predict(self, episodes: Episodes) -> Tensor:
        """Return the logits (E, N, ways) of the queries by heads that are fitted anew to the
        supports.
        """
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
        # Processes have the same batch, or parts of it: either way the mean over them is right.
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
        """Draw one episode: in each row the support of a class and its queries, those in a frame
        taken for another class.
        """
        with torch.no_grad():
            logits = self.predict(Episodes(*(tensor.to(self.device) for tensor in episode)))
        return draw_episode(episode, logits[0].argmax(-1).tolist())


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten())
