"""IVSP, the inexact variable-smoothing penalty method."""

from lightning_bilevel.solvers.ivsp.solver import IVSP as IVSP
