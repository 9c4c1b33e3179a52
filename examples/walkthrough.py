# %% [markdown]
# # A run and its certificate
#
# The problem is the paper's: a nonconvex lower level with infinitely many solutions, the best of
# which is known.
#
# Run: `python examples/walkthrough.py`, or cell by cell in Jupyter or VS Code.

# %%
import sys
import textwrap
from functools import partial

from lightning.pytorch import Callback, Trainer
from matplotlib import pyplot as plt

from lightning_bilevel import IVSP, FullBatchDataModule, SineProblem
from lightning_bilevel.reading import reading

short = "--short" in sys.argv

# %% [markdown]
# ## Fit
#
# One step of the Trainer is one outer iteration. Its record is in `module.last_step`; the loggers
# use it too. We keep all records.


# %%
class Records(Callback):
    def on_train_start(self, trainer, module) -> None:
        self.steps = []

    def on_train_batch_end(self, trainer, module, *args) -> None:
        self.steps.append(module.last_step)


constants = {"mu0": 9e-3, "gamma0": 0.9, "zeta_bar": 3.0, "L_init": 1.0, "L_xy": 3.2, "L_yy": 1.0}
module = SineProblem(n=10, solver=partial(IVSP, rho=0.5, sigma=1.0, delta=1e-3, **constants))
records = Records()
trainer = Trainer(
    accelerator="cpu",
    precision="64-true",
    max_epochs=1 if short else 5,
    callbacks=[records],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, datamodule=FullBatchDataModule(epoch_length=200))
print(f"errors against the known solution: {module.errors()}")

# %% [markdown]
# ## Read the certificate
#
# - *feasibility*: R = g(x, y) - (Moreau envelope) - delta is at most this. If R <= 0, y lies within
#   |y - z| of a point that is stationary for g, up to the bound behind it.
# - *stationarity*: the distance of the gradient of f + lambda R from zero, up to the normal cone of
#   the boxes.
# - *complementarity*: lambda R. If it is small, the multiplier is that of an active constraint.
# - *multiplier*: the price of delta. If delta grew a little, f would fall by about lambda times as
#   much.

# %%
certificate = module.certify(tolerance=1e-9)
print(certificate)
print(textwrap.fill(reading(certificate), 100))

# %% [markdown]
# ## See how it got there
#
# R falls to the smoothing mu. If R stays above mu although the steps are small, the penalty 1/gamma
# grows.

# %%
steps = records.steps
figure, axis = plt.subplots(figsize=(6.5, 3.2), layout="constrained")
axis.loglog([max(step.residual, 1e-6) for step in steps], label="residual R", color="#0072B2")
axis.loglog([step.mu for step in steps], label="smoothing mu", color="#999999")
axis.loglog([step.multiplier for step in steps], label="multiplier", color="#D55E00")
axis.loglog([1 / step.gamma for step in steps], ":", label="penalty 1/gamma", color="black")
axis.set_xlabel("outer iteration")
figure.legend(loc="outside right upper", frameon=False)
figure.savefig("walkthrough.png", dpi=160)
