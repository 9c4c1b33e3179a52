"""Callbacks that watch a bilevel run."""

from lightning_bilevel.callbacks.certificate import CertificateMonitor as CertificateMonitor
from lightning_bilevel.callbacks.certificate import CertificateReport as CertificateReport
from lightning_bilevel.callbacks.ends import LastCheckpoint as LastCheckpoint
from lightning_bilevel.callbacks.ends import OptimizationBudget as OptimizationBudget
from lightning_bilevel.callbacks.monitors import PenaltyMonitor as PenaltyMonitor
from lightning_bilevel.callbacks.monitors import SolverMonitor as SolverMonitor
