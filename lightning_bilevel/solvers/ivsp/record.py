"""The record of IVSP."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_bilevel.solvers.record import PenaltyInfo

__all__ = ["IVSPInfo"]


@dataclass(frozen=True, kw_only=True)
class IVSPInfo(PenaltyInfo):
    """The record of one outer iteration of IVSP."""
