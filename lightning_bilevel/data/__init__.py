"""Data modules for bilevel problems."""

from lightning_bilevel.data.fullbatch import Chunks as Chunks
from lightning_bilevel.data.fullbatch import FullBatchDataModule as FullBatchDataModule
