"""DMA: ``dma_copy``."""

from __future__ import annotations

import numpy as np

from .. import dtypes
from ..errors import NKIError
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
    if dst.size != src.size:
        raise NKIError("elements-differ", f"src has {src.size} elements {src.shape}, dst has {dst.size} {dst.shape}")
    if not dst.storage.writable:
        raise NKIError("read-only", f"dst is the kernel argument {dst.name!r}, which this launch may not write")
    if dst.repeats():
        raise NKIError("dst-overlap", f"dst writes one element several times: strides {dst.strides} of {dst.shape}")
    indirect = [t.indirect for t in (dst, src) if t.indirect is not None]
    if not isinstance(dge_mode, DgeMode):
        raise NKIError("dge-mode", f"dge_mode is a nisa.dge_mode, not {dge_mode!r}")
    operands.one_of_engines(engine, Engine.sync, Engine.scalar)
    if engine is not Engine.unknown and dge_mode is not DgeMode.hwdge:
        raise NKIError(
            "dge-mode", f"engine {engine.name} starts the descriptors of hwdge only, dge_mode is {dge_mode.name}"
        )
    if dge_mode is DgeMode.none and indirect:
        raise NKIError("dge-mode", "dge_mode none has static descriptors, a run-time address needs swdge or hwdge")
    if dge_mode is DgeMode.hwdge:
        if src.dtype != dst.dtype:
            raise NKIError("dtype", f"hwdge does not convert, src is {src.dtype} and dst {dst.dtype}")
        if any(address.per_partition for address in indirect):
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
    if dst.size == 0:
        return
    skip = oob_mode is OobMode.skip
    src, dst = src.moved(skip), dst.moved(skip)
    if src is None or dst is None:
        return
    operands.no_alias(dst, src=src)
    source, target = _resolve(src, skip), _resolve(dst, skip)
    if isinstance(source, _Rows) or isinstance(target, _Rows):
        _convert_rows(target, source)
    else:
        _convert(target, source)


class _Rows:
    """Rows of a tensor picked by index: partition p moves ``array[index[p]]``, where ``inside[p]``."""

    def __init__(self, array: np.ndarray, index: np.ndarray, inside: np.ndarray):
        self.array = array
        self.index = index
        self.inside = inside


def _resolve(t: Tensor, skip: bool):
    """The elements of a pattern: an array, or ``_Rows`` of a gather or scatter."""
    if t.indirect is None:
        return t.array()
    index = t.indirect.index.array().reshape(-1).astype(np.int64)
    rows = max(0, (t.row - t.offset - t.extent(1) - 1) // t.indirect.scale + 1)
    inside = (index >= 0) & (index < rows)
    if not inside.all() and not skip:
        bad = index[~inside][0]
        raise NKIError("indirect-range", f"index {bad} of {t.name or 'the tensor'} is outside its {rows} rows")
    array = t.window((rows, *t.shape[1:]), (t.indirect.scale, *t.strides[1:]), t.offset)
    return _Rows(array, index, inside)


def _convert(dst: np.ndarray, src: np.ndarray) -> None:
    """Copy by element order; bits where the dtypes agree, through fp32 otherwise."""
    if src.shape != dst.shape:
        src = src.reshape(dst.shape)
    if src.dtype == dst.dtype:
        dst[...] = src
    else:
        dtypes.store(dst, dtypes.to_float32(src))


def _convert_rows(target, source) -> None:
    """A DMA with a gather, a scatter or both: row p moves where the indices of both sides are inside."""
    picked = [side for side in (target, source) if isinstance(side, _Rows)]
    count = picked[0].index.size
    moves = np.ones(count, bool)
    for side in picked:
        if side.index.size != count:
            raise NKIError("indirect", f"gather of {side.index.size} rows into a scatter of {count}")
        moves &= side.inside
    moved = source.array[source.index[moves]] if isinstance(source, _Rows) else source.reshape(count, -1)[moves]
    if isinstance(target, _Rows):
        values = np.empty((len(moved), *target.array.shape[1:]), target.array.dtype)
        _convert(values, moved)
        target.array[target.index[moves]] = values
    elif moves.all():
        _convert(target, moved)
    else:
        # The shape of dst need not have one row per index: skip in a flat copy, and write that back.
        rows = target.reshape(count, -1).copy()
        values = np.empty((len(moved), rows.shape[1]), rows.dtype)
        _convert(values, moved)
        rows[moves] = values
        target[...] = rows.reshape(target.shape)
