"""Torch tensors as NumPy arrays and back, without a copy. bf16 and fp8 travel as raw bits.

Nothing here imports torch: a torch tensor can only arrive where torch is loaded.
"""

from __future__ import annotations

import sys

import numpy as np

from . import dtypes
from .errors import NKIError

# Integers of torch and NumPy by bytes per element, to pass dtypes that NumPy lacks.
_BITS = {1: "uint8", 2: "int16", 4: "int32"}
# What NumPy has too and the device has not: a launch refuses it, and says which argument it is.
_REFUSED = {"float64", "int64", "uint64", "complex64", "complex128"}
# torch and NKI use the same names, but for IEEE-like e4m3, which torch does not have. Of those, NumPy has:
_NATIVE = {"float32", "float16", "int8", "int16", "int32", "uint8", "uint16", "uint32", "bool"}


def is_torch(value) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def to_numpy(tensor) -> np.ndarray:
    """A NumPy array on the memory of a contiguous CPU tensor.

    ``Tensor.numpy()`` would forbid for good to resize the storage, which is how FSDP frees its parameters.
    """
    torch = sys.modules["torch"]
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise NKIError("argument", f"a contiguous CPU tensor is needed, got {tensor.device}, strides {tensor.stride()}")
    name = str(tensor.dtype).removeprefix("torch.")
    if name in _REFUSED:
        return np.from_dlpack(tensor.detach())
    dtype = np.dtype(bool) if name == "bool" else dtypes.NUMPY[dtypes.name_of(name)]
    return np.from_dlpack(tensor.detach().view(getattr(torch, _BITS[dtype.itemsize]))).view(dtype)


def to_torch(array: np.ndarray):
    """A torch tensor on the memory of a contiguous NumPy array."""
    torch = sys.modules["torch"]
    name = dtypes.name_of(array.dtype)
    if name in _NATIVE:
        return torch.from_numpy(array)
    if not hasattr(torch, name):
        raise NKIError("argument", f"torch has no dtype {name}")
    return torch.from_numpy(array.view(_BITS[array.dtype.itemsize])).view(getattr(torch, name))
