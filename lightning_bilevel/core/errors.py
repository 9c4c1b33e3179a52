"""The errors that stop a run, each with the reason in its message."""


class BilevelError(RuntimeError):
    """The run cannot go on, for a reason that the message names."""


class NonFiniteError(BilevelError):
    """A value or a gradient of f or g is NaN or infinite."""


class InnerLoopError(BilevelError):
    """The inner loop did not reach its accuracy within the cap."""


class LineSearchError(BilevelError):
    """No trial was accepted within the cap."""
