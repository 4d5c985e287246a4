"""Checks and reads that instructions share.

Rules of access patterns: NKI deep dive ``nki-aps`` and the ``trainium2_arch`` guide.
"""

from __future__ import annotations

from math import prod

import numpy as np

from .. import dtypes
from ..errors import NKIError
from ..machine import core
from ..registers import VirtualRegister
from ..tensor import MemoryRegion, Tensor, integer
from .enums import engine as Engine

SBUF = MemoryRegion.sbuf
PSUM = MemoryRegion.psum


def tensor(value, what: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise NKIError("operand", f"{what} is a tensor, not {type(value).__name__}")
    value.check_inside()
    return value


def on_chip(value, what: str, regions=(SBUF, PSUM)) -> Tensor:
    """``value`` as an operand of a compute engine: its memory, partitions and size are legal."""
    t = tensor(value, what)
    if t.storage.region not in regions:
        names = " or ".join(r.value.upper() for r in regions)
        raise NKIError("buffer", f"{what} must be in {names}, it is in {t.buffer.value}")
    chip = core().target
    count = t.shape[0]
    start = t.start_partition
    if start and start % (32 if count <= 32 else 64 if count <= 64 else 128):
        raise NKIError(
            "start-partition",
            f"{what} has {count} partitions from {start}; more than 64 start at 0, 33 to 64 at 0 or 64, "
            "up to 32 at a multiple of 32",
        )
    if len(t.shape) - 1 > chip.free_dims:
        raise NKIError("free-dims", f"{what} has {len(t.shape) - 1} free dimensions, the limit is {chip.free_dims}")
    psum = t.storage.region is PSUM
    limit = chip.psum_elements if psum else chip.sbuf_elements
    size = t.free_size
    if size > limit:
        # nki-library reads more from PSUM where a pattern repeats what is there: those count once.
        if psum:
            size = prod(n for n, stride in zip(t.shape[1:], t.strides[1:], strict=True) if stride)
        if size > limit:
            raise NKIError("free-size", f"{what} has {size} elements per partition, the limit is {limit}")
    if len(t.strides) > 1 and max(t.strides[1:]) > chip.max_stride:
        stride = max((stride for stride, _ in t.steps(1)), default=0)
        if stride > chip.max_stride:
            raise NKIError("stride", f"{what} steps over {stride} elements, the limit is {chip.max_stride}")
    return t


def destination(value, regions=(SBUF, PSUM), sink: bool = True) -> Tensor:
    """``value`` as the result of a compute engine. ``sink``: a stride of 0 is legal, the last element stays."""
    t = on_chip(value, "dst", regions)
    if t.repeats(sink):
        raise NKIError("dst-overlap", f"dst writes one element several times: strides {t.strides} of {t.shape}")
    return t


def dma_tile(value, what: str) -> Tensor:
    """``value`` as a tile in SBUF that a DMA reads or writes: from any partition, unlike a compute engine."""
    t = tensor(value, what)
    if t.storage.region is not SBUF:
        raise NKIError("buffer", f"{what} must be in SBUF, it is in {t.buffer.value}")
    return t


def written_once(dst: Tensor) -> None:
    """Every element of ``dst`` is another one."""
    if dst.repeats():
        raise NKIError("dst-overlap", f"dst writes one element several times: strides {dst.strides} of {dst.shape}")


def no_alias(dst: Tensor, **sources: Tensor) -> None:
    """In place means the same elements in the same order; any other overlap depends on the engine's timing."""
    for what, t in sources.items():
        if dst.storage is t.storage and dst.conflicts(t):
            raise NKIError("alias", f"dst {dst!r} overlaps {what} {t!r} of the same memory in another order")


def same_shape(dst: Tensor, **sources: Tensor) -> None:
    """Equal partitions and equal elements per partition; there is no broadcasting between operands."""
    no_alias(dst, **sources)
    for what, t in sources.items():
        if t.shape[0] != dst.shape[0]:
            raise NKIError("partitions-differ", f"{what} has {t.shape[0]} partitions, dst has {dst.shape[0]}")
        if t.free_size != dst.free_size:
            raise NKIError(
                "elements-differ",
                f"{what} has {t.free_size} elements per partition {t.shape}, dst has {dst.free_size} {dst.shape}; "
                "operands do not broadcast",
            )


def column(value, what: str, dst: Tensor, float32: bool = True) -> None:
    """``value`` is an immediate number or a ``(P, 1)`` tile, in fp32 where the compiler demands it."""
    if isinstance(value, Tensor):
        t = on_chip(value, what)
        if t.shape[0] != dst.shape[0] or t.free_size != 1:
            raise NKIError("column", f"{what} is a number or a ({dst.shape[0]}, 1) tile, its shape is {t.shape}")
        if float32 and t.dtype != "float32":
            raise NKIError("column-dtype", f"{what} must be float32, it is {t.dtype}")
    elif not is_number(value):
        raise NKIError("column", f"{what} is a number or a ({dst.shape[0]}, 1) tile, not {type(value).__name__}")


def is_number(value) -> bool:
    """Can ``value`` be an immediate?"""
    if isinstance(value, int):
        try:
            float(value)  # fp32 makes inf of what it cannot hold, but of no integer beyond the floats of Python
        except OverflowError:
            raise NKIError("immediate", f"an integer of {value.bit_length()} bits is no immediate") from None
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def immediate_or_register(value, what: str) -> int:
    """An int known when the kernel is built, or what a register holds now."""
    return value.read() if isinstance(value, VirtualRegister) else integer(value, what)


def one_of_engines(engine, *allowed: Engine) -> None:
    # An int equals a member of the enumeration, but NKI refuses it.
    if not isinstance(engine, Engine) or (engine is not Engine.unknown and engine not in allowed):
        names = ", ".join(e.name for e in allowed)
        raise NKIError("engine", f"engine {getattr(engine, 'name', engine)} cannot do this; it is one of {names}")


def no_psum_on_gpsimd(engine, *operands: Tensor) -> None:
    if engine is Engine.gpsimd and any(t.buffer is PSUM for t in operands):
        raise NKIError("gpsimd-psum", "GpSimd cannot access PSUM")


def like(array: np.ndarray, dst: Tensor) -> np.ndarray:
    """An operand in the shape of ``dst``: ranks may differ where the element counts agree."""
    return array if array.shape == dst.shape else array.reshape(dst.shape)


def read(t: Tensor, dst: Tensor) -> np.ndarray:
    """An operand in fp32 and in the shape of ``dst``."""
    if t.storage.filled is not True:
        carry(t.unwritten(), dst)
    return like(dtypes.to_float32(t.array()), dst)


def carry(unwritten: np.ndarray | None, dst: Tensor) -> None:
    """Note elements of an operand that nothing wrote; ``write`` makes those of dst unwritten, too.

    So a kernel may compute on all of a tile of which it loaded a part, as long as it does not use the rest.
    """
    if unwritten is not None:
        running = core()
        mask = unwritten.reshape(dst.shape) if unwritten.size == dst.size else np.broadcast_to(unwritten, dst.shape)
        running.unwritten = mask if running.unwritten is None else running.unwritten | mask


def carry_whole(t: Tensor, dst: Tensor, first: int = 1) -> None:
    """As ``carry``, for an instruction that combines the elements of ``t`` over its dimensions from ``first``.

    Where all that is combined is unwritten, so is the result; where a part is, the instruction is refused.
    """
    unwritten = None if t.storage.filled is True else t.unwritten()
    if unwritten is None:
        return
    combined = unwritten.reshape(*unwritten.shape[:first], -1)
    whole = combined.all(axis=-1)
    if (combined.any(axis=-1) != whole).any():
        t.check_filled()
    carry(whole if whole.size == dst.size else whole.reshape(-1, *(1,) * (dst.ndim - 1)), dst)


def settle(dst: Tensor) -> None:
    """After a write: what it made of unwritten elements is unwritten."""
    running = core()
    if running.unwritten is not None:
        dst.forget(running.unwritten)
        running.unwritten = None


def read_column(value, dst: Tensor):
    """An immediate as fp32, or a column that broadcasts over the free dimensions of ``dst``."""
    if isinstance(value, Tensor):
        shape = (dst.shape[0],) + (1,) * (len(dst.shape) - 1)
        if value.storage.filled is not True and (unwritten := value.unwritten()) is not None:
            carry(unwritten.reshape(shape), dst)
        return dtypes.to_float32(value.array()).reshape(shape)
    with np.errstate(over="ignore"):
        return np.float32(value)


def not_a_sum(dst: Tensor) -> None:
    """Note that an engine other than the Tensor engine wrote to PSUM, where a matmul may have: see nc_matmul."""
    if dst.storage.written is not None and dst.storage.written.any():
        flags = dst.written()
        flags[...] = np.where(flags == 0, 0, 2)


def _is_sink(t: Tensor) -> bool:
    return 0 in t.strides and any(s == 0 and n > 1 for s, n in zip(t.strides, t.shape, strict=True))


def write(dst: Tensor, values: np.ndarray) -> None:
    """Convert once and store."""
    array = dst.target()
    not_a_sum(dst)
    if _is_sink(dst):
        last = tuple(slice(-1, None) if s == 0 else slice(None) for s in dst.strides)
        array, values = array[last], values[last]
    dtypes.store(array, values)
    settle(dst)


def binary(dst: Tensor, ufunc, a, b) -> None:
    """``dst = ufunc(a, b)`` in fp32; without a temporary where dst is fp32."""
    if dst.dtype == "float32" and isinstance(ufunc, np.ufunc) and not _is_sink(dst):
        with np.errstate(all="ignore"):
            ufunc(a, b, out=dst.target())
        not_a_sum(dst)
        settle(dst)
    else:
        with np.errstate(all="ignore"):
            values = ufunc(a, b)
        write(dst, values)
