# %% [markdown]
# # Sixty hyper-parameters
#
# Learn the regularisation of a logistic regression: one L2 coefficient per feature, which no grid
# search could find. Half of the features are shuffled copies of scikit-learn's breast-cancer data,
# which say nothing about the diagnosis. The method does not know which ones they are, and it
# regularises them more.
#
# Run: `python examples/regularisation.py`

# %%
import sys
from functools import partial

import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_breast_cancer
from torch.nn.functional import binary_cross_entropy_with_logits

from lightning_bilevel import IVSP, BilevelProblem, Box, solve

short = "--short" in sys.argv

# %% [markdown]
# ## The data

# %%
torch.manual_seed(0)
features, labels = (
    torch.tensor(array, dtype=torch.float64) for array in load_breast_cancer(return_X_y=True)
)
features = (features - features.mean(0)) / features.std(0)
shuffled = torch.stack([column[torch.randperm(len(column))] for column in features.T], dim=1)
both = torch.cat([features, shuffled], dim=1)
order = torch.randperm(len(both)).split([150, 210, len(both) - 360])
train, validation, test = [(both[part], labels[part]) for part in order]

# %% [markdown]
# ## The problem
#
# Two functions of flat vectors. x is the logarithm of a coefficient, divided by a unit: steps of
# the logarithm become a hundred times as long (as with `upper_unit`). y are the weights of the
# regression and its bias.

# %%
UNIT = 10.0
START = -3.0


def loss(part, y):
    return binary_cross_entropy_with_logits(part[0] @ y[:-1] + y[-1], part[1])


problem = BilevelProblem(
    upper=lambda x, y: loss(validation, y),
    lower=lambda x, y: loss(train, y) + 0.5 * ((UNIT * x).exp() * y[:-1] ** 2).sum(),
    upper_set=Box(-6 / UNIT, 1 / UNIT),
    lower_set=Box(-20, 20),
)

# %% [markdown]
# ## Solve it
#
# We start at the usual regression, with one coefficient for all features. g is convex (sigma = 0),
# so rho may be large. Delta is small: where g is flat, a point with a small gradient may still be
# far from the solution.

# %%
start = torch.full((60,), START / UNIT, dtype=torch.float64)
equal = torch.zeros(61, dtype=torch.float64)
for _ in range(2000):
    equal = equal - problem.at(start).gradient(equal) / 4.5

convex = {"rho": 10.0, "sigma": 0.0, "delta": 1e-5, "L_xy": 1.0, "L_yy": 4.5}
search = {"mu0": 2e-4, "block": 10, "gamma0": 0.005, "zeta_bar": 1e5, "L_init": 1.0, "B_R": 1.0}
solver = partial(IVSP, **convex, **search, inner="accelerated")
solution = solve(problem, start, equal, solver, max_steps=100 if short else 300)
print(solution.certificate, solution.reading, sep="\n")

# %% [markdown]
# ## What it has found

# %%
logs = UNIT * solution.x
found = {
    "one coefficient": float(loss(test, equal)),
    "one per feature": float(loss(test, solution.y)),
    "real": float(logs[:30].mean()),
    "shuffled": float(logs[30:].mean()),
}
print(
    "test loss with one coefficient {one coefficient:.4f}, with one per feature "
    "{one per feature:.4f}; mean logarithm of real features {real:.2f}, of shuffled ones "
    "{shuffled:.2f}".format(**found)
)
figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
axis.bar(range(30), (logs[:30] - START).tolist(), color="#0072B2", label="features")
axis.bar(range(30, 60), (logs[30:] - START).tolist(), color="#D55E00", label="shuffled copies")
axis.set(xlabel="feature", ylabel="log coefficient, from the start")
axis.legend(frameon=False)
figure.savefig("regularisation.png", dpi=160)
