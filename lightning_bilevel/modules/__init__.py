"""Ready modules, one per task."""

from lightning_bilevel.modules.sine import SineProblem as SineProblem
