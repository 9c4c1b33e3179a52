"""What a run gives to its loggers: numbers, texts, figures and hyper-parameters.

Lightning's loggers share only numbers and hyper-parameters. For the rest each has its own place:

| | TensorBoard | W&B | MLflow | others with a folder, such as CSV |
| --- | --- | --- | --- | --- |
| text | Text | a table | artifact ``<tag>.md`` | ``<tag>.md`` in the folder |
| figure | Images | an image | an image, by step | ``<tag>.png`` in the folder |
| hyper-parameters | HParams | config | parameters | ``hparams.yaml`` |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_warn

from lightning_bilevel.files import write_whole

__all__ = ["log_figure", "log_hyperparameters", "log_numbers", "log_text", "run_folder"]


def log_numbers(trainer: Any, numbers: Mapping[str, float], iteration: int) -> None:
    """Log numbers of an outer iteration."""
    if trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.log_metrics(dict(numbers), step=iteration)


def log_text(trainer: Any, tag: str, text: str, iteration: int) -> None:
    """Log Markdown."""

    def give(logger: Any) -> None:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text(tag, text, iteration)
        elif isinstance(logger, WandbLogger):
            logger.log_text(tag, ["iteration", "text"], [[iteration, text]], step=iteration)  # type: ignore[list-item]
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_text(logger.run_id, text, f"{tag}.md")
        elif logger.log_dir is not None:
            _write(Path(logger.log_dir) / f"{tag}.md", f"{text}\n".encode())

    _each(trainer, f"the text {tag!r}", give)


def log_figure(trainer: Any, tag: str, draw: Callable[[], Any], iteration: int) -> None:
    """Log a figure. Without a logger, or in a trial run of a few steps, it is not even drawn.

    Args:
        trainer: The Trainer.
        tag: The name of the figure.
        draw: Returns its pixels (height, width, channel), or a matplotlib figure.
        iteration: The outer iteration that it is of.
    """
    if not trainer.is_global_zero or not trainer.loggers or trainer.fast_dev_run:
        return
    try:
        pixels = _pixels(draw())
    except Exception as error:
        rank_zero_warn(
            f"the figure {tag!r} could not be drawn ({type(error).__name__}: {error}): the run "
            "goes on without it."
        )
        return

    def give(logger: Any) -> None:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image(tag, pixels, iteration, dataformats="HWC")
        elif isinstance(logger, WandbLogger):
            logger.log_image(tag, [pixels], step=iteration)
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_image(logger.run_id, pixels, key=tag, step=iteration)
        elif logger.log_dir is not None:
            from matplotlib.image import imsave

            path = Path(logger.log_dir) / f"{tag}.png"
            _write(path, lambda file: imsave(file, pixels, format="png"))

    _each(trainer, f"the figure {tag!r}", give)


def log_hyperparameters(
    trainer: Any,
    module: Mapping[str, Any],
    solver: Mapping[str, Any],
    final: Mapping[str, float],
    iteration: int,
) -> None:
    """Log the hyper-parameters of a run when it ends.

    TensorBoard shows a run as one line of a table: hyper-parameters of module and solver, and the
    final numbers. The other loggers have those of the module since the start, and the numbers as
    such; they are given the solver's, as ``bilevel/...``.

    Args:
        trainer: The Trainer.
        module: The hyper-parameters that the module has saved.
        solver: Those of the solver, its name under ``solver``.
        final: The final numbers.
        iteration: The last outer iteration.
    """

    def give(logger: Any) -> None:
        if isinstance(logger, TensorBoardLogger):
            # TensorBoard sorts by name and shows the first few: the bracket puts the solver first.
            named = {"(solver)" if name == "solver" else name: v for name, v in solver.items()}
            logger.log_hyperparams({**module, **named}, dict(final), step=iteration)
        else:
            # Plain YAML has lists and no tuples.
            plain = {name: list(v) if isinstance(v, tuple) else v for name, v in solver.items()}
            logger.log_hyperparams({f"bilevel/{name}": value for name, value in plain.items()})

    _each(trainer, "the hyper-parameters", give)


def run_folder(trainer: Any) -> Path | None:
    """Return the folder of a run's files; None for a trial run of a few steps, which leaves none.

    It is that of the first logger, where Lightning puts the checkpoints too. Without one, or if it
    logs to a server, it is the Trainer's ``default_root_dir``.

    All processes must call this: the first one's logger knows the folder and tells the others.
    """
    if trainer.fast_dev_run:
        return None
    return Path(trainer.strategy.broadcast(_folder(trainer)))


def _folder(trainer: Any) -> str:
    if trainer.loggers:
        logger = trainer.loggers[0]
        if isinstance(logger, (TensorBoardLogger, CSVLogger)):
            return logger.log_dir
        if logger.save_dir is not None:
            # Others keep the files of all runs there.
            return str(Path(logger.save_dir, str(logger.name), str(logger.version)))
    folder: str = trainer.default_root_dir
    return folder


def _each(trainer: Any, what: str, give: Callable[[Any], None]) -> None:
    """Give something to each logger; a run does not end because a logger cannot take a figure."""

    def try_to(logger: Any) -> None:
        try:
            give(logger)
        except Exception as error:
            rank_zero_warn(
                f"`{type(logger).__name__}` did not take {what} ({type(error).__name__}: {error}): "
                "the run goes on without it."
            )

    if trainer.is_global_zero:
        for logger in trainer.loggers:
            try_to(logger)


def _pixels(drawn: Any) -> Any:
    """Return the pixels of a matplotlib figure; pixels are returned as they are."""
    if not hasattr(drawn, "set_canvas"):
        return drawn
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(drawn)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content)
