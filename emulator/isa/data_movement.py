"""DMA: ``dma_copy``, ``dma_transpose``, ``dma_compute``."""

from __future__ import annotations

import numpy as np

from .. import dtypes, races
from ..errors import NKIError
from ..machine import core
from ..operators import Op
from ..table import instruction
from ..tensor import MemoryRegion, Tensor
from . import operands
from .enums import dge_mode as DgeMode
from .enums import engine as Engine
from .enums import oob_mode as OobMode


def _in_dma_reach(value, what: str) -> Tensor:
    t = operands.tensor(value, what)
    if t.buffer is MemoryRegion.psum:
        raise NKIError("buffer", f"{what} is in PSUM, which a DMA does not reach")
    if t.runtime is not None and t.runtime.per_partition:
        index = t.runtime.index
        if index.shape[0] != t.shape[0] or index.free_size != 1:
            raise NKIError("indirect", f"{what}: vector_offset is ({t.shape[0]}, 1), its shape is {index.shape}")
    return t


def _destination(dst: Tensor) -> None:
    if not dst.storage.writable:
        raise NKIError("read-only", f"dst is the kernel argument {dst.name!r}, which this launch may not write")
    operands.written_once(dst)


def _mode(oob_mode, dge_mode=DgeMode.unknown, priority=None) -> DgeMode:
    # The release notes of 0.3 refuse the numbers of enumerations, but nki-library passes these to the compiler.
    if isinstance(dge_mode, int) and not isinstance(dge_mode, bool) and 0 <= dge_mode <= 3:
        dge_mode = DgeMode(dge_mode)
    if not isinstance(dge_mode, DgeMode):
        raise NKIError("dge-mode", f"dge_mode is a nisa.dge_mode, not {dge_mode!r}")
    if not isinstance(oob_mode, OobMode):
        raise NKIError("oob-mode", f"oob_mode is nisa.oob_mode.error or skip, not {oob_mode!r}")
    if priority is not None:
        raise NKIError("target", f"priority={priority!r}: trn3 has DMA priorities, {core().target.name} has not")
    return dge_mode


def _check_dma_copy(
    dst, src, oob_mode=OobMode.error, dge_mode=DgeMode.unknown, engine=Engine.unknown, name=None, priority=None
):
    _in_dma_reach(dst, "dst"), _in_dma_reach(src, "src")
    dge_mode = _mode(oob_mode, dge_mode, priority)
    if dst.size != src.size:
        raise NKIError("elements-differ", f"src has {src.size} elements {src.shape}, dst has {dst.size} {dst.shape}")
    _destination(dst)
    indirect = [t.runtime for t in (dst, src) if t.runtime is not None]
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


@instruction(_check_dma_copy)
def dma_copy(
    dst, src, oob_mode=OobMode.error, dge_mode=DgeMode.unknown, engine=Engine.unknown, name=None, priority=None
):
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
    if src.runtime is None and dst.runtime is None:
        if _same_view(src, dst):
            # Kernels end with a copy of a tensor to itself, to wait for what was written; it moves nothing.
            return
        # What was never written may be moved, not used: the copy holds nothing then either.
        unwritten = src.unwritten()
        stored(dst, _noted(src).array())
        dst.forget(unwritten)
    else:
        _copy_rows(dst, src, skip)


def loaded(t: Tensor) -> np.ndarray:
    """The elements of a view that a DMA reads, all of which were written before."""
    return _noted(t).load()


def _noted(t: Tensor) -> Tensor:
    if t.storage.accesses is not None:
        races.note_read(core().index, t)
    return t


def stored(t: Tensor, values: np.ndarray) -> None:
    """Write the view, by element order; bits where the dtypes agree, through fp32 otherwise."""
    if t.storage.accesses is not None:
        races.note_write(core().index, t)
    _convert(t.target(), values)


class _Rows:
    """Rows of a tensor picked by index: partition p moves ``window[index[p]]``, where ``inside[p]``."""

    def __init__(self, t: Tensor, skip: bool, index: np.ndarray | None = None):
        if index is None:
            index = t.runtime.index.load().reshape(-1)
        index = index.astype(np.int64)
        rows = max(0, (t.row - t.offset - t.extent(1) - 1) // t.runtime.scale + 1)
        self.inside = (index >= 0) & (index < rows)
        if not self.inside.all() and not skip:
            bad = index[~self.inside][0]
            raise NKIError("indirect-range", f"index {bad} of {t.name or 'the tensor'} is outside its {rows} rows")
        self.index = index
        strides = (t.runtime.scale, *t.strides[1:])
        self.window = Tensor(t.storage, t.dtype, (rows, *t.shape[1:]), strides, t.offset)

    def load(self, moves: np.ndarray) -> np.ndarray:
        """The rows that ``moves`` names."""
        index, storage = self.index[moves], self.window.storage
        if storage.filled is not True:
            self.window.check_filled(self.window.filled()[index])
        if storage.accesses is not None:
            races.note_read(core().index, self.window, np.unique(index))
        return self.window.array()[index]

    def store(self, moves: np.ndarray, values: np.ndarray) -> None:
        index, storage = self.index[moves], self.window.storage
        if storage.accesses is not None:
            races.note_write(core().index, self.window, np.unique(index))
        self.window.array()[index] = values
        if storage.filled is not True:
            self.window.filled()[index] = True


def _rows(t: Tensor, skip: bool) -> _Rows | None:
    return None if t.runtime is None else _Rows(t, skip)


def _convert(dst: np.ndarray, src: np.ndarray) -> None:
    """Copy by element order; bits where the dtypes agree, through fp32 otherwise."""
    if src.shape != dst.shape:
        src = src.reshape(dst.shape)
    if src.dtype == dst.dtype:
        dst[...] = src
    else:
        dtypes.store(dst, dtypes.to_float32(src))


def _converted(values: np.ndarray, shape, dtype) -> np.ndarray:
    result = np.empty(shape, dtype)
    _convert(result, values)
    return result


def _copy_rows(dst: Tensor, src: Tensor, skip: bool) -> None:
    """A DMA with a gather, a scatter or both: row p moves where the indices of both sides are inside."""
    source, target = _rows(src, skip), _rows(dst, skip)
    picked = [side for side in (target, source) if side is not None]
    count = picked[0].index.size
    if picked[-1].index.size != count:
        raise NKIError("indirect", f"gather of {picked[-1].index.size} rows into a scatter of {count}")
    moves = np.logical_and.reduce([side.inside for side in picked])
    if not moves.any():
        return
    if source is not None:
        moved = source.load(moves)
    elif moves.all():
        moved = loaded(src).reshape(count, -1)
    else:
        moved = _split(src, count).load(moves)
    if target is not None:
        target.store(moves, _converted(moved, (len(moved), *target.window.shape[1:]), target.window.array().dtype))
    elif moves.all():
        stored(dst, moved)
    else:
        rows = _split(dst, count)
        rows.store(moves, _converted(moved, (len(moved), *rows.window.shape[1:]), rows.window.array().dtype))


class _Part(_Rows):
    """The side of a gather or scatter without indices: its p-th of ``count`` equal parts is row p."""

    def __init__(self, window: Tensor):
        self.window = window
        self.index = np.arange(window.shape[0])


def _split(t: Tensor, count: int) -> _Part:
    """``t`` as ``count`` rows, where its shape allows that without a copy."""
    if t.shape[0] == count:
        return _Part(t)
    merged = Tensor(t.storage, t.dtype, t.shape, t.strides, t.offset)
    steps = merged.steps()
    if not steps:
        steps = ((1, 1),)
    (stride, size), rest = steps[0], steps[1:]
    if size % count:
        raise NKIError("indirect", f"{t!r} does not divide into the {count} rows of the other side")
    shape, strides = (count, size // count), (stride * (size // count), stride)
    return _Part(
        Tensor(t.storage, t.dtype, (*shape, *(n for _, n in rest)), (*strides, *(s for s, _ in rest)), t.offset)
    )


# -- dma_transpose --------------------------------------------------------------------------------------

_AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}


def _check_dma_transpose(
    dst, src, axes=None, dge_mode=DgeMode.unknown, oob_mode=OobMode.error, name=None, priority=None
):
    operands.written_once(operands.dma_tile(dst, "dst"))
    operands.tensor(src, "src")
    if src.buffer is MemoryRegion.psum:
        raise NKIError("buffer", "src is in PSUM, which a DMA does not reach")
    dge_mode = _mode(oob_mode, dge_mode, priority)
    legal = _AXES.get(src.ndim)
    if legal is None or (axes is not None and (not isinstance(axes, (tuple, list)) or tuple(axes) != legal)):
        raise NKIError("transpose-axes", f"axes {axes} of {src.shape}: one of {', '.join(map(str, _AXES.values()))}")
    if dst.dtype != src.dtype:
        raise NKIError("dtype", f"a transpose keeps the dtype: src is {src.dtype}, dst {dst.dtype}")
    size = dtypes.itemsize(src.dtype)
    if size not in (2, 4):
        raise NKIError("dtype", f"DMA transposes elements of 2 or 4 bytes, {src.dtype} has {size}")
    wanted = tuple(src.shape[axis] for axis in legal)
    if dst.shape != wanted:
        raise NKIError("transpose-shape", f"dst is {dst.shape}, the transpose of {src.shape} is {wanted}")
    if dst.overlaps(src):
        raise NKIError("alias", f"dst {dst!r} overlaps src {src!r}: a transpose is not done in place")
    if src.runtime is not None:
        _check_gather_transpose(src, dge_mode, size)
    elif dge_mode is DgeMode.hwdge:
        first, last = src.shape[0], src.shape[-1]
        rows = first == 16 if src.ndim == 2 else first in (1, 2, 4, 8, 16) and first * src.shape[-2] % 16 == 0
        if not rows or last > 128 or size != 2:
            raise NKIError(
                "transpose-hwdge",
                f"hwdge transposes 2-byte elements, 16 rows (or 1, 2, 4, 8, 16 that with the last but one dimension "
                f"make a multiple of 16) and at most 128 columns; src is {src.shape} {src.dtype}",
            )
    elif dge_mode is DgeMode.swdge:
        # The page allows unknown and hwdge; its parameter list, the DGE guide and nki-library also have none.
        raise NKIError("dge-mode", "dma_transpose has dge_mode unknown, none or hwdge, not swdge")


def _check_gather_transpose(src: Tensor, dge_mode, size: int) -> None:
    """The documented limits of the indirect form."""
    index = src.runtime.index
    if not src.runtime.per_partition or src.buffer.on_chip:
        raise NKIError("transpose-gather", "an indirect transpose takes a vector_offset into HBM")
    if dge_mode not in (DgeMode.unknown, DgeMode.swdge):
        raise NKIError("dge-mode", f"an indirect transpose has dge_mode unknown or swdge, not {dge_mode.name}")
    rows, columns = index.shape[0], index.free_size
    for legal, what in (
        (size == 2, f"elements of 2 bytes, {src.dtype} has {size}"),
        (index.dtype == "uint32", f"uint32 indices, got {index.dtype}"),
        (src.shape[-1] <= 128, f"at most 128 columns, src is {src.shape}"),
        (src.shape[0] % 16 == 0, f"a multiple of 16 rows, src is {src.shape}"),
        (src.ndim < 4 or 1 in src.shape[1:3], f"a middle dimension of 1, src is {src.shape}"),
        (16 <= rows <= 128 and rows % 16 == 0, f"16 to 128 index rows, a multiple of 16, got {index.shape}"),
        (columns == 1 or rows == 128, f"128 index rows where there are several columns, got {index.shape}"),
    ):
        if not legal:
            raise NKIError("transpose-gather", f"an indirect transpose needs {what}")


@instruction(_check_dma_transpose)
def dma_transpose(dst, src, axes=None, dge_mode=DgeMode.unknown, oob_mode=OobMode.error, name=None, priority=None):
    """``dst = src`` with the first and the last dimension swapped, bit for bit; dst in SBUF.

    With a ``vector_offset`` row i of src is row ``index.T.flatten()[i]`` of the tensor.
    """
    axes = _AXES[src.ndim]
    if src.runtime is None:
        unwritten = src.unwritten()
        stored(dst, _noted(src).array().transpose(axes))
        dst.forget(None if unwritten is None else unwritten.transpose(axes))
        return
    index = src.runtime.index.load().reshape(src.runtime.index.shape[0], -1).T.reshape(-1)[: src.shape[0]]
    source = _Rows(src, oob_mode is OobMode.skip, index)
    moves = source.inside
    gathered = Tensor(dst.storage, dst.dtype, *_permuted(dst, axes), dst.offset)  # rows of src, in dst
    _Part(gathered).store(moves, source.load(moves))


def _permuted(t: Tensor, axes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides under the transpose, which is its own inverse."""
    return tuple(t.shape[a] for a in axes), tuple(t.strides[a] for a in axes)


# -- dma_compute ----------------------------------------------------------------------------------------


def _check_dma_compute(dst, srcs, reduce_op, scales=None, unique_indices=True, oob_mode=OobMode.error, name=None):
    _in_dma_reach(dst, "dst")
    _destination(dst)
    _mode(oob_mode)
    if not isinstance(srcs, (list, tuple)) or not 1 <= len(srcs) <= 16:
        raise NKIError("dma-compute", "srcs is a list of 1 to 16 tensors")
    for i, src in enumerate(srcs):
        if _in_dma_reach(src, f"srcs[{i}]").size != dst.size:
            raise NKIError("elements-differ", f"srcs[{i}] has {src.size} elements, dst has {dst.size}")
    if not isinstance(reduce_op, Op) or reduce_op.name != "add":
        raise NKIError("dma-compute", f"reduce_op is nl.add, not {reduce_op!r}")
    listed = isinstance(scales, (list, tuple))
    if scales is not None and (not listed or len(scales) != len(srcs) or any(scale != 1.0 for scale in scales)):
        raise NKIError("dma-compute", f"scales {scales}: one 1.0 per source")
    indirect = [t for t in (dst, *srcs) if t.runtime is not None]
    if any(not t.runtime.per_partition for t in indirect):
        raise NKIError("dma-compute", "a run-time address here is a vector_offset")
    if not indirect:
        return
    if len(srcs) != 2 or not unique_indices:
        raise NKIError("dma-compute", "a gather or scatter adds two sources, with unique_indices=True")
    others = [src for src in srcs if not _same_view(src, dst)]
    if len(others) != 1 or (dst.runtime is None) == (others[0].runtime is None):
        raise NKIError("dma-compute", "one of the sources is dst, and one side of the addition has a vector_offset")


def _same_view(a: Tensor, b: Tensor) -> bool:
    """The same elements, found through the same indices."""
    if (a.storage, a.dtype, a.shape, a.strides, a.offset) != (b.storage, b.dtype, b.shape, b.strides, b.offset):
        return False
    if a.runtime is None or b.runtime is None:
        return a.runtime is b.runtime
    x, y = a.runtime.index, b.runtime.index
    return x is y or _same_view(x, y)


@instruction(_check_dma_compute)
def dma_compute(dst, srcs, reduce_op, scales=None, unique_indices=True, oob_mode=OobMode.error, name=None):
    """``dst = sum(srcs)`` in fp32, rounded once.

    With two sources of which one is dst, and a ``vector_offset`` on dst or on the other one, it adds to the rows
    that the indices name. An index twice in such an addition is refused: the order is not defined.
    """
    with np.errstate(all="ignore"):
        if dst.runtime is None and all(src.runtime is None for src in srcs):
            for src in srcs:
                operands.no_alias(dst, src=src)
            total = dtypes.to_float32(loaded(srcs[0])).reshape(dst.shape)
            for src in srcs[1:]:
                total = total + dtypes.to_float32(loaded(src)).reshape(dst.shape)
            stored(dst, total)
            return
        other = next(src for src in srcs if not _same_view(src, dst))
        picked = _Rows(dst if dst.runtime is not None else other, oob_mode is OobMode.skip)
        moves, count = picked.inside, picked.index.size
        rows = _split(other if dst.runtime is not None else dst, count)
        target, source = (picked, rows) if dst.runtime is not None else (rows, picked)
        if target is picked and np.unique(picked.index[moves]).size != np.count_nonzero(moves):
            raise NKIError("scatter-unique", "two indices of a scatter that adds are equal")
        shape = (np.count_nonzero(moves), *target.window.shape[1:])
        total = dtypes.to_float32(target.load(moves)) + dtypes.to_float32(source.load(moves)).reshape(shape)
        target.store(moves, _converted(total, shape, target.window.array().dtype))
