"""The Tensor engine: ``nc_matmul``, and ``nc_transpose`` which the Vector engine can do too."""

from __future__ import annotations

import numpy as np

from .. import dtypes
from ..errors import NKIError
from ..machine import core
from ..table import instruction
from ..tensor import Tensor, integer
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
    # Without an address the allocator puts a tensor at the start of a bank.
    first = (dst.storage.address or (0, 0))[1] + dst.offset % dst.row * size
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
    rows, columns = _tile(_pair(tile_position, "tile_position"), _pair(tile_size, "tile_size"), a, dst)
    if a.shape[0] > rows:
        raise NKIError("matmul-tile", f"stationary has {a.shape[0]} partitions, tile_size {tile_size} has {rows} rows")
    double = _double_row(perf_mode)
    if double:
        _check_double_row(a, b, columns, is_transpose)
    m, n = (t.free_size // 2 if double else t.free_size for t in (a, b))
    if m > min(chip.matmul_stationary, columns):
        raise NKIError(
            "matmul-stationary",
            f"stationary has {m} free elements, the limit is {min(chip.matmul_stationary, columns)}",
        )
    if n > chip.matmul_moving:
        raise NKIError("matmul-moving", f"moving has {n} free elements, the limit is {chip.matmul_moving}")
    if dst.shape[0] != m or dst.free_size != n:
        raise NKIError("matmul-shape", f"dst is {dst.shape}, stationary.T @ moving is ({m}, {n})")
    _one_bank(dst)
    for what, t in (("stationary", a), ("moving", b)):
        if not dtypes.is_float(t.dtype):
            raise NKIError("dtype", f"{what} is {t.dtype}, the Tensor engine multiplies floats")
    if (a.dtype == "float32") != (b.dtype == "float32"):
        raise NKIError("dtype", f"float32 multiplies float32 only, got {a.dtype} and {b.dtype}")
    if accumulate is not None and not isinstance(accumulate, bool):
        raise NKIError("accumulate", f"accumulate is None, True or False, not {accumulate!r}")
    if is_transpose:
        if accumulate:
            raise NKIError("accumulate", "a transpose moves bits, there is nothing to add them to")
        _check_transposed_dtype(dst, a, "stationary")
        known = b.storage.filled is True and not core().shape_only
        if known and not np.array_equal(_flat(b), np.eye(b.shape[0], b.free_size)):
            raise NKIError("matmul-identity", "is_transpose needs the identity as moving")
    elif dst.dtype != "float32":
        raise NKIError("dtype", f"dst is {dst.dtype}, PSUM accumulates in float32")


def _tile(position: tuple, size: tuple, a: Tensor, dst: Tensor) -> tuple[int, int]:
    """Rows and columns of the part of the 128 x 128 array that a matmul uses."""
    if not position and not size:
        return 128, 128
    if len(position) != 2 or len(size) != 2:
        raise NKIError(
            "matmul-tile", f"tile_position {position} and tile_size {size}: both are pairs, or neither is given"
        )
    for at, extent, what in zip(position, size, ("row", "column"), strict=True):
        if integer(extent, "tile_size") not in (32, 64, 128):
            raise NKIError("matmul-tile", f"tile_size {size}: {what} sizes are 32, 64 and 128")
        if integer(at, "tile_position") % extent or not 0 <= at <= 128 - extent:
            raise NKIError("matmul-tile", f"tile_position {position}: the {what} is a multiple of {extent} below 128")
    # A row of the array reads the partition of that number, a column writes the partition of that number.
    if a.start_partition != position[0]:
        raise NKIError(
            "matmul-tile", f"stationary starts at partition {a.start_partition}, the tile at row {position[0]}"
        )
    if dst.start_partition != position[1]:
        raise NKIError(
            "matmul-tile", f"dst starts at partition {dst.start_partition}, the tile at column {position[1]}"
        )
    return size


def _pair(value, what: str) -> tuple:
    if not isinstance(value, (tuple, list)):
        raise NKIError("matmul-tile", f"{what} is a pair (row, column), not {value!r}")
    return tuple(value)


def _double_row(perf_mode) -> bool:
    # nki-library passes the values of the enumeration, too.
    if perf_mode not in (*PerfMode, *(mode.value for mode in PerfMode)):
        raise NKIError("perf-mode", f"perf_mode is a nisa.matmul_perf_mode, not {perf_mode!r}")
    return perf_mode in (PerfMode.double_row, PerfMode.double_row.value)


def _check_double_row(a: Tensor, b: Tensor, columns: int, is_transpose) -> None:
    for what, t in (("stationary", a), ("moving", b)):
        if t.ndim < 3 or t.shape[1] != 2:
            raise NKIError("double-row", f"double_row contracts a first free dimension of 2, {what} is {t.shape}")
        if not t.dtype.startswith("float8"):
            raise NKIError("double-row", f"double_row multiplies float8, {what} is {t.dtype}")
    if columns != 128 or is_transpose:
        raise NKIError("double-row", "double_row goes with neither column tiles nor transposes")


def _check_transposed_dtype(dst: Tensor, data: Tensor, what: str) -> None:
    """What the Tensor engine transposes bit for bit."""
    if dst.dtype != data.dtype:
        raise NKIError("dtype", f"a transpose keeps the dtype: {what} is {data.dtype}, dst {dst.dtype}")
    if dtypes.itemsize(data.dtype) == 1:
        # It yields 16-bit elements; which bits of them count is described for no dtype of NKI.
        raise NKIError("dtype", f"the Tensor engine does not transpose {data.dtype}, {what} must have 2 or 4 bytes")


def _flat(t: Tensor, double: bool = False) -> np.ndarray:
    """[K, free] in fp32; with double_row [2 K, free]."""
    rows = t.shape[0] * (2 if double else 1)
    return dtypes.to_float32(t.array().reshape(rows, -1))


def _unwritten_columns(t: Tensor, double: bool) -> np.ndarray | None:
    """Per free element: is all of its column unwritten? A column of which a part is unwritten is refused."""
    unwritten = t.unwritten()
    if unwritten is None:
        return None
    unwritten = unwritten.reshape(t.shape[0] * (2 if double else 1), -1)
    columns = unwritten.all(axis=0)
    if (unwritten & ~columns).any():
        t.check_filled()
    return columns


# Flags of ``Storage.written``: what an element of PSUM holds, for the Tensor engine that may add to it.
_MATMUL, _FOREIGN = 1, 2


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

    ``tile_position``, ``tile_size``: (row, column) and (rows, columns) of the part of the array that works; it
    reads the partitions of its rows and writes those of its columns.

    ``perf_mode`` double_row: float8 operands ``[K, 2, free]``, summed over both leading dimensions.

    ``is_stationary_onezero``, ``is_moving_onezero``: the operand holds zeros and ones, which makes fp32 faster.

    ``is_transpose``: moving is the identity, dst is stationary.T bit for bit.
    """
    if is_transpose:
        _transpose(dst, stationary)
        dst.written()[...] = _MATMUL
        return
    for what, t, said in (("stationary", stationary, is_stationary_onezero), ("moving", moving, is_moving_onezero)):
        if said and not (((values := _flat(t)) == 0) | (values == 1)).all():
            raise NKIError("matmul-onezero", f"is_{what}_onezero, and {t!r} holds other values than 0 and 1")
    double = _double_row(perf_mode)
    with np.errstate(all="ignore"):
        rows, columns = _unwritten_columns(stationary, double), _unwritten_columns(moving, double)
        product = operands.like(_flat(stationary, double).T @ _flat(moving, double), dst)
        flags = dst.written()
        if accumulate is False or (accumulate is None and not flags.any()):
            dst.target()[...] = product
        else:
            _may_accumulate(dst, flags, accumulate)
            array = dst.array()
            array += product
    if rows is not None or columns is not None:
        unwritten = np.zeros((dst.shape[0], dst.free_size), bool)
        unwritten |= False if rows is None else rows[:, None]
        unwritten |= False if columns is None else columns
        dst.forget(unwritten)
    flags[...] = _MATMUL


def _may_accumulate(dst: Tensor, flags: np.ndarray, accumulate) -> None:
    """What dst holds is the sum of a matmul, all of it."""
    if (flags == _FOREIGN).any():
        raise NKIError(
            "accumulate-foreign",
            f"another engine wrote {dst!r} after a matmul did: adding to that is undefined; start a new sum with "
            "accumulate=False or a new tensor",
        )
    if not flags.all():
        if accumulate is True:
            raise NKIError("accumulate-unset", f"accumulate=True on {dst!r}, which no matmul has started")
        raise NKIError(
            "accumulate-mixed",
            f"{dst!r} was written by a matmul in part: one instruction cannot add there and overwrite elsewhere",
        )


def _transpose(dst: Tensor, data: Tensor) -> None:
    unwritten = data.unwritten()
    dst.target()[...] = operands.like(data.array().reshape(data.shape[0], -1).T, dst)
    if unwritten is not None:
        dst.forget(unwritten.reshape(data.shape[0], -1).T)


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
        dst.written()[...] = _MATMUL
