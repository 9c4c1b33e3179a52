"""The methods, one file each."""

from lightning_bilevel.solvers.aid import AID as AID
from lightning_bilevel.solvers.base import BilevelOptimizer as BilevelOptimizer
from lightning_bilevel.solvers.base import SolverCallable as SolverCallable
from lightning_bilevel.solvers.bome import BOME as BOME
from lightning_bilevel.solvers.darts import DARTS as DARTS
from lightning_bilevel.solvers.f2ba import F2BA as F2BA
from lightning_bilevel.solvers.f2sa import F2SA as F2SA
from lightning_bilevel.solvers.hjfbio import HJFBiO as HJFBiO
from lightning_bilevel.solvers.itd import ITD as ITD
from lightning_bilevel.solvers.ivsp import IVSP as IVSP
from lightning_bilevel.solvers.lumei import LuMei as LuMei
from lightning_bilevel.solvers.meha import MEHA as MEHA
from lightning_bilevel.solvers.meha import PNGBiO as PNGBiO
from lightning_bilevel.solvers.pbgd import VPBGD as VPBGD
from lightning_bilevel.solvers.pbgd import PBGDFree as PBGDFree
from lightning_bilevel.solvers.record import StepInfo as StepInfo
from lightning_bilevel.solvers.record import StreamInfo as StreamInfo
from lightning_bilevel.solvers.slm import SLM as SLM
from lightning_bilevel.solvers.soba import SOBA as SOBA
