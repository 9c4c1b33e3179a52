"""The version, in this one place: the package, the wheel, the documentation and ``--version`` read
it from here.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
