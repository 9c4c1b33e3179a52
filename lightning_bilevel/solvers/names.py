"""The table of all logged names, with their meanings and their charts in TensorBoard."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["NAMES", "Name", "tag_of"]


class Name(NamedTuple):
    """A quantity that is logged.

    Attributes:
        tag: Its name in loggers and in ``trainer.callback_metrics``.
        meaning: What it is, in words.
        chart: The group and the title of its chart in TensorBoard's custom scalars; empty if it has
            none.
        attribute: The attribute of the record that holds it; empty if a monitor computes it.
        penalised: Whether only a method that strengthens a penalty has it, such as IVSP.
        mini_batch: Whether only a run on mini-batches has it.
    """

    tag: str
    meaning: str
    chart: tuple[str, str] = ("", "")
    attribute: str = ""
    penalised: bool = False
    mini_batch: bool = False


_FEASIBILITY = "feasibility"
_KKT = "KKT"
_PENALTY = "penalty"
_SEARCH = "line search"
_COST = "cost"
_DISTANCE = (_FEASIBILITY, "|y - z| and its bound")
_RESIDUALS = (_KKT, "residuals")
_MAXIMUM = (_KKT, "their maximum, and the best so far")
_MULTIPLIER = (_KKT, "multiplier")
_GAMMA = (_PENALTY, "inverse penalty gamma, and its updates")
_CURVATURE = (_SEARCH, "L and its start")
_CALLS = (_COST, "oracle calls")

NAMES = (
    Name("bilevel/upper", "upper level f", ("objective", "upper level f"), "upper"),
    Name("bilevel/lower", "lower level g", ("objective", "lower level g"), "lower"),
    Name("bilevel/step", "length of the step", ("objective", "step"), "step"),
    Name(
        "bilevel/gap",
        "gap g(x, y) - g(x, z) on the mini-batch",
        (_FEASIBILITY, "gap g(x, y) - g(x, z) on the mini-batch"),
        "gap",
        mini_batch=True,
    ),
    Name(
        "bilevel/skipped",
        "mini-batch steps taken back so far",
        attribute="skipped",
        mini_batch=True,
    ),
    Name(
        "bilevel/violation", "violation of the lower level, [R]+", (_FEASIBILITY, "violation [R]+")
    ),
    Name(
        "bilevel/moreau_gap",
        "relaxed residual R = H - delta of the Moreau gap H, as the solver sees it",
        (_FEASIBILITY, "relaxed residual R as the solver sees it"),
        "residual",
        penalised=True,
    ),
    Name("bilevel/prox_distance", "distance of y from its proximal point z", _DISTANCE),
    Name(
        "bilevel/prox_distance_bound",
        "bound on that distance, of delta and the violation",
        _DISTANCE,
    ),
    Name("bilevel/kkt_stationarity", "KKT stationarity", _RESIDUALS),
    Name("bilevel/kkt_feasibility", "KKT feasibility", _RESIDUALS),
    Name("bilevel/kkt_complementarity", "KKT complementarity", _RESIDUALS),
    Name("bilevel/kkt_residual", "the largest of the three", _MAXIMUM),
    Name("bilevel/kkt_best", "the smallest maximum so far", _MAXIMUM),
    Name("bilevel/kkt_multiplier", "multiplier of the certificate", _MULTIPLIER),
    Name("bilevel/multiplier", "multiplier of the solver", _MULTIPLIER, "multiplier"),
    Name(
        "bilevel/penalty",
        "inverse penalty gamma: it falls as the penalty grows",
        _GAMMA,
        "gamma",
        penalised=True,
    ),
    Name("bilevel/penalty_at_update", "gamma after an update", _GAMMA, penalised=True),
    Name(
        "bilevel/penalty_updates",
        "updates of the penalty so far",
        attribute="penalty_updates",
        penalised=True,
    ),
    Name(
        "bilevel/penalty_constant_for",
        "iterations since then",
        (_PENALTY, "iterations since the last update"),
        penalised=True,
    ),
    Name("bilevel/smoothing", "smoothing mu", (_PENALTY, "smoothing mu"), "mu", penalised=True),
    Name(
        "bilevel/accuracy",
        "accuracy zeta of the Moreau evaluation",
        (_PENALTY, "accuracy zeta"),
        "zeta",
        penalised=True,
    ),
    Name("bilevel/trials", "trials of the line search", attribute="trials", penalised=True),
    Name(
        "bilevel/mean_trials",
        "trials per iteration",
        (_SEARCH, "trials per iteration"),
        penalised=True,
    ),
    Name("bilevel/curvature", "accepted L", _CURVATURE, "L", penalised=True),
    Name("bilevel/curvature_start", "L of the first trial", _CURVATURE, "L_start", penalised=True),
    Name("bilevel/calls_upper", "evaluations of f so far", _CALLS),
    Name("bilevel/calls_lower", "evaluations of the gradient of g so far", _CALLS),
    Name("bilevel/calls_gap", "evaluations of the gap so far", _CALLS),
    Name("bilevel/calls_products", "products of second derivatives of g so far", _CALLS),
    Name("bilevel/passes", "forward and backward passes so far", attribute="passes"),
    Name(
        "bilevel/inner_iterations",
        "gradient steps on the lower level",
        attribute="inner_iterations",
    ),
    Name(
        "bilevel/mean_inner_iterations",
        "the same, on average",
        (_COST, "inner iterations per outer iteration"),
    ),
    Name(
        "bilevel/optimization_time",
        "seconds in the solver",
        (_COST, "optimisation time (s)"),
        "optimization_time",
    ),
)


def tag_of(attribute: str) -> str:
    """Return the logged name of an attribute of a record.

    An attribute that is not in the table is logged under its own name.
    """
    return next((name.tag for name in NAMES if name.attribute == attribute), f"bilevel/{attribute}")
