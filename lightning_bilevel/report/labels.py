"""What figures and summaries call the metrics: words instead of the names of columns."""

from __future__ import annotations

__all__ = ["AIM", "label"]

_LABELS = {
    "x_error": "error of x",
    "y_error": "error of y",
    "val_loss": "validation loss",
    "val_error": "validation error",
    "test_loss": "test loss",
    "test_error": "test error",
    "auroc": "AUROC of the weights",
    "missed_errors": "share of wrong labels missed",
    "violation": "violation of the lower level",
    "kkt_residual": "KKT residual",
}
# What a reader of a comparison must know about a metric: a remark for its panel, and a footnote.
AIM = {
    "kkt_residual": (
        "only IVSP aims at it",
        "The KKT residual is that of the relaxed problem, which IVSP solves. The other methods do "
        "not aim at it: theirs says where they are, not how well they do what they are made for.",
    )
}


def label(metric: str) -> str:
    """Return a metric in words; the name of an unknown one, without underscores.

    Example:
        >>> label("test_error"), label("my_own_loss")
        ('test error', 'my own loss')
    """
    return _LABELS.get(metric, metric.replace("_", " "))
