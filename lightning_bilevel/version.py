"""The version, which the package, the wheel, the documentation and ``--version`` read here."""

__version__ = "0.2.0"
