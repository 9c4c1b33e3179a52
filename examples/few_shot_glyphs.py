"""Few-shot learning: learn features that classify unseen classes from one example of each.

The upper level is a small Conv-4, the lower level has one linear head per training episode. The
library draws the characters itself, so there is nothing to download.

Run: python examples/few_shot_glyphs.py
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from matplotlib.figure import Figure

from lightning_bilevel import (
    IVSP,
    CertificateReport,
    Episodes,
    FewShot,
    GlyphEpisodes,
)


def query_error(module: FewShot, episodes: Episodes) -> float:
    """The error on unseen classes, with heads fitted to one example per class."""
    with torch.no_grad():
        return float((module.predict(episodes).argmax(-1) != episodes.query_labels).float().mean())


@torch.no_grad()
def draw(module: FewShot, episode: Episodes, out: Path) -> None:
    """The queries of an episode, each with its class and the predicted one."""
    figure = Figure(figsize=(7.0, 7.5), layout="constrained")
    figure.suptitle("queries: class → predicted class")
    guesses = module.predict(episode)[0].argmax(-1).tolist()
    labels = episode.query_labels[0].tolist()
    axes = figure.subplots(5, 5).flat
    for axis, image, label, guess in zip(axes, episode.query[0], labels, guesses, strict=True):
        axis.imshow(image[0].numpy(), cmap="gray_r")
        axis.set_title(f"{label} → {guess}")
        axis.set_axis_off()
    figure.savefig(out, dpi=160)


def main(short: bool = False, out: Path = Path("few_shot_glyphs.png")) -> dict[str, float]:
    torch.manual_seed(43)
    tasks = 8 if short else 24
    sizes = {"train_classes": 30, "validation_classes": 10, "test_classes": 10} if short else {}
    data = GlyphEpisodes(
        ways=5,
        shots=1,
        queries=5,
        n_train=tasks,
        n_validation=20,
        n_test=20,
        epoch_length=10,
        **sizes,
    )
    data.setup()
    # As in configs/glyphs/ivsp.yaml: the lower level is convex (sigma = 0), so rho may be large and
    # the inner loop accelerated.
    moreau = {
        "rho": 10.0,
        "sigma": 0.0,
        "delta": 1e-3,
        "inner": "accelerated",
        "L_xy": 1.0,
        "L_yy": 4.0,
    }
    search = {
        "mu0": 0.3,
        "block": 20,
        "gamma0": 0.3,
        "zeta_bar": 1e-3,
        "L_init": 0.1,
        "B_R": 1.0,
        "bb": "long",
    }
    module = FewShot(
        tasks=tasks, ways=5, channels=16, lower_unit=0.5, solver=partial(IVSP, **moreau, **search)
    )
    errors = {"before": query_error(module, data.test)}
    watching = {
        "callbacks": [CertificateReport()],
        "logger": False,
        "enable_checkpointing": False,
    }
    Trainer(accelerator="cpu", max_epochs=2 if short else 6, **watching).fit(
        module, datamodule=data
    )
    errors["after"] = query_error(module, data.test)
    print(
        f"error on the queries of unseen classes: {errors['before']:.3f} before, "
        f"{errors['after']:.3f} after (chance: 0.8)"
    )
    draw(module, Episodes(*(tensor[:1] for tensor in data.test)), out)
    return errors


if __name__ == "__main__":
    main(short="--short" in sys.argv)
