"""Ready modules, one per task."""

from lightning_bilevel.modules.fewshot import FewShot as FewShot
from lightning_bilevel.modules.hypercleaning import HyperCleaning as HyperCleaning
from lightning_bilevel.modules.sine import SineProblem as SineProblem
