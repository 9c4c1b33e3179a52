"""Callbacks that watch a bilevel run."""

from lightning_bilevel.callbacks.certificate_monitor import KKTMonitor as KKTMonitor
from lightning_bilevel.callbacks.certificate_monitor import MoreauGapMonitor as MoreauGapMonitor
from lightning_bilevel.callbacks.certificate_report import CertificateReport as CertificateReport
from lightning_bilevel.callbacks.last_checkpoint import LastCheckpoint as LastCheckpoint
from lightning_bilevel.callbacks.monitor import PenaltyMonitor as PenaltyMonitor
from lightning_bilevel.callbacks.monitor import SolverMonitor as SolverMonitor
from lightning_bilevel.callbacks.optimization_budget import OptimizationBudget as OptimizationBudget
from lightning_bilevel.callbacks.progress_bar import BilevelProgressBar as BilevelProgressBar
