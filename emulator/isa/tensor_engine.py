"""The Tensor engine: ``nc_matmul``, and ``nc_transpose`` which the Vector engine can do too."""

from __future__ import annotations

import numpy as np

from .. import dtypes
from ..errors import NKIError
from ..machine import core
from ..table import instruction
from ..tensor import Tensor
from . import operands
from .enums import engine as Engine
from .enums import matmul_perf_mode as PerfMode
from .operands import PSUM, SBUF


def _one_bank(dst: Tensor) -> None:
    """The result of the Tensor engine starts aligned and fits one PSUM bank."""
    if dst.size == 0:
        return
    size = dtypes.itemsize(dst.dtype)
    bank, alignment = core().target.psum_bank_bytes, core().target.psum_alignment
    first = dst.offset % dst.row * size
    last = first + (dst.extent(1) + 1) * size - 1
    if first % alignment:
        raise NKIError(
            "psum-alignment", f"dst starts at byte {first} of a partition, it must be a multiple of {alignment}"
        )
    if first // bank != last // bank:
        raise NKIError(
            "psum-bank",
            f"dst covers bytes {first} to {last} of a partition; it must stay in one bank of {bank} bytes",
        )


def _same_loop(dst: Tensor) -> None:
    """What one iteration of a device loop leaves for the next lives in SBUF or HBM, never in PSUM."""
    if dst.storage.loop is not core().innermost_loop:
        raise NKIError("psum-loop", f"{dst!r} was allocated outside the device loop whose body writes it")


def _check_nc_matmul(
    dst,
    stationary,
    moving,
    is_stationary_onezero=False,
    is_moving_onezero=False,
    is_transpose=False,
    accumulate=None,
    tile_position=(),
    tile_size=(),
    perf_mode=PerfMode.none,
    name=None,
):
    chip = core().target
    operands.destination(dst, (PSUM,), sink=False)
    _same_loop(dst)
    a, b = operands.on_chip(stationary, "stationary", (SBUF,)), operands.on_chip(moving, "moving", (SBUF,))
    if a.shape[0] != b.shape[0]:
        raise NKIError("matmul-contraction", f"stationary has {a.shape[0]} partitions, moving {b.shape[0]}; both are K")
    if a.free_size > chip.matmul_stationary:
        raise NKIError(
            "matmul-stationary",
            f"stationary has {a.free_size} free elements, the limit is {chip.matmul_stationary}",
        )
    if b.free_size > chip.matmul_moving:
        raise NKIError("matmul-moving", f"moving has {b.free_size} free elements, the limit is {chip.matmul_moving}")
    if dst.shape[0] != a.free_size or dst.free_size != b.free_size:
        raise NKIError(
            "matmul-shape",
            f"dst is {dst.shape}, stationary.T @ moving is ({a.free_size}, {b.free_size})",
        )
    _one_bank(dst)
    for what, t in (("stationary", a), ("moving", b)):
        if not dtypes.is_float(t.dtype):
            raise NKIError("dtype", f"{what} is {t.dtype}, the Tensor engine multiplies floats")
    if (a.dtype == "float32") != (b.dtype == "float32"):
        raise NKIError("dtype", f"float32 multiplies float32 only, got {a.dtype} and {b.dtype}")
    if tuple(tile_position) or tuple(tile_size):
        raise NKIError("not-implemented", "tile_position and tile_size")
    if perf_mode not in (PerfMode.none, "none"):
        raise NKIError("not-implemented", f"perf_mode {perf_mode}")
    if accumulate is not None and not isinstance(accumulate, bool):
        raise NKIError("accumulate", f"accumulate is None, True or False, not {accumulate!r}")
    if is_transpose:
        if accumulate:
            raise NKIError("accumulate", "a transpose moves bits, there is nothing to add them to")
        _check_transposed_dtype(dst, a, "stationary")
        if not np.array_equal(_flat(b), np.eye(b.shape[0], b.free_size)):
            raise NKIError("matmul-identity", "is_transpose needs the identity as moving")
    elif dst.dtype != "float32":
        raise NKIError("dtype", f"dst is {dst.dtype}, PSUM accumulates in float32")


def _check_transposed_dtype(dst: Tensor, data: Tensor, what: str) -> None:
    """What the Tensor engine transposes bit for bit."""
    if dst.dtype != data.dtype:
        raise NKIError("dtype", f"a transpose keeps the dtype: {what} is {data.dtype}, dst {dst.dtype}")
    if dtypes.itemsize(data.dtype) == 1:
        # It yields 16-bit elements; which bits of them count is described for no dtype of NKI.
        raise NKIError("dtype", f"the Tensor engine does not transpose {data.dtype}, {what} must have 2 or 4 bytes")


def _flat(t: Tensor) -> np.ndarray:
    """[K, free] in fp32."""
    return dtypes.to_float32(t.array().reshape(t.shape[0], -1))


@instruction(_check_nc_matmul)
def nc_matmul(
    dst,
    stationary,
    moving,
    is_stationary_onezero=False,
    is_moving_onezero=False,
    is_transpose=False,
    accumulate=None,
    tile_position=(),
    tile_size=(),
    perf_mode=PerfMode.none,
    name=None,
):
    """``dst[M, N] (+)= stationary[K, M].T @ moving[K, N]`` in fp32, K on the partitions.

    ``accumulate``: False overwrites, True adds, None adds where an earlier matmul wrote this PSUM tensor and
    overwrites elsewhere. Only the Tensor engine counts: a memset does not.

    ``is_transpose``: moving is the identity, dst is stationary.T bit for bit.
    """
    if is_transpose:
        _transpose(dst, stationary)
        dst.written()[...] = True
        return
    with np.errstate(all="ignore"):
        product = operands.like(_flat(stationary).T @ _flat(moving), dst)
        array, flags = dst.array(), dst.written()
        if accumulate is False or (accumulate is None and not flags.any()):
            array[...] = product
        elif accumulate is True or flags.all():
            array += product
        else:
            array[...] = np.where(flags.all(axis=-1), array + product, product)
    flags[...] = True


def _transpose(dst: Tensor, data: Tensor) -> None:
    dst.array()[...] = operands.like(data.array().reshape(data.shape[0], -1).T, dst)


def _transpose_engine(dst: Tensor, engine) -> Engine:
    """PSUM results come from the Tensor engine, SBUF results from the Vector engine."""
    if engine is not Engine.unknown:
        return engine
    return Engine.tensor if dst.buffer is PSUM else Engine.vector


def _check_nc_transpose(dst, data, engine=Engine.unknown, name=None):
    operands.destination(dst, sink=False)
    if dst.overlaps(operands.on_chip(data, "data")):
        raise NKIError("alias", f"dst {dst!r} overlaps data {data!r}: a transpose is not done in place")
    operands.one_of_engines(engine, Engine.tensor, Engine.vector)
    chip = core().target
    if _transpose_engine(dst, engine) is Engine.tensor:
        limit = chip.matmul_contraction
        if dst.buffer is not PSUM or data.buffer is not SBUF:
            raise NKIError(
                "buffer",
                f"the Tensor engine transposes SBUF into PSUM, got {data.buffer.value} into {dst.buffer.value}",
            )
        _one_bank(dst)
        _check_transposed_dtype(dst, data, "data")
    else:
        limit = chip.vector_transpose
    if data.shape[0] > limit or data.free_size > limit:
        raise NKIError(
            "transpose-size",
            f"data is {data.shape[0]} x {data.free_size}, the limit of this engine is {limit} x {limit}",
        )
    if dst.shape[0] != data.free_size or dst.free_size != data.shape[0]:
        raise NKIError("elements-differ", f"dst is {dst.shape}, the transpose is ({data.free_size}, {data.shape[0]})")
    if dst.dtype != data.dtype:
        raise NKIError("dtype", f"a transpose keeps the dtype: data is {data.dtype}, dst {dst.dtype}")


@instruction(_check_nc_transpose)
def nc_transpose(dst, data, engine=Engine.unknown, name=None):
    """``dst = data.T`` of ``[partitions, free]``, bit for bit."""
    _transpose(dst, data)
    if _transpose_engine(dst, engine) is Engine.tensor:
        dst.written()[...] = True
