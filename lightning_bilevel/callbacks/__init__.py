"""Callbacks that watch a bilevel run."""

from lightning_bilevel.callbacks.budget import OptimizationBudget as OptimizationBudget
from lightning_bilevel.callbacks.certificate import CertificateReport as CertificateReport
from lightning_bilevel.callbacks.last import LastCheckpoint as LastCheckpoint
from lightning_bilevel.callbacks.moreau_gap import MoreauGapMonitor as MoreauGapMonitor
from lightning_bilevel.callbacks.progress import BilevelProgressBar as BilevelProgressBar
