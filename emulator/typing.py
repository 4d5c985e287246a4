"""``nki.typing``: names that annotations use."""

from .tensor import Tensor as tensor

mutable_tensor = tensor

__all__ = ["mutable_tensor", "tensor"]
