"""Callbacks that watch a bilevel run."""

from lightning_bilevel.callbacks.certificate import CertificateReport as CertificateReport
from lightning_bilevel.callbacks.progress import BilevelProgressBar as BilevelProgressBar
