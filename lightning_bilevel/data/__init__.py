"""Data modules for bilevel problems."""

from lightning_bilevel.core.chunks import Chunks as Chunks
from lightning_bilevel.data.cleaning import CleaningData as CleaningData
from lightning_bilevel.data.cleaning import DatasetCleaning as DatasetCleaning
from lightning_bilevel.data.cleaning import DigitsCleaning as DigitsCleaning
from lightning_bilevel.data.cleaning import Splits as Splits
from lightning_bilevel.data.cleaning import corrupt_labels as corrupt_labels
from lightning_bilevel.data.downloads import FashionMNISTCleaning as FashionMNISTCleaning
from lightning_bilevel.data.downloads import MNISTCleaning as MNISTCleaning
from lightning_bilevel.data.downloads import OmniglotEpisodes as OmniglotEpisodes
from lightning_bilevel.data.episodes import EpisodeData as EpisodeData
from lightning_bilevel.data.episodes import Episodes as Episodes
from lightning_bilevel.data.episodes import TaskEpisodes as TaskEpisodes
from lightning_bilevel.data.fullbatch import FullBatchDataModule as FullBatchDataModule
from lightning_bilevel.data.fullbatch import Growing as Growing
from lightning_bilevel.data.glyphs import GlyphEpisodes as GlyphEpisodes
from lightning_bilevel.data.samples import Numbered as Numbered
