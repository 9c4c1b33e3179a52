"""IVSP, the inexact variable-smoothing penalty method."""

from lightning_bilevel.solvers.ivsp.algorithm import IVSPInfo as IVSPInfo
from lightning_bilevel.solvers.ivsp.solver import IVSP as IVSP
