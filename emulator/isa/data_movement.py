"""DMA: ``dma_copy``."""

from __future__ import annotations

import numpy as np

from .. import dtypes
from ..errors import NKIError
from ..machine import core
from ..table import instruction
from ..tensor import MemoryRegion, Tensor
from . import operands
from .enums import dge_mode as DgeMode
from .enums import engine as Engine
from .enums import oob_mode as OobMode


def _check_dma_copy(dst, src, oob_mode=OobMode.error, dge_mode=DgeMode.unknown, engine=Engine.unknown, name=None):
    for what, t in (("dst", operands.tensor(dst, "dst")), ("src", operands.tensor(src, "src"))):
        if t.buffer is MemoryRegion.psum:
            raise NKIError("buffer", f"{what} is in PSUM, which a DMA does not reach")
        if t.buffer.on_chip and t.shape[0] > core().target.partitions:
            raise NKIError("partition-limit", f"{what} has {t.shape[0]} partitions")
    if dst.size != src.size:
        raise NKIError("elements-differ", f"src has {src.size} elements {src.shape}, dst has {dst.size} {dst.shape}")
    if not dst.storage.writable:
        raise NKIError("read-only", f"dst is the kernel argument {dst.name!r}, which this launch may not write")
    if engine not in (Engine.unknown, Engine.sync, Engine.scalar, Engine.gpsimd):
        raise NKIError("engine", f"engine {engine.name} starts no DMA; it is sync, scalar or gpsimd")
    if dge_mode is DgeMode.hwdge:
        if src.dtype != dst.dtype:
            raise NKIError("dtype", f"hwdge does not convert, src is {src.dtype} and dst {dst.dtype}")
        if any(t.indirect is not None and t.indirect.per_partition for t in (dst, src)):
            raise NKIError("dge-mode", "hwdge does not gather or scatter; vector_offset needs swdge")
    if not isinstance(oob_mode, OobMode):
        raise NKIError("oob-mode", f"oob_mode is nisa.oob_mode.error or skip, not {oob_mode!r}")


@instruction(_check_dma_copy)
def dma_copy(dst, src, oob_mode=OobMode.error, dge_mode=DgeMode.unknown, engine=Engine.unknown, name=None):
    """``dst = src`` between HBM and SBUF, either way or within one.

    Only the element counts must agree: elements pair in row-major order of each pattern. Equal dtypes are
    copied bit for bit, others converted through fp32.

    With ``scalar_offset`` or ``vector_offset`` in a pattern the address is read at run time. An index outside
    the tensor is an error, or with ``oob_mode.skip`` leaves the destination of that index as it was.
    """
    skip = oob_mode is OobMode.skip
    source, source_valid = _resolve(src, skip)
    target, target_valid = _resolve(dst, skip)
    if source is None or target is None:
        return
    if source_valid is None and target_valid is None:
        _convert(target if isinstance(target, np.ndarray) else dst.array(), source)
        return
    _convert_rows(dst, target, target_valid, src, source, source_valid)


class _Rows:
    """Rows of a tensor picked by index: ``array[index[p]]`` is what partition p moves."""

    def __init__(self, array: np.ndarray, index: np.ndarray):
        self.array = array
        self.index = index


def _resolve(t: Tensor, skip: bool):
    """The elements of a pattern: an array, or ``_Rows`` with the mask of the indices that are inside.

    None when a scalar index is outside and skipped.
    """
    if t.indirect is None:
        return t.array(), None
    index = t.indirect.index.array().reshape(-1).astype(np.int64)
    size = t.row * (t.storage.shape[0] if t.buffer.on_chip else 1)
    extent = sum(s * (n - 1) for s, n in zip(t.strides[1:], t.shape[1:], strict=True))
    if not t.indirect.per_partition:
        # On chip the index moves along the free dimensions, so it must not leave the partition.
        end = t.row - (t.offset % t.row) if t.buffer.on_chip else size - t.offset
        extent += 0 if t.buffer.on_chip else t.strides[0] * (t.shape[0] - 1)
        moved = int(index[0]) * t.indirect.scale
        if index[0] < 0 or moved + extent >= end:
            if skip:
                return None, None
            raise NKIError("indirect-range", f"index {index[0]} moves the pattern outside {t!r}")
        return t.window(t.shape, t.strides, t.offset + moved), None
    rows = max(0, (size - t.offset - extent - 1) // t.indirect.scale + 1) if t.size else 0
    valid = (index >= 0) & (index < rows)
    if not valid.all() and not skip:
        bad = index[~valid][0]
        raise NKIError("indirect-range", f"index {bad} of {t.name or 'the tensor'} is outside its {rows} rows")
    array = t.window((rows, *t.shape[1:]), (t.indirect.scale, *t.strides[1:]), t.offset)
    return _Rows(array, index), valid


def _convert(dst: np.ndarray, src: np.ndarray) -> None:
    """Copy by element order; bits where the dtypes agree, through fp32 otherwise."""
    if src.shape != dst.shape:
        src = src.reshape(dst.shape)
    if src.dtype == dst.dtype:
        dst[...] = src
    else:
        dtypes.store(dst, dtypes.to_float32(src))


def _convert_rows(dst, target, target_valid, src, source, source_valid) -> None:
    """A DMA with a gather, a scatter or both: row p moves where the indices of both sides are inside."""
    count = (src if source_valid is not None else dst).shape[0]
    valid = np.ones(count, bool)
    for mask in (source_valid, target_valid):
        if mask is not None:
            if mask.size != count:
                raise NKIError("indirect", f"gather of {count} rows into a scatter of {mask.size}")
            valid &= mask

    def rows(side):
        return side.array[side.index[valid]] if isinstance(side, _Rows) else side.reshape(count, -1)[valid]

    moved = rows(source)
    if isinstance(target, _Rows):
        values = np.empty((len(moved), *target.array.shape[1:]), target.array.dtype)
        _convert(values, moved)
        target.array[target.index[valid]] = values
        return
    whole = target.shape[0] == count
    if valid.all():
        _convert(target, moved)
    elif whole:
        values = np.empty((len(moved), *target.shape[1:]), target.dtype)
        _convert(values, moved)
        target[valid] = values
    else:
        raise NKIError("indirect", f"skipped rows need a dst of {count} rows, its shape is {dst.shape}")
