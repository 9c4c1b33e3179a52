"""The methods, one file each."""

from lightning_bilevel.solvers.base import BilevelOptimizer as BilevelOptimizer
from lightning_bilevel.solvers.base import SolverCallable as SolverCallable
from lightning_bilevel.solvers.base import StepInfo as StepInfo
from lightning_bilevel.solvers.ivsp import IVSP as IVSP
from lightning_bilevel.solvers.ivsp import IVSPInfo as IVSPInfo
