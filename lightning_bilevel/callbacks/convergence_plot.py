"""A picture of the run."""

from __future__ import annotations

import math
import time
from pathlib import Path
from statistics import median
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from lightning_bilevel.callbacks.monitor import CertificateMonitor, is_underway, run_folder
from lightning_bilevel.callbacks.tensorboard import show_figure
from lightning_bilevel.core.certificate import Certificate
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.files import write_whole

__all__ = ["ConvergencePlot"]

# More points than that are not told apart in a panel: every second one is dropped then.
_POINTS = 1000
# What is drawn, panel by panel: the name of a series, its label, its colour (Okabe and Ito's) and the style of its line.
_PANELS: dict[str, list[tuple[str, str, str, str]]] = {
    "upper level f": [("bilevel/upper", "", "#D55E00", "-")],
    "lower level g": [("bilevel/lower", "", "#0072B2", "-")],
    "Moreau gap R, feasible below 0": [
        ("bilevel/moreau_gap", "as the solver sees it", "#56B4E9", "-"),
        ("residual", "evaluated", "#0072B2", "o-"),
    ],
    "KKT residuals": [
        ("stationarity", "stationarity", "#D55E00", "o-"),
        ("feasibility", "feasibility", "#0072B2", "o-"),
        ("complementarity", "complementarity", "#009E73", "o-"),
    ],
    "penalty and smoothing": [
        ("bilevel/penalty", "inverse penalty gamma", "#CC79A7", "-"),
        ("update", "an update of the penalty", "#D55E00", "v"),
        ("bilevel/smoothing", "smoothing mu", "#000000", "-"),
    ],
    "cost of an iteration": [
        ("bilevel/inner_iterations", "inner iterations", "#E69F00", "-"),
        ("bilevel/trials", "trials", "#000000", "-"),
    ],
}
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


class ConvergencePlot(CertificateMonitor):
    """Draws the run: objective, feasibility, KKT residuals, penalty, cost, and what the module's validation logs.

    The picture is ``convergence.png`` in the folder of the run and "convergence" under TensorBoard's images, at the end and every
    few minutes.

    Args:
        every_n_minutes: How often it is drawn.
        every_n_steps: Look at the certificate at every n-th outer iteration.
        every_n_seconds: Look at it whenever so many seconds have passed.
        share: How much of the optimisation time the looks at validation may add to it, see
            :class:`~lightning_bilevel.callbacks.monitor.CertificateMonitor`.
        tolerance: The accuracy of the proximal point; None is 1e-3, and 1e-6 in float64.
        envelope: The Moreau envelope (rho, sigma, delta); None is the module's.

    Attributes:
        series: The points of each series, by name: a list of iterations and a list of values.
    """

    def __init__(
        self,
        every_n_minutes: float = 5.0,
        every_n_steps: int | None = None,
        every_n_seconds: float | None = None,
        share: float = 0.01,
        tolerance: float | None = None,
        envelope: Envelope | None = None,
    ) -> None:
        super().__init__(every_n_steps, every_n_seconds, share, tolerance, envelope)
        if not 0 < every_n_minutes < math.inf:
            raise ValueError(f"`ConvergencePlot(every_n_minutes={every_n_minutes})` must be positive and finite.")
        self.every_n_minutes = every_n_minutes
        self.series: dict[str, list[list[float]]] = {}
        self.stride = 1
        self._drawn = 0.0
        self._folder: Path | None = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        self._drawn = time.monotonic()
        self._folder = run_folder(trainer)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        info = pl_module.last_step
        if getattr(info, "penalty_updated", False):
            self._add({"update": info.gamma}, info.iteration)
        if info.iteration % self.stride == 0:
            self._add(info.metrics(), info.iteration)
            if len(self.series["bilevel/upper"][0]) > _POINTS:
                self.stride *= 2
                for name in info.metrics():
                    self.series[name] = [values[1::2] for values in self.series[name]]
        if time.monotonic() - self._drawn >= 60 * self.every_n_minutes:
            self._draw(trainer, info.iteration)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if is_underway(trainer, pl_module):
            metrics = {name: float(v) for name, v in trainer.callback_metrics.items() if not name.startswith("bilevel/")}
            self._add({f"validation/{name}": value for name, value in metrics.items()}, pl_module.last_step.iteration)

    @override
    def observe(self, trainer: Trainer, pl_module: Any, certificate: Certificate, iteration: int) -> None:
        c = certificate
        residuals = {"stationarity": c.stationarity, "feasibility": c.feasibility, "complementarity": c.complementarity}
        self._add({"residual": c.residual, **residuals}, iteration)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        super().on_train_end(trainer, pl_module)
        if self.series:
            self._draw(trainer, pl_module.last_step.iteration)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"series": self.series, "stride": self.stride}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.series, self.stride = state_dict["series"], state_dict["stride"]

    def _add(self, values: dict[str, float], iteration: int) -> None:
        for name, value in values.items():
            iterations, numbers = self.series.setdefault(name, [[], []])
            iterations.append(iteration)
            numbers.append(value)

    @rank_zero_only
    def _draw(self, trainer: Trainer, iteration: int) -> None:
        self._drawn = time.monotonic()
        if self._folder is None:
            return
        from matplotlib.image import imsave

        pixels = draw(self.series)
        self._folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._folder / "convergence.png", lambda file: imsave(file, pixels, format="png"))
        show_figure(trainer, "convergence", pixels, iteration)


def draw(series: dict[str, list[list[float]]]) -> Any:
    """Draw the series that there are, and return the pixels."""
    import matplotlib as mpl
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = {title: [line for line in lines if line[0] in series] for title, lines in _PANELS.items()}
    logged = [name for name in series if name.startswith("validation/")]
    panels["validation"] = [(name, name.split("/", 1)[1], _COLOURS[i % len(_COLOURS)], "o-") for i, name in enumerate(logged)]
    panels = {title: lines for title, lines in panels.items() if lines}
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(4.4 * columns, 2.4 * rows), dpi=100)
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axis, (title, lines) in zip(axes, panels.items(), strict=False):
            for name, label, colour, style in lines:
                axis.plot(*series[name], style, color=colour, label=label, markersize=3, linewidth=1.3)
            values = [v for name, *_ in lines for v in series[name][1] if math.isfinite(v)]
            _scale(axis, values)
            # Ticks cost more than curves: few, none between, and without the mathematical setting of powers.
            axis.minorticks_off()
            axis.yaxis.set_major_formatter(lambda value, position: f"{value:.3g}")
            axis.set_title(title, y=1.0)  # a place of its own choice would be found by measuring all ticks
            axis.grid(alpha=0.3)
            if any(label for _, label, *_ in lines):
                axis.legend(frameon=False, fontsize=8)
        for axis in axes[len(panels) :]:
            axis.remove()
        for axis in axes[max(len(panels) - columns, 0) : len(panels)]:
            axis.set_xlabel("outer iteration")
        figure.subplots_adjust(
            left=0.08, right=0.985, top=1 - 0.3 / (2.4 * rows), bottom=0.5 / (2.4 * rows), wspace=0.2, hspace=0.35
        )
        canvas: Any = FigureCanvasAgg(figure)
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _scale(axis: Any, values: list[float]) -> None:
    """Make an axis logarithmic where its values span more than a power of ten, on either side of 0 if need be."""
    sizes = [abs(v) for v in values if v != 0.0]
    if not sizes or max(values) <= 0.0 or max(sizes) <= 10 * min(sizes):
        return
    if min(values) < 0.0:
        # R falls by powers of ten and then stays about 0: what it is in the second half is about where the powers end.
        axis.set_yscale("symlog", linthresh=median(sizes[len(sizes) // 2 :]))
        axis.axhline(0.0, color="0.6", linewidth=0.8)
    elif len(sizes) < len(values):
        axis.set_yscale("symlog", linthresh=min(sizes))
        axis.set_ylim(bottom=0.0)
    else:
        axis.set_yscale("log")
