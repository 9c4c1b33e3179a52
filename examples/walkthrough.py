# %% [markdown]
# # A run and its certificate
#
# A notebook in jupytext's percent format: open it in Jupyter or VS Code cell by cell, or run
# `python examples/walkthrough.py`. The problem is the paper's: a nonconvex lower level with
# infinitely many solutions, the best of which is known.

# %%
from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from lightning.pytorch import Callback, Trainer
from matplotlib.figure import Figure

from lightning_bilevel import IVSP, Certificate, FullBatchDataModule, SineProblem
from lightning_bilevel.report.reading import reading


# %% [markdown]
# ## 1. Fit
#
# One step of the Trainer is one outer iteration. Its record is in `module.last_step`; the loggers
# use it too. We keep all records.
# %%
class Records(Callback):
    def on_train_start(self, trainer, module) -> None:
        self.steps = []

    def on_train_batch_end(self, trainer, module, *args) -> None:
        self.steps.append(module.last_step)


def main(short: bool = False, out: Path = Path("walkthrough.png")) -> Certificate:
    search = {"mu0": 9e-3, "gamma0": 0.9, "zeta_bar": 3.0, "L_init": 1.0, "L_xy": 3.2, "L_yy": 1.0}
    module = SineProblem(n=10, solver=partial(IVSP, rho=0.5, sigma=1.0, delta=1e-3, **search))
    records = Records()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(
        accelerator="cpu",
        precision="64-true",
        max_epochs=1 if short else 5,
        callbacks=[records],
        **quiet,
    )
    trainer.fit(module, datamodule=FullBatchDataModule(epoch_length=200))

    # %% [markdown]
    # ## 2. Read the certificate
    #
    # - *feasibility*: R = g(x, y) - (Moreau envelope) - delta is at most this. If R <= 0, y lies
    #   within |y - z| of a point that is stationary for g, up to the bound behind it.
    # - *stationarity*: the distance of the gradient of f + lambda R from zero, up to the normal
    #   cone of the boxes.
    # - *complementarity*: lambda R. If it is small, the multiplier is that of an active constraint.
    # - *multiplier*: the price of delta. If delta grew a little, f would fall by about lambda times
    #   as much.
    # %%
    certificate = module.certify(tolerance=1e-9)
    assert certificate is not None
    print(certificate)
    print(reading(certificate))
    print(f"errors against the known solution: {module.errors()}")

    # %% [markdown]
    # ## 3. See how it got there
    #
    # R falls to the smoothing mu. If R stays above mu although the steps are small, the penalty
    # 1/gamma grows.
    # %%
    figure = Figure(figsize=(6.5, 3.2), layout="constrained")
    axis = figure.subplots()
    axis.loglog(
        [max(info.residual, 1e-6) for info in records.steps], label="residual R", color="#0072B2"
    )
    axis.loglog([info.mu for info in records.steps], label="smoothing mu", color="#999999")
    axis.loglog([info.multiplier for info in records.steps], label="multiplier", color="#D55E00")
    axis.loglog(
        [1 / info.gamma for info in records.steps],
        label="penalty 1/gamma",
        color="black",
        linestyle=":",
    )
    axis.set_xlabel("outer iteration")
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(out, dpi=160)
    return certificate


# %%
if __name__ == "__main__":
    main(short="--short" in sys.argv)
