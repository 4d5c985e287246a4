"""Instructions that move data between partitions or by an index, on chip: shuffle and gathers."""

from __future__ import annotations

import numpy as np

from ..errors import NKIError
from ..table import instruction
from ..tensor import Tensor, integer
from . import operands
from .operands import SBUF

_KEEP = 255


def _check_nc_stream_shuffle(dst, src, shuffle_mask, name=None):
    operands.destination(dst, sink=False)
    operands.on_chip(src, "src")
    if dst.dtype != src.dtype:
        raise NKIError("dtype", f"a shuffle keeps the dtype: src is {src.dtype}, dst {dst.dtype}")
    if dst.free_size != src.free_size:
        raise NKIError("elements-differ", f"src has {src.free_size} elements per partition, dst has {dst.free_size}")
    if not isinstance(shuffle_mask, (list, tuple)) or len(shuffle_mask) != 32:
        raise NKIError("shuffle-mask", "shuffle_mask is a list of 32 partitions")
    for entry in shuffle_mask:
        if not 0 <= integer(entry, "an element of shuffle_mask") < 32 and entry != _KEEP:
            raise NKIError("shuffle-mask", f"shuffle_mask names partition {entry}: 0 to 31, or 255 to keep dst")
    active = -(-max(src.shape[0], dst.shape[0]) // 32) * 32
    step = {32: 32, 64: 64}.get(active, 128)
    for what, t in (("src", src), ("dst", dst)):
        if t.start_partition % step:
            raise NKIError(
                "start-partition",
                f"{what} starts at partition {t.start_partition}; a shuffle of {active} partitions starts at a "
                f"multiple of {step}",
            )


@instruction(_check_nc_stream_shuffle)
def nc_stream_shuffle(dst, src, shuffle_mask, name=None):
    """Within each 32 partitions ``dst[i] = src[shuffle_mask[i]]``; 255 leaves ``dst[i]`` as it is. Vector engine.

    dst and src in SBUF or PSUM, of one dtype and equal elements per partition; their partitions may differ in
    number. In place is legal. src must hold every partition that is read.
    """
    mask = np.array(shuffle_mask)
    to = np.arange(dst.shape[0])
    entry = mask[to % 32]
    moves = entry != _KEEP
    to, source = to[moves], (to // 32 * 32 + entry)[moves]
    if to.size == 0:
        return
    if source.max() >= src.shape[0]:
        raise NKIError("shuffle-mask", f"shuffle_mask reads partition {source.max()} of src, which has {src.shape[0]}")
    rows = src.array().reshape(src.shape[0], -1)[source]
    unwritten = src.unwritten()
    dst.array()[to] = rows.reshape(len(to), *dst.shape[1:])
    if dst.storage.filled is not True:
        if to.size == dst.shape[0]:
            dst.fill()
        else:
            dst.filled()[to] = True
    if unwritten is not None:
        mask = np.zeros((dst.shape[0], dst.free_size), bool)
        mask[to] = unwritten.reshape(src.shape[0], -1)[source]
        dst.forget(mask)
    operands.not_a_sum(dst)


def _check_nc_n_gather(dst, data, indices, name=None):
    operands.destination(dst, (SBUF,), sink=False)
    operands.on_chip(data, "data", (SBUF,)), operands.on_chip(indices, "indices", (SBUF,))
    _keeps_dtype(dst, data)
    if indices.dtype != "uint32":
        raise NKIError("index-operand", f"indices are uint32, got {indices.dtype}")
    operands.same_shape(dst, indices=indices)
    if data.shape[0] != dst.shape[0]:
        raise NKIError("partitions-differ", f"data has {data.shape[0]} partitions, dst has {dst.shape[0]}")
    if dst.overlaps(data):
        raise NKIError("alias", f"dst {dst!r} overlaps data {data!r}: a gather is not done in place")


def _keeps_dtype(dst: Tensor, data: Tensor) -> None:
    if dst.dtype != data.dtype:
        raise NKIError("dtype", f"a gather keeps the dtype: the data is {data.dtype}, dst {dst.dtype}")


def _inside(index: np.ndarray, size: int) -> None:
    if index.size and (index.min() < 0 or index.max() >= size):
        bad = index.max() if index.max() >= size else index.min()
        raise NKIError("indirect-range", f"index {bad} is outside the {size} elements of a partition")


@instruction(_check_nc_n_gather)
def nc_n_gather(dst, data, indices, name=None):
    """``dst[p, j] = data[p].flatten()[indices[p, j]]``; indices uint32, all in SBUF. GpSimd."""
    index = indices.load().reshape(dst.shape[0], -1).astype(np.int64)
    _inside(index, data.free_size)
    rows = data.array().reshape(dst.shape[0], -1)
    unwritten = data.unwritten()
    if unwritten is not None:
        operands.carry(np.take_along_axis(unwritten.reshape(rows.shape), index, axis=1), dst)
    operands.write(dst, operands.like(np.take_along_axis(rows, index, axis=1), dst))


def _check_local_gather(dst, src_buffer, index, num_elem_per_idx=1, num_valid_indices=None, name=None):
    operands.destination(dst, (SBUF,), sink=False)
    operands.on_chip(src_buffer, "src_buffer", (SBUF,)), operands.on_chip(index, "index", (SBUF,))
    _keeps_dtype(dst, src_buffer)
    if index.dtype != "uint16":
        raise NKIError("index-operand", f"index is uint16, it is {index.dtype}")
    count = src_buffer.shape[0]
    if count % 16 or index.shape[0] != count or dst.shape[0] != count:
        raise NKIError(
            "local-gather",
            f"src_buffer, index and dst have one multiple of 16 partitions, got {count}, {index.shape[0]} and "
            f"{dst.shape[0]}",
        )
    if num_elem_per_idx not in (1, 2, 4, 8, 16, 32):
        raise NKIError("local-gather", f"num_elem_per_idx is 1, 2, 4, 8, 16 or 32, not {num_elem_per_idx!r}")
    most = 16 * index.free_size
    valid = most if num_valid_indices is None else integer(num_valid_indices, "num_valid_indices")
    if not 0 < valid <= min(most, 4096):
        raise NKIError("local-gather", f"{valid} indices per 16 partitions; index holds {most}, the limit is 4096")
    if valid * num_elem_per_idx != dst.free_size:
        # Elsewhere num_elem_per_idx is ignored on the device (known issue of NKI 0.6).
        raise NKIError(
            "elements-differ", f"{valid} * {num_elem_per_idx} elements are gathered, dst has {dst.free_size}"
        )
    if dst.overlaps(src_buffer):
        raise NKIError("alias", f"dst {dst!r} overlaps src_buffer {src_buffer!r}: a gather is not done in place")


@instruction(_check_local_gather)
def local_gather(dst, src_buffer, index, num_elem_per_idx=1, num_valid_indices=None, name=None):
    """Every 16 partitions gather the same elements: those that their 16 partitions of index name. GpSimd, SBUF.

    The indices of a group are read down the partitions first; each names ``num_elem_per_idx`` elements that follow
    each other in the flattened partition.
    """
    rows = src_buffer.array().reshape(src_buffer.shape[0], -1)
    ids = index.load().reshape(index.shape[0], -1)
    result = np.empty((dst.shape[0], dst.free_size), rows.dtype)
    unwritten = src_buffer.unwritten()
    holes = np.zeros(result.shape, bool)
    for first in range(0, dst.shape[0], 16):
        start = ids[first : first + 16].reshape(-1, order="F")[:num_valid_indices].astype(np.int64)
        elements = (start[:, None] + np.arange(num_elem_per_idx)).reshape(-1)
        _inside(elements, rows.shape[1])
        result[first : first + 16] = rows[first : first + 16, elements]
        if unwritten is not None:
            holes[first : first + 16] = unwritten.reshape(rows.shape)[first : first + 16, elements]
    operands.carry(holes if holes.any() else None, dst)
    operands.write(dst, operands.like(result, dst))
