"""Bilevel optimisation for PyTorch Lightning."""

from lightning_bilevel.callbacks import BilevelProgressBar as BilevelProgressBar
from lightning_bilevel.callbacks import CertificateReport as CertificateReport
from lightning_bilevel.callbacks import OptimizationBudget as OptimizationBudget
from lightning_bilevel.data import Chunks as Chunks
from lightning_bilevel.data import FullBatchDataModule as FullBatchDataModule
from lightning_bilevel.kkt import Certificate as Certificate
from lightning_bilevel.kkt import certify as certify
from lightning_bilevel.linesearch import LineSearchError as LineSearchError
from lightning_bilevel.mixin import BilevelMixin as BilevelMixin
from lightning_bilevel.mixin import BilevelModule as BilevelModule
from lightning_bilevel.mixin import IVSPMixin as IVSPMixin
from lightning_bilevel.modules import SineProblem as SineProblem
from lightning_bilevel.moreau import Envelope as Envelope
from lightning_bilevel.moreau import InnerLoopError as InnerLoopError
from lightning_bilevel.problem import BilevelError as BilevelError
from lightning_bilevel.problem import BilevelProblem as BilevelProblem
from lightning_bilevel.problem import Calls as Calls
from lightning_bilevel.problem import NonFiniteError as NonFiniteError
from lightning_bilevel.schedule import Power as Power
from lightning_bilevel.sets import Ball as Ball
from lightning_bilevel.sets import Box as Box
from lightning_bilevel.sets import ConvexSet as ConvexSet
from lightning_bilevel.sets import Free as Free
from lightning_bilevel.sets import NonNegative as NonNegative
from lightning_bilevel.sets import Product as Product
from lightning_bilevel.sets import Simplex as Simplex
from lightning_bilevel.solve import Solution as Solution
from lightning_bilevel.solve import solve as solve
from lightning_bilevel.solvers import BOME as BOME
from lightning_bilevel.solvers import F2SA as F2SA
from lightning_bilevel.solvers import IVSP as IVSP
from lightning_bilevel.solvers import MEHA as MEHA
from lightning_bilevel.solvers import SLM as SLM
from lightning_bilevel.solvers import VPBGD as VPBGD
from lightning_bilevel.solvers import BilevelOptimizer as BilevelOptimizer
from lightning_bilevel.solvers import IVSPInfo as IVSPInfo
from lightning_bilevel.solvers import PNGBiO as PNGBiO
from lightning_bilevel.solvers import SolverCallable as SolverCallable
from lightning_bilevel.solvers import StepInfo as StepInfo

__version__ = "0.1.0"
