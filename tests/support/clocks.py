"""A clock that a test sets."""


class Clock:
    """Stands still until it is moved on: what takes its time adds to `now`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
