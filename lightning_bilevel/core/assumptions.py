r"""The assumptions of the convergence theorem, as far as they can be seen.

The theorem is that of IVSP, for a fixed delta. It asks for compact convex sets X and Y, for f and g
with Lipschitz gradients on them, and for the constraint qualification ENNAMCQ.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_bilevel.core.sets import ConvexSet, is_bounded

__all__ = ["theorem"]


def theorem(
    qualification: str,
    upper_set: ConvexSet,
    lower_set: ConvexSet,
    kinks: Sequence[str] = (),
    beyond: str = "",
) -> str:
    """Say whether the theorem covers a problem.

    Args:
        qualification: What is known about the constraint qualification, in words.
        upper_set: X.
        lower_set: Y.
        kinks: The parts of f or g that are not differentiable, such as "ReLU".
        beyond: What the problem is that the theorem does not know, in words; empty for nothing.
    """
    sets = {"X": is_bounded(upper_set), "Y": is_bounded(lower_set)}
    unbounded = [name for name, bounded in sets.items() if bounded is False]
    against = [beyond] if beyond else []
    if unbounded:
        against.append(f"{' and '.join(unbounded)} {_are(unbounded)} unbounded")
    if kinks:
        against.append(f"{' and '.join(kinks)} {_are(kinks)} not differentiable")
    if qualification.startswith("fails"):
        against.append("the constraint qualification fails")
    if against:
        return f"does not apply: {', '.join(against)}"
    unknown = [f"whether {name} is bounded" for name, bounded in sets.items() if bounded is None]
    if not qualification.startswith("holds"):
        unknown.append("the constraint qualification")
    if unknown:
        return f"not known: {', '.join(unknown)}"
    return "applies, if the gradients of f and g are Lipschitz"


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"
