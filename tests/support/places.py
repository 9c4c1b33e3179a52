"""Where things lie."""

from pathlib import Path

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
CONFIGS = ROOT / "configs"
SYNTHETIC = CONFIGS / "synthetic"
