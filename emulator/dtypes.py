"""NKI data types on NumPy: names, storage, and the conversions of the engines.

A dtype is a plain string, as in NKI 0.3 to 0.7 (``nl.float32 == "float32"``). There is no float64 and no
int64 on the device. Engines compute in fp32 and convert once, at the store: round to nearest even between
floats; round to nearest even and saturate from float to integer (NKI 0.6 release notes).
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from .errors import NKIError

FLOATS = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3": np.dtype(ml_dtypes.float8_e4m3),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
INTEGERS = {name: np.dtype(name) for name in ("int8", "int16", "int32", "uint8", "uint16", "uint32")}
# nl.bool_ is stored as one byte, 0 or 1.
NUMPY = {**FLOATS, **INTEGERS, "bool": np.dtype(np.uint8)}
# Names that kernels mention; a tensor of one of these is refused.
UNAVAILABLE = (
    "float8_e4m3fn",
    "float8_e8m0fnu",
    "tfloat32",
    "float8_e5m2_x4",
    "float8_e4m3fn_x4",
    "float4_e2m1fn_x4",
)
NAMES = (*NUMPY, *UNAVAILABLE)
_LEGACY = {"float8e4": "float8_e4m3", "float8e5": "float8_e5m2", "bool_": "bool"}

# What fresh memory holds, so that a read before the first write shows: NaN, or 4 as in AWS's simulator.
POISON_INTEGER = 4


def name_of(dtype, whose: str = "") -> str:
    """The NKI name of a dtype given as a name, a NumPy dtype or a NumPy scalar type; errors say ``whose`` it is."""
    if isinstance(dtype, str) and dtype in NUMPY:
        return dtype
    try:
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    except TypeError:
        raise NKIError("dtype", f"{whose}{dtype!r} is no dtype") from None
    name = _LEGACY.get(name, name)
    if name not in NUMPY:
        raise NKIError("dtype", f"{whose}dtype {name!r} is not one the device has here: {', '.join(NUMPY)}")
    return name


def itemsize(dtype: str) -> int:
    """Bytes of one element."""
    return NUMPY[dtype].itemsize


# NKI_PRECISE_FP=0 stores every float as fp32, which tells an algorithm from its rounding. Set by each launch.
precise = True


def stored(dtype: str) -> np.dtype:
    """What the memory of the emulator holds for a dtype. Limits of the hardware count ``itemsize``."""
    return NUMPY[dtype] if precise or dtype not in FLOATS else NUMPY["float32"]


def is_float(dtype: str) -> bool:
    return dtype in FLOATS


def is_integer(dtype: str) -> bool:
    return dtype in INTEGERS


def raw(array: np.ndarray) -> np.ndarray:
    """The bits, as unsigned integers: what bit operators act on (a right shift is logical)."""
    return array.view(f"u{array.dtype.itemsize}")


def poison(array: np.ndarray) -> None:
    """Fill fresh memory with values that show up when they are read: NaN or 4."""
    value = np.nan if array.dtype in FLOATS.values() else POISON_INTEGER
    # As raw bits: NumPy fills the dtypes of ml_dtypes element by element.
    raw(array).fill(raw(np.array(value, array.dtype)))


def to_float32(array: np.ndarray) -> np.ndarray:
    """What an engine reads: every input is converted to fp32 first."""
    return array if array.dtype == np.float32 else array.astype(np.float32)


def store(dst: np.ndarray, values: np.ndarray) -> None:
    """Convert once and write ``values`` into the view ``dst``.

    Float to integer rounds to nearest even and saturates; NaN becomes 0 (the hardware's choice is not
    documented). Integer to integer saturates.
    """
    if dst.dtype == values.dtype or dst.dtype.kind not in "iu":
        # A value beyond the range of a small float becomes inf (or NaN) silently, as on the device.
        with np.errstate(over="ignore", invalid="ignore"):
            dst[...] = values
        return
    info = np.iinfo(dst.dtype)
    if values.dtype.kind not in "iu":
        values = np.nan_to_num(np.rint(values.astype(np.float64)), nan=0.0, posinf=info.max, neginf=info.min)
    dst[...] = np.clip(values, info.min, info.max).astype(dst.dtype)
