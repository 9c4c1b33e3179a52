"""A test whether a tensor has changed since something was computed from it."""

from __future__ import annotations

from torch import Tensor

__all__ = ["Stamp"]


class Stamp:
    """A tensor and torch's count of its changes in place, to notice a later change.

    Changes through ``.data`` or a NumPy view are not counted. Tensors made in inference mode have
    no count, so they always count as changed.

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
        # The reference keeps the tensor alive, so that no later tensor can have its identity.
        self._tensor = tensor
        self._version = None if tensor.is_inference() else tensor._version

    def is_still(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is the stamped one, unchanged."""
        return (
            tensor is self._tensor
            and self._version is not None
            and tensor._version == self._version
        )
