"""Element-wise instructions and reductions of the Vector, Scalar and GpSimd engines.

Every one converts its inputs to fp32, computes in fp32 and rounds once at the store, but for copies of equal
dtype (bit for bit), bit operations (raw integers) and ``tensor_tensor`` of int32 or uint32 (exact).
"""

from __future__ import annotations

from math import prod

import numpy as np

from .. import dtypes
from ..errors import NKIError
from ..machine import core
from ..operators import Op
from ..table import instruction
from ..tensor import Tensor
from . import operands
from .accumulators import check_reduction, reduce_into
from .enums import engine as Engine
from .enums import reduce_cmd as ReduceCmd
from .operands import PSUM, SBUF

_COMPUTE = (Engine.vector, Engine.scalar, Engine.gpsimd)


def _alu(op, what: str, dst: Tensor, *inputs) -> Op:
    """``op`` is an ALU operator that fits the dtypes of its operands."""
    if not isinstance(op, Op) or op.alu is None:
        raise NKIError("op", f"{what} is an ALU operator such as nl.add, not {op!r}")
    if op.kind == "bitvec":
        size = dtypes.itemsize(dst.dtype)
        bits = 8 * size
        for t in (dst, *inputs):
            if isinstance(t, Tensor):
                if not dtypes.is_integer(t.dtype) or dtypes.itemsize(t.dtype) != size:
                    raise NKIError("bitvec-dtype", f"{op!r} acts on raw integers of {size} bytes, {t!r} is {t.dtype}")
            elif not isinstance(t, (int, np.integer)) or not -(1 << (bits - 1)) <= t < 1 << bits:
                raise NKIError("bitvec-dtype", f"{op!r} acts on integers of {bits} bits, got {t!r}")
    return op


def _arithmetic(op, what: str) -> None:
    if not isinstance(op, Op) or op.alu is None or op.kind == "bitvec":
        raise NKIError("op", f"{what} is an arithmetic operator such as nl.add, not {op!r}")


def _two_operands(op: Op, what: str) -> None:
    if op.unary:
        raise NKIError("op", f"{what} {op!r} has one operand; here it takes two tensors")


def _not_both_psum(a: Tensor, b: Tensor, names: str) -> None:
    if a.buffer is PSUM and b.buffer is PSUM:
        raise NKIError("both-psum", f"{names} are both in PSUM")


# -- memset, copies -------------------------------------------------------------------------------------


def _check_memset(dst, value, engine=Engine.unknown, name=None):
    operands.destination(dst)
    operands.one_of_engines(engine, *_COMPUTE)
    operands.no_psum_on_gpsimd(engine, dst)
    if not operands.is_number(value) and not (dst.dtype == "bool" and isinstance(value, bool)):
        raise NKIError("immediate", f"value is a number, not {type(value).__name__}")
    if dst.dtype == "bool" and value not in (0, 1):
        raise NKIError("immediate", f"value {value!r} into bool: 0 or 1 is needed")
    stored = _immediate(value, dst.dtype)
    if dtypes.is_integer(dst.dtype):
        # NKI refuses floats here since 0.3; 0.0 passes, which nki-library stores into uint32.
        if (not isinstance(value, (int, np.integer)) and value != 0) or stored != value:
            # An immediate travels in fp32: above 2**24 not every integer arrives.
            raise NKIError("immediate", f"value {value!r} into {dst.dtype}: an integer in range and exact in fp32")
    elif dst.dtype.startswith("float8") and np.isfinite(value) and not np.isfinite(stored.astype(np.float32)):
        raise NKIError("immediate", f"value {value!r} overflows {dst.dtype}, what that stores is not documented")


def _immediate(value, dtype: str):
    """``value`` as fp32, then as ``dtype``."""
    stored = np.empty((), dtypes.stored(dtype))
    with np.errstate(over="ignore"):
        dtypes.store(stored, np.float32(value))
    return stored


@instruction(_check_memset)
def memset(dst, value, engine=Engine.unknown, name=None):
    """Fill ``dst`` with a number."""
    operands.write(dst, np.broadcast_to(_immediate(value, dst.dtype), dst.shape))


def _check_tensor_copy(dst, src, engine=Engine.unknown, name=None):
    operands.destination(dst)
    operands.same_shape(dst, src=operands.on_chip(src, "src"))
    operands.one_of_engines(engine, *_COMPUTE)
    operands.no_psum_on_gpsimd(engine, dst, src)


@instruction(_check_tensor_copy)
def tensor_copy(dst, src, engine=Engine.unknown, name=None):
    """``dst = src`` on chip: the bits where the dtypes agree, else through fp32.

    Either side may have a ``scalar_offset``.
    """
    if dst.runtime is not None or src.runtime is not None:
        dst, src = dst.moved(), src.moved()
        operands.no_alias(dst, src=src)
    # What was never written may be moved, not used: the copy holds nothing then either.
    unwritten = src.unwritten()
    values = operands.like(src.array(), dst)
    operands.write(dst, values if dst.dtype == src.dtype else dtypes.to_float32(values))
    dst.forget(unwritten)


# -- arithmetic -----------------------------------------------------------------------------------------


def _check_tensor_tensor(dst, data1, data2, op, engine=Engine.unknown, name=None):
    operands.destination(dst)
    a, b = operands.on_chip(data1, "data1"), operands.on_chip(data2, "data2")
    operands.same_shape(dst, data1=a, data2=b)
    _not_both_psum(a, b, "data1 and data2")
    _two_operands(_alu(op, "op", dst, a, b), "op")
    operands.one_of_engines(engine, Engine.vector, Engine.gpsimd)
    if op.name == "power":
        if engine is Engine.vector:
            raise NKIError("engine", "nl.power of two tensors runs on GpSimd only")
        engine = Engine.gpsimd
    operands.no_psum_on_gpsimd(engine, dst, a, b)


@instruction(_check_tensor_tensor)
def tensor_tensor(dst, data1, data2, op, engine=Engine.unknown, name=None):
    """``dst = data1 op data2``, element by element.

    All-int32 (or all-uint32) operands in SBUF are computed on GpSimd as exact integers, unless
    ``engine=vector``.
    """
    exact = (
        dst.dtype == data1.dtype == data2.dtype
        and dst.dtype in ("int32", "uint32")
        and engine is not Engine.vector
        and PSUM not in (dst.buffer, data1.buffer, data2.buffer)
    )
    if op.kind == "bitvec":
        a, b = (dtypes.raw(operands.like(t.load(), dst)) for t in (data1, data2))
        operands.write(dst, op.alu(a, b).view(dst.array().dtype))
    elif exact:
        a, b = (operands.like(t.load(), dst) for t in (data1, data2))
        if op.name == "power" and (b < 0).any():
            raise NKIError("int-power", f"{dst.dtype} to the power of {b.min()} is no integer")
        operands.write(dst, op.alu(a, b))
    else:
        operands.binary(dst, op.alu, operands.read(data1, dst), operands.read(data2, dst))


def _check_tensor_scalar(
    dst,
    data,
    op0,
    operand0,
    reverse0=False,
    op1=None,
    operand1=None,
    reverse1=False,
    engine=Engine.unknown,
    name=None,
):
    operands.destination(dst)
    operands.same_shape(dst, data=operands.on_chip(data, "data"))
    operands.one_of_engines(engine, *_COMPUTE)
    operands.no_psum_on_gpsimd(engine, dst, data)
    stages = [(op0, operand0, reverse0)] + ([(op1, operand1, reverse1)] if op1 is not None else [])
    for index, (op, operand, reverse) in enumerate(stages):
        _alu(op, f"op{index}", dst, data, operand)
        if op.unary and reverse:
            raise NKIError("op", f"reverse{index} with {op!r}, which has one operand")
        bits = 8 * dtypes.itemsize(dst.dtype)
        if op.name.endswith("_shift") and not isinstance(operand, Tensor) and not reverse and not 0 <= operand < bits:
            raise NKIError("shift", f"{op!r} by {operand}; {dst.dtype} has {bits} bits")
        operands.column(operand, f"operand{index}", dst, float32=op.kind == "arithmetic")
    if op1 is None and operand1 is not None:
        raise NKIError("op", f"operand1={operand1!r} without op1")
    if op1 is not None and op0.kind != op1.kind:
        raise NKIError("op", f"{op0!r} and {op1!r}: bit and arithmetic operators do not mix")
    names = [op.name for op, _, _ in stages]
    if engine is Engine.scalar and names not in (["multiply", "add"], ["multiply"], ["add"]):
        raise NKIError("engine", f"the Scalar engine does multiply, add, or multiply then add; not {names}")
    if engine is Engine.gpsimd and names != ["rsqrt"]:
        raise NKIError("engine", f"GpSimd does rsqrt only; not {names}")


@instruction(_check_tensor_scalar)
def tensor_scalar(
    dst,
    data,
    op0,
    operand0,
    reverse0=False,
    op1=None,
    operand1=None,
    reverse1=False,
    engine=Engine.unknown,
    name=None,
):
    """``dst = (data op0 operand0) op1 operand1``; an operand is a number or a ``(P, 1)`` fp32 tile.

    ``reverse`` swaps the sides of its operator.
    """
    if op0.kind == "bitvec":
        values = dtypes.raw(operands.like(data.load(), dst))
        values = _apply(op0, values, _raw_column(operand0, dst), reverse0)
        if op1 is not None:
            values = _apply(op1, values, _raw_column(operand1, dst), reverse1)
        operands.write(dst, values.view(dst.array().dtype))
        return
    values, scalar = operands.read(data, dst), operands.read_column
    if op1 is not None:
        with np.errstate(all="ignore"):
            values = _apply(op0, values, scalar(operand0, dst), reverse0)
        op0, operand0, reverse0 = op1, operand1, reverse1
    operand = scalar(operand0, dst)
    operands.binary(dst, op0.alu, *((operand, values) if reverse0 else (values, operand)))


def _raw_column(value, dst: Tensor):
    """An integer immediate or column as raw bits of the width of ``dst``."""
    if isinstance(value, Tensor):
        return dtypes.raw(value.load()).reshape((dst.shape[0],) + (1,) * (len(dst.shape) - 1))
    bits = 8 * dtypes.itemsize(dst.dtype)
    return np.dtype(f"u{bits // 8}").type(int(value) % (1 << bits))


def _apply(op: Op, a, b, reverse: bool):
    return op.alu(b, a) if reverse else op.alu(a, b)


def _check_scalar_tensor_tensor(dst, data, op0, operand0, op1, operand1, reverse0=False, reverse1=False, name=None):
    operands.destination(dst)
    a, b = operands.on_chip(data, "data"), operands.on_chip(operand1, "operand1")
    operands.same_shape(dst, data=a, operand1=b)
    _not_both_psum(a, b, "data and operand1")
    for op, what in ((op0, "op0"), (op1, "op1")):
        _arithmetic(op, what)
    _two_operands(op1, "op1")
    if op0.unary and reverse0:
        raise NKIError("op", f"reverse0 with {op0!r}, which has one operand")
    operands.column(operand0, "operand0", dst, float32=False)


@instruction(_check_scalar_tensor_tensor)
def scalar_tensor_tensor(dst, data, op0, operand0, op1, operand1, reverse0=False, reverse1=False, name=None):
    """``dst = (data op0 operand0) op1 operand1``; operand0 a number or ``(P, 1)`` of any dtype."""
    with np.errstate(all="ignore"):
        first = _apply(op0, operands.read(data, dst), operands.read_column(operand0, dst), reverse0)
    second = operands.read(operand1, dst)
    operands.binary(dst, op1.alu, *((second, first) if reverse1 else (first, second)))


# -- activation -----------------------------------------------------------------------------------------


def _check_activation(
    dst, op, data, bias=None, scale=1.0, reduce_op=None, reduce_res=None, reduce_cmd=ReduceCmd.idle, name=None
):
    operands.destination(dst)
    operands.same_shape(dst, data=operands.on_chip(data, "data"))
    if not isinstance(op, Op) or op.activation is None:
        raise NKIError("op", f"op is an activation function such as nl.exp, not {op!r}")
    if bias is not None:
        operands.column(bias, "bias", dst, float32=False)
    operands.column(scale, "scale", dst)
    check_reduction(
        dst, reduce_op, ("add",), reduce_res, reduce_cmd,
        (ReduceCmd.idle, ReduceCmd.reset, ReduceCmd.reduce, ReduceCmd.reset_reduce),
    )  # fmt: skip


@instruction(_check_activation)
def activation(
    dst, op, data, bias=None, scale=1.0, reduce_op=None, reduce_res=None, reduce_cmd=ReduceCmd.idle, name=None
):
    """``dst = op(data * scale + bias)`` on the Scalar engine.

    The device approximates the function piecewise; here it is NumPy's. With a ``reduce_cmd`` the sums of the fp32
    results per partition go to the registers of the engine, and from there to ``reduce_res`` (P, 1).
    """
    _activate(dst, op, data, bias, scale, reduce_res, reduce_cmd)


def _activate(dst, op, data, bias, scale, reduce_res, reduce_cmd) -> None:
    values = operands.read(data, dst)
    with np.errstate(all="ignore"):
        if isinstance(scale, Tensor) or scale != 1.0:
            values = values * operands.read_column(scale, dst)
        if bias is not None and (isinstance(bias, Tensor) or bias != 0.0):
            values = values + operands.read_column(bias, dst)
        values = op.activation(values)
    operands.write(dst, values)
    if reduce_res is not None or reduce_cmd is not ReduceCmd.idle:
        reduce_into("scalar", "add", values, data, reduce_res, reduce_cmd)


def _check_activation_reduce(dst, op, data, reduce_op, reduce_res, bias=None, scale=1.0, name=None):
    _check_activation(dst, op, data, bias, scale, reduce_op, reduce_res, ReduceCmd.reset_reduce)


@instruction(_check_activation_reduce)
def activation_reduce(dst, op, data, reduce_op, reduce_res, bias=None, scale=1.0, name=None):
    """``activation`` with ``reduce_cmd.reset_reduce``: its sums per partition in ``reduce_res``."""
    _activate(dst, op, data, bias, scale, reduce_res, ReduceCmd.reset_reduce)


def _check_reciprocal(dst, data, name=None):
    operands.destination(dst)
    operands.same_shape(dst, data=operands.on_chip(data, "data"))


@instruction(_check_reciprocal)
def reciprocal(dst, data, name=None):
    """``dst = 1 / data`` on the Vector engine, in fp32."""
    operands.binary(dst, np.divide, np.float32(1), operands.read(data, dst))


# -- reductions ---------------------------------------------------------------------------------


def _reduced_axes(data: Tensor, axis) -> tuple[int, ...]:
    axes = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    wanted = tuple(range(data.ndim - len(axes), data.ndim))
    # Compared as a set: what is no number has no order. Its size, too, lest an axis counts twice.
    if not axes or 0 in axes or len(set(axes)) != len(axes) or set(axes) != set(wanted):
        raise NKIError(
            "reduce-axis",
            f"axis {axis} of {data.shape}: the last contiguous free dimensions only, here {wanted}",
        )
    return wanted


def _check_tensor_reduce(dst, op, data, axis, negate=False, keepdims=False, name=None):
    operands.destination(dst)
    operands.on_chip(data, "data")
    if not _alu(op, "op", dst, data).reduce:
        raise NKIError("op", f"{op!r} is no reduction")
    if negate and op.kind == "bitvec":
        raise NKIError("op", f"negate with {op!r}")
    if dst.free_size > 1:  # a single result is written after everything was read
        operands.no_alias(dst, data=data)
    kept = prod(data.shape[1 : data.ndim - len(_reduced_axes(data, axis))])
    if dst.shape[0] != data.shape[0] or dst.free_size != kept:
        raise NKIError("elements-differ", f"dst {dst.shape} does not hold {kept} results of {data.shape[0]} partitions")


@instruction(_check_tensor_reduce)
def tensor_reduce(dst, op, data, axis, negate=False, keepdims=False, name=None):
    """Reduce the last free dimensions of ``data``, numbered by ``axis`` on ``data``. Vector engine."""
    axes = _reduced_axes(data, axis)
    operands.carry_whole(data, dst, data.ndim - len(axes))
    if op.kind == "bitvec":
        values = op.alu.reduce(dtypes.raw(data.array()), axis=axes)
        operands.write(dst, operands.like(values.view(dst.array().dtype), dst))
        return
    values = dtypes.to_float32(data.array())
    reduce = getattr(op.alu, "reduce", None)
    if reduce is None:  # logical operators: their result is 1.0 or 0.0
        values = getattr(np, op.name).reduce(values != 0, axis=axes).astype(np.float32)
    elif op.name == "subtract":
        # NumPy reduces "subtract" over one axis only: first element minus the rest.
        flat = values.reshape(*values.shape[: data.ndim - len(axes)], -1)
        values = np.subtract.reduce(flat, axis=-1)
    else:
        values = reduce(values, axis=axes)
    operands.write(dst, operands.like(-values if negate else values, dst))


def _check_tensor_scalar_reduce(
    dst, data, op0, operand0, reduce_op, reduce_res=None, reverse0=False, reduce_cmd=ReduceCmd.reset_reduce,
    reduce_init=None, reduce_res_negate=False, name=None,
):  # fmt: skip
    operands.destination(dst)
    operands.same_shape(dst, data=operands.on_chip(data, "data"))
    _arithmetic(op0, "op0")
    if reverse0:
        raise NKIError("not-supported", "reverse0 of tensor_scalar_reduce is documented as not supported yet")
    operands.column(0.0 if operand0 is None and op0.unary else operand0, "operand0", dst)
    check_reduction(
        dst, reduce_op, ("add", "subtract", "multiply", "maximum", "minimum"), reduce_res, reduce_cmd,
        (ReduceCmd.reset_reduce, ReduceCmd.reduce, ReduceCmd.load_reduce),
    )  # fmt: skip
    if (reduce_init is None) is (reduce_cmd is ReduceCmd.load_reduce):
        raise NKIError(
            "reduce-cmd", f"reduce_init={reduce_init!r} with reduce_cmd {reduce_cmd.name}: load_reduce takes it"
        )
    if reduce_init is not None:
        operands.column(reduce_init, "reduce_init", dst)


@instruction(_check_tensor_scalar_reduce)
def tensor_scalar_reduce(
    dst, data, op0, operand0, reduce_op, reduce_res=None, reverse0=False, reduce_cmd=ReduceCmd.reset_reduce,
    reduce_init=None, reduce_res_negate=False, name=None,
):  # fmt: skip
    """``dst = data op0 operand0``; its reduction per partition goes to the Vector engine's registers, and from
    there to ``reduce_res`` (P, 1), negated if ``reduce_res_negate``.
    """
    operand = np.float32(0) if operand0 is None else operands.read_column(operand0, dst)
    with np.errstate(all="ignore"):
        values = op0.alu(operands.read(data, dst), operand)
    operands.write(dst, values)
    init = None if reduce_init is None else operands.read_column(reduce_init, dst)
    reduce_into("vector", reduce_op.name, values, data, reduce_res, reduce_cmd, init, reduce_res_negate)


def _check_tensor_partition_reduce(dst, op, data, name=None):
    operands.destination(dst, (SBUF,), sink=False)
    operands.on_chip(data, "data", (SBUF,))
    if not isinstance(op, Op) or op.name not in ("add", "maximum", "bitwise_or", "bitwise_and"):
        raise NKIError("op", f"op is nl.add, nl.maximum, nl.bitwise_or or nl.bitwise_and, not {op!r}")
    _alu(op, "op", dst, data)
    if dst.shape[0] != 1 or dst.free_size != data.free_size:
        raise NKIError("elements-differ", f"dst is {dst.shape}, the reduction of {data.shape} is (1, {data.free_size})")
    operands.no_alias(dst, data=data)


@instruction(_check_tensor_partition_reduce)
def tensor_partition_reduce(dst, op, data, name=None):
    """dst (1, F): the reduction of data [P, F] over its partitions. GpSimd, SBUF."""
    if op.kind == "bitvec":
        values = op.alu.reduce(dtypes.raw(data.load()), axis=0).view(dst.array().dtype)
    else:
        with np.errstate(all="ignore"):
            values = op.alu.reduce(dtypes.to_float32(data.load()), axis=0)
    operands.write(dst, values.reshape(dst.shape))


def _check_tensor_tensor_scan(dst, data0, data1, initial, op0, op1, reverse0=False, reverse1=False, name=None):
    operands.destination(dst, sink=False)
    a, b = operands.on_chip(data0, "data0"), operands.on_chip(data1, "data1")
    operands.same_shape(dst, data0=a, data1=b)
    _not_both_psum(a, b, "data0 and data1")
    for op, what in ((op0, "op0"), (op1, "op1")):
        _arithmetic(op, what)
        _two_operands(op, what)
    operands.column(initial, "initial", dst, float32=False)


@instruction(_check_tensor_tensor_scan)
def tensor_tensor_scan(dst, data0, data1, initial, op0, op1, reverse0=False, reverse1=False, name=None):
    """``y[i] = (data0[i] op0 y[i - 1]) op1 data1[i]`` along each partition, ``y[-1] = initial``, in fp32. Vector."""
    for t in (data0, data1):
        operands.carry_whole(t, dst)
    a, b = (dtypes.to_float32(t.array()).reshape(dst.shape[0], -1) for t in (data0, data1))
    if isinstance(initial, Tensor):
        state = dtypes.to_float32(initial.load()).reshape(-1)
    else:
        state = np.full(dst.shape[0], initial, np.float32)
    with np.errstate(all="ignore"):
        if op0.name == "multiply" and isinstance(op1.alu, np.ufunc) and not reverse1 and (a == 1).all():
            # y[i] = y[i - 1] op1 data1[i]: NumPy runs along the partition.
            values = op1.alu.accumulate(np.concatenate([state[:, None], b], axis=1), axis=1)[:, 1:]
        else:
            values = np.empty_like(b)
            for i in range(b.shape[1]):
                state = _apply(op1, _apply(op0, a[:, i], state, reverse0), b[:, i], reverse1)
                values[:, i] = state
    operands.write(dst, operands.like(values, dst))


def _check_bn_stats(dst, data, name=None):
    operands.destination(dst, sink=False)
    t = operands.on_chip(data, "data")
    limit = core().target.bn_stats
    if t.free_size > limit:
        raise NKIError("bn-stats", f"data has {t.free_size} elements per partition, the limit is {limit}")
    if dst.shape[0] != t.shape[0] or dst.free_size != 6:
        raise NKIError("elements-differ", f"dst is {dst.shape}, bn_stats makes ({t.shape[0]}, 6)")


@instruction(_check_bn_stats)
def bn_stats(dst, data, name=None):
    """dst [P, 6]: count, mean and variance * count of the even elements of each partition, then of the odd."""
    operands.carry_whole(data, dst)
    rows = dtypes.to_float32(data.array()).reshape(data.shape[0], -1)
    values = np.zeros((data.shape[0], 6), np.float32)
    for first in (0, 1):
        part = rows[:, first::2]
        if part.shape[1]:
            mean = part.mean(axis=1)
            values[:, 3 * first : 3 * first + 3] = np.stack(
                [np.full(len(part), part.shape[1], np.float32), mean, ((part - mean[:, None]) ** 2).sum(axis=1)], axis=1
            )
    operands.write(dst, operands.like(values, dst))


def _check_bn_aggr(dst, data, name=None):
    operands.destination(dst, sink=False)
    t = operands.on_chip(data, "data")
    if t.free_size % 3:
        raise NKIError("bn-aggr", f"data has {t.free_size} elements per partition, not triples of count, mean, sum")
    if dst.shape[0] != t.shape[0] or dst.free_size != 2:
        raise NKIError("elements-differ", f"dst is {dst.shape}, bn_aggr makes ({t.shape[0]}, 2)")


@instruction(_check_bn_aggr)
def bn_aggr(dst, data, name=None):
    """dst [P, 2]: mean and variance of what the (count, mean, variance * count) triples of data describe."""
    operands.carry_whole(data, dst)
    count, mean, squares = np.moveaxis(dtypes.to_float32(data.array()).reshape(data.shape[0], -1, 3), -1, 0)
    with np.errstate(all="ignore"):
        total = count.sum(axis=1)
        overall = (count * mean).sum(axis=1) / total
        variance = (squares + count * (mean - overall[:, None]) ** 2).sum(axis=1) / total
    operands.write(dst, operands.like(np.stack([overall, variance], axis=1), dst))
