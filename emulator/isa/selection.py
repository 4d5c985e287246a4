"""Instructions that select or search: by a predicate, by position, by value."""

from __future__ import annotations

from math import prod

import numpy as np

from .. import dtypes
from ..errors import NKIError
from ..operators import Op
from ..table import instruction
from ..tensor import Tensor, integer
from . import operands
from .accumulators import check_reduction, reduce_into
from .enums import reduce_cmd as ReduceCmd
from .operands import PSUM, SBUF

_COMPARISONS = ("equal", "not_equal", "greater", "greater_equal", "less", "less_equal")
_FP32_MIN = float(np.finfo(np.float32).min)


def _comparison(op, what: str, names=_COMPARISONS) -> None:
    if not isinstance(op, Op) or op.name not in names:
        raise NKIError("op", f"{what} is one of {', '.join('nl.' + name for name in names)}, not {op!r}")


def _predicate(predicate, other, dst: Tensor, what: str, names: tuple[str, ...]) -> None:
    """An integer mask of the shape of dst, not in PSUM together with what it selects."""
    operands.same_shape(dst, predicate=operands.on_chip(predicate, "predicate"))
    if predicate.dtype not in names:
        raise NKIError("predicate-dtype", f"predicate is one of {', '.join(names)}, it is {predicate.dtype}")
    if isinstance(other, Tensor) and other.buffer is PSUM and predicate.buffer is PSUM:
        raise NKIError("both-psum", f"{what} and predicate are both in PSUM")


# -- by a predicate -------------------------------------------------------------------------------------


def _check_tensor_copy_predicated(dst, src, predicate, reverse_pred=False, name=None):
    operands.destination(dst, sink=False)
    if isinstance(src, Tensor):
        operands.same_shape(dst, src=operands.on_chip(src, "src"))
        if src.dtype != dst.dtype:
            raise NKIError("dtype", f"a predicated copy keeps the dtype: src is {src.dtype}, dst {dst.dtype}")
    elif not operands.is_number(src):
        raise NKIError("operand", f"src is a tile or a number, not {type(src).__name__}")
    _predicate(predicate, src, dst, "src", ("uint8", "uint16", "uint32"))


@instruction(_check_tensor_copy_predicated)
def tensor_copy_predicated(dst, src, predicate, reverse_pred=False, name=None):
    """``dst = src`` where the predicate is not 0 (``reverse_pred``: where it is 0); dst stays elsewhere.

    dst [P, F] in SBUF or PSUM; src a tile of the same dtype and size, or a number; predicate uint8, uint16, uint32.
    """
    chosen = operands.like(predicate.array(), dst) != 0
    if reverse_pred:
        chosen = ~chosen
    array = dst.array()
    unwritten = None
    if isinstance(src, Tensor):
        values = operands.like(src.array(), dst)
        if (unwritten := src.unwritten()) is not None:
            unwritten = operands.like(unwritten, dst) & chosen
    else:
        dtypes.store(value := np.empty((), array.dtype), np.float32(src))
        values = np.broadcast_to(value, dst.shape)
    # An unwritten predicate does no harm where both choices are equal.
    undecided = predicate.unwritten()
    if undecided is not None:
        undecided = operands.like(undecided, dst) & (array != values)
    array[chosen] = values[chosen]
    if dst.storage.filled is not True:
        dst.filled()[chosen] = True
    dst.forget(unwritten)
    dst.forget(undecided)
    operands.not_a_sum(dst)


def _check_select_reduce(
    dst, predicate, on_true, on_false, reduce_res=None, reduce_cmd=ReduceCmd.idle, reduce_op=None,
    reverse_pred=False, name=None,
):  # fmt: skip
    operands.destination(dst, sink=False)
    operands.same_shape(dst, on_true=operands.on_chip(on_true, "on_true"))
    if on_true.dtype in ("int32", "uint32"):
        raise NKIError("dtype", f"on_true is {on_true.dtype}, which select_reduce does not take")
    operands.column(on_false, "on_false", dst, float32=False)
    _predicate(predicate, on_true, dst, "on_true", ("int8", "uint8", "int16", "uint16"))
    check_reduction(
        dst, reduce_op, ("maximum",), reduce_res, reduce_cmd,
        (ReduceCmd.idle, ReduceCmd.reset_reduce, ReduceCmd.reduce), optional_op=True,
    )  # fmt: skip


@instruction(_check_select_reduce)
def select_reduce(
    dst, predicate, on_true, on_false, reduce_res=None, reduce_cmd=ReduceCmd.idle, reduce_op=None,
    reverse_pred=False, name=None,
):  # fmt: skip
    """``dst = on_true if predicate else on_false``, with the maximum per partition if asked for. Vector engine.

    dst, on_true [P, F]; on_false a number or ``(P, 1)``; predicate an 8-bit or 16-bit integer tile.
    """
    chosen = operands.like(predicate.load(), dst) != 0
    values = np.where(
        ~chosen if reverse_pred else chosen, operands.read(on_true, dst), operands.read_column(on_false, dst)
    )
    operands.write(dst, values)
    reduce_into("vector", "maximum", values, on_true, reduce_res, reduce_cmd)


# -- by position ----------------------------------------------------------------------------------------


def affine(pattern, offset, channel_multiplier, dst: Tensor) -> np.ndarray:
    """``[P, counts...]``: offset + p * channel_multiplier + sum(step_k * i_k), int64."""
    values = np.int64(offset) + np.arange(dst.shape[0], dtype=np.int64) * channel_multiplier
    for step, count in pattern:
        values = values[..., None] + np.arange(count, dtype=np.int64) * step
    return values


def check_affine(dst: Tensor, pattern, offset, channel_multiplier) -> None:
    """A pattern of 1 to 4 [step, count] that makes one int32 for every element of dst."""
    if not isinstance(pattern, (tuple, list)) or not all(isinstance(p, (tuple, list)) and len(p) == 2 for p in pattern):
        raise NKIError("iota", f"a pattern is [[step, count], ...], not {pattern!r}")
    if not 1 <= len(pattern) <= 4:
        raise NKIError("iota", f"pattern {pattern} has {len(pattern)} dimensions, the limit is 4")
    # Lowest and highest value: offset and steps, each at the end where it counts.
    low = high = operands.immediate_or_register(offset, "offset")
    steps = [(integer(step, "a step"), integer(count, "a count")) for step, count in pattern]
    for step, count in [*steps, (integer(channel_multiplier, "channel_multiplier"), dst.shape[0])]:
        if count < 1:
            raise NKIError("iota", f"pattern {pattern}: counts are positive")
        low, high = low + min(0, step * (count - 1)), high + max(0, step * (count - 1))
    if low < -(2**31) or high >= 2**31:
        raise NKIError("iota", f"values from {low} to {high} leave int32, in which GpSimd computes them")
    count = prod(count for _, count in steps)
    if count != dst.free_size:
        raise NKIError("elements-differ", f"pattern {pattern} makes {count} values, dst holds {dst.free_size}")


def _check_iota(dst, pattern, offset=0, channel_multiplier=0, name=None):
    operands.destination(dst, (SBUF,))
    check_affine(dst, pattern, offset, channel_multiplier)


@instruction(_check_iota)
def iota(dst, pattern, offset=0, channel_multiplier=0, name=None):
    """``dst[p, i...] = offset + p * channel_multiplier + sum(step_k * i_k)`` in int32. GpSimd.

    offset: an int or a register.
    """
    values = affine(pattern, operands.immediate_or_register(offset, "offset"), channel_multiplier, dst)
    operands.write(dst, operands.like(values.astype(np.int32), dst))


def _check_affine_select(
    dst, pattern, channel_multiplier, on_true_tile, on_false_value, cmp_op=None, offset=0, name=None
):
    operands.destination(dst, (SBUF,))
    operands.same_shape(dst, on_true_tile=operands.on_chip(on_true_tile, "on_true_tile", (SBUF,)))
    check_affine(dst, pattern, offset, channel_multiplier)
    if cmp_op is not None:
        _comparison(cmp_op, "cmp_op")
    if not operands.is_number(on_false_value):
        raise NKIError("immediate", f"on_false_value is a number, not {type(on_false_value).__name__}")


@instruction(_check_affine_select)
def affine_select(dst, pattern, channel_multiplier, on_true_tile, on_false_value, cmp_op=None, offset=0, name=None):
    """``dst = on_true_tile`` where ``cmp_op(v, 0)``, else on_false_value; v as iota computes it. GpSimd, SBUF.

    cmp_op: default nl.equal. Only what is selected of on_true_tile needs to be written before.
    """
    values = affine(pattern, operands.immediate_or_register(offset, "offset"), channel_multiplier, dst)
    chosen = operands.like(getattr(np, "equal" if cmp_op is None else cmp_op.name)(values, 0), dst)
    if (unwritten := on_true_tile.unwritten()) is not None:
        operands.carry(operands.like(unwritten, dst) & chosen, dst)
    tile, result = operands.like(on_true_tile.array(), dst), np.empty(dst.shape, dst.array().dtype)
    dtypes.store(fill := np.empty((), result.dtype), np.float32(on_false_value))
    result[...] = fill
    picked = tile[chosen]
    if tile.dtype == result.dtype:
        result[chosen] = picked
    else:
        converted = np.empty(picked.shape, result.dtype)
        dtypes.store(converted, dtypes.to_float32(picked))
        result[chosen] = converted
    operands.write(dst, result)


def _check_range_select(
    dst, on_true_tile, comp_op0, comp_op1, bound0, bound1, reduce_cmd=ReduceCmd.reset_reduce, reduce_res=None,
    reduce_op=None, range_start=0, on_false_value=_FP32_MIN, name=None,
):  # fmt: skip
    operands.destination(dst, sink=False)
    operands.same_shape(dst, on_true_tile=operands.on_chip(on_true_tile, "on_true_tile"))
    if not dtypes.is_float(on_true_tile.dtype):
        raise NKIError("dtype", f"on_true_tile is {on_true_tile.dtype}, range_select takes floats")
    for op, what in ((comp_op0, "comp_op0"), (comp_op1, "comp_op1")):
        _comparison(op, what, ("equal", "less", "less_equal", "greater", "greater_equal"))
    for bound, what in ((bound0, "bound0"), (bound1, "bound1")):
        operands.column(operands.tensor(bound, what), what, dst)
    if not operands.is_number(on_false_value) or np.float32(on_false_value) != np.float32(_FP32_MIN):
        raise NKIError("range-select", f"on_false_value must be the lowest fp32, {_FP32_MIN}, it is {on_false_value}")
    first = integer(range_start, "range_start")
    if first < -(2**24) or first + dst.free_size > 2**24:
        raise NKIError("range-select", f"indices {first} to {first + dst.free_size}: exact in fp32 up to 2**24")
    check_reduction(
        dst, reduce_op, ("maximum",), reduce_res, reduce_cmd, (ReduceCmd.reset_reduce, ReduceCmd.reduce),
        optional_op=True,
    )  # fmt: skip


@instruction(_check_range_select)
def range_select(
    dst, on_true_tile, comp_op0, comp_op1, bound0, bound1, reduce_cmd=ReduceCmd.reset_reduce, reduce_res=None,
    reduce_op=None, range_start=0, on_false_value=_FP32_MIN, name=None,
):  # fmt: skip
    """``dst = on_true_tile`` where ``(i comp_op0 bound0) & (i comp_op1 bound1)``, else the lowest fp32. Vector.

    i = range_start + position in the partition; bounds ``(P, 1)`` fp32. The maximum per partition goes to
    reduce_res ``(P, 1)``. 16-bit results hold -inf where the lowest fp32 is meant.
    """
    index = np.float32(range_start) + np.arange(dst.free_size, dtype=np.float32).reshape(dst.shape[1:])
    chosen = comp_op0.alu(index, operands.read_column(bound0, dst)) * comp_op1.alu(
        index, operands.read_column(bound1, dst)
    )
    values = np.where(chosen != 0, dtypes.to_float32(operands.like(on_true_tile.array(), dst)), np.float32(_FP32_MIN))
    if (unwritten := on_true_tile.unwritten()) is not None and (operands.like(unwritten, dst) & (chosen != 0)).any():
        on_true_tile.check_filled()
    operands.write(dst, values)
    reduce_into("vector", "maximum", values, on_true_tile, reduce_res, reduce_cmd)


# -- by value -------------------------------------------------------------------------------------------


def _searched(data, what: str) -> Tensor:
    t = operands.on_chip(data, what)
    if not 8 <= t.free_size <= 16384:
        raise NKIError("search-size", f"{what} has {t.free_size} elements per partition, 8 to 16384 are searched")
    return t


def _eight(value, what: str, like: Tensor) -> Tensor:
    t = operands.on_chip(value, what)
    if t.shape[0] != like.shape[0]:
        raise NKIError("partitions-differ", f"{what} has {t.shape[0]} partitions, the data {like.shape[0]}")
    if t.free_size != 8:
        raise NKIError("elements-differ", f"{what} has {t.free_size} elements per partition, it must have 8")
    return t


def _index_dtype(t: Tensor, what: str) -> None:
    if t.dtype not in ("uint16", "uint32"):
        raise NKIError("dtype", f"{what} is uint16 or uint32, it is {t.dtype}")


def _rows(t: Tensor, dst: Tensor) -> np.ndarray:
    """[P, elements per partition] in fp32, a copy where t is a view."""
    operands.carry_whole(t, dst)
    return dtypes.to_float32(t.array()).reshape(t.shape[0], -1)


def _check_max8(dst, src, name=None):
    _searched(src, "src")
    operands.destination(dst, sink=False)
    _eight(dst, "dst", src)


@instruction(_check_max8)
def max8(dst, src, name=None):
    """dst [P, 8]: the 8 largest of each partition of src, descending, equal ones repeated; compared in fp32."""
    values = _rows(src, dst)
    largest = np.partition(values, values.shape[1] - 8, axis=1)[:, -8:]
    operands.write(dst, operands.like(np.sort(largest, axis=1)[:, ::-1], dst))


def _check_nc_find_index8(dst, data, vals, name=None):
    _searched(data, "data")
    operands.destination(dst, sink=False)
    _index_dtype(_eight(dst, "dst", data), "dst")
    _eight(vals, "vals", data)


@instruction(_check_nc_find_index8)
def nc_find_index8(dst, data, vals, name=None):
    """dst [P, 8]: where each of the 8 values of vals stands in data first; equal values take successive places.

    All bits are set where a value is not there.
    """
    wanted, values = _rows(vals, dst), _rows(data, dst)
    free = np.ones(values.shape, bool)
    found = np.empty(wanted.shape, np.int64)
    rows = np.arange(len(values))
    for slot in range(8):
        match = (values == wanted[:, slot : slot + 1]) & free
        first = match.argmax(axis=1)
        there = match[rows, first]
        free[rows[there], first[there]] = False
        found[:, slot] = np.where(there, first, -1)
    _write_indices(dst, found)


def _write_indices(dst: Tensor, found: np.ndarray) -> None:
    dtype = dtypes.NUMPY[dst.dtype]
    operands.write(dst, operands.like(np.where(found < 0, np.iinfo(dtype).max, found).astype(dtype), dst))


def _check_nc_match_replace8(dst, data, vals, imm, dst_idx=None, name=None):
    _searched(data, "data")
    operands.destination(dst, sink=False)
    operands.same_shape(dst, data=data)
    _eight(vals, "vals", data)
    if not operands.is_number(imm):
        raise NKIError("immediate", f"imm is a number, not {type(imm).__name__}")
    if dst_idx is not None:
        operands.destination(dst_idx, sink=False)
        _index_dtype(_eight(dst_idx, "dst_idx", data), "dst_idx")


@instruction(_check_nc_match_replace8)
def nc_match_replace8(dst, data, vals, imm, dst_idx=None, name=None):
    """dst = data with the first occurrence of each of the 8 values of vals replaced by imm.

    dst_idx [P, 8]: where they stood, all bits set where a value is not there. The last slot is served first.
    """
    wanted, values = _rows(vals, dst), _rows(data, dst).copy()
    found = np.empty(wanted.shape, np.int64)
    rows = np.arange(len(values))
    for slot in reversed(range(8)):
        match = values == wanted[:, slot : slot + 1]
        first = match.argmax(axis=1)
        there = match[rows, first]
        values[rows[there], first[there]] = np.float32(imm)
        found[:, slot] = np.where(there, first, -1)
    operands.write(dst, operands.like(values, dst))
    if dst_idx is not None:
        _write_indices(dst_idx, found)


def _check_nonzero_with_count(dst, src, index_offset=0, padding_val=-1, name=None):
    operands.destination(dst, (SBUF,), sink=False)
    operands.on_chip(src, "src", (SBUF,))
    operands.no_alias(dst, src=src)
    if src.dtype not in ("float32", "int32") or dst.dtype != "int32":
        raise NKIError("dtype", f"src is float32 or int32 and dst int32, got {src.dtype} and {dst.dtype}")
    if dst.shape[0] != src.shape[0]:
        raise NKIError("partitions-differ", f"src has {src.shape[0]} partitions, dst has {dst.shape[0]}")
    if dst.free_size != src.free_size + 1:
        raise NKIError("elements-differ", f"src has {src.free_size} elements, dst has {dst.free_size}: one more needed")
    for value, last, what in ((index_offset, src.free_size, "index_offset"), (padding_val, 0, "padding_val")):
        if not -(2**31) <= integer(value, what) < 2**31 - last:
            raise NKIError("immediate", f"what {what} makes must fit int32")


@instruction(_check_nonzero_with_count)
def nonzero_with_count(dst, src, index_offset=0, padding_val=-1, name=None):
    """Per partition 0, 16, ..., 112: the positions of what is not zero, padding, and last their number. GpSimd.

    src [P, T] fp32 or int32, dst [P, T + 1] int32; the other partitions of dst stay.
    """
    for p in range(0, src.shape[0], 16):
        row, out = src[p : p + 1], dst[p : p + 1]
        operands.carry_whole(row, out)
        found = np.flatnonzero(row.array().reshape(-1))
        values = np.full(dst.free_size, padding_val, np.int32)
        values[: found.size] = found + index_offset
        values[-1] = found.size
        operands.write(out, operands.like(values, out))
