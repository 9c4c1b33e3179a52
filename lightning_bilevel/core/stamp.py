"""Whether a tensor is still the one that something was computed from."""

from __future__ import annotations

from torch import Tensor

__all__ = ["Stamp"]


class Stamp:
    """A tensor as it was: the object itself, and torch's count of its changes in place.

    Changes through ``.data`` or a NumPy view are not counted. Tensors made in inference mode have
    no count, so nothing that was computed from one holds.

    Example:
        >>> import torch
        >>> v = torch.zeros(2)
        >>> stamp = Stamp(v)
        >>> stamp.is_still(v), stamp.is_still(v.clone())
        (True, False)
        >>> _ = v.add_(1.0)
        >>> stamp.is_still(v)
        False
    """

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        # The tensor is held: a later one cannot have its identity.
        self._tensor = tensor
        self._version = None if tensor.is_inference() else tensor._version

    def is_still(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is the stamped one, unchanged."""
        return (
            tensor is self._tensor
            and self._version is not None
            and tensor._version == self._version
        )
