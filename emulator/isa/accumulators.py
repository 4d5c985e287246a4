"""The accumulation registers of the Scalar and the Vector engine: one fp32 value per partition.

Instructions with a ``reduce_cmd`` add to them, and read them out into ``reduce_res``. Their value outlives the
instruction, so that a reduction over several tiles needs no memory.
"""

from __future__ import annotations

import numpy as np

from .. import dtypes
from ..errors import NKIError
from ..machine import core
from ..operators import OPS, Op
from ..tensor import Tensor
from . import operands
from .enums import reduce_cmd as ReduceCmd

_IDENTITY = {"add": 0.0, "subtract": 0.0, "multiply": 1.0, "maximum": -np.inf, "minimum": np.inf}


def check_reduction(dst: Tensor, op, names, reduce_res, cmd, commands, optional_op: bool = False) -> None:
    """``op`` is one of ``names``, ``cmd`` one of ``commands``, ``reduce_res`` a (P, 1) float tile or None."""
    if not isinstance(cmd, ReduceCmd) or cmd not in commands:
        raise NKIError("reduce-cmd", f"reduce_cmd is one of {', '.join(c.name for c in commands)}, not {cmd!r}")
    if op is None and not optional_op and cmd not in (ReduceCmd.idle, ReduceCmd.reset):
        raise NKIError("op", f"reduce_cmd {cmd.name} needs a reduce_op")
    if op is not None and (not isinstance(op, Op) or op.name not in names):
        raise NKIError("op", f"reduce_op is one of {', '.join('nl.' + n for n in names)}, not {op!r}")
    if reduce_res is not None:
        operands.destination(operands.tensor(reduce_res, "reduce_res"), sink=False)
        operands.column(reduce_res, "reduce_res", dst, float32=False)
        if not dtypes.is_float(reduce_res.dtype):
            raise NKIError("dtype", f"reduce_res is {reduce_res.dtype}, the sum is a float")


def reduce_into(engine: str, op: str, values, data: Tensor, reduce_res, cmd, init=None, negate: bool = False) -> None:
    """Do ``cmd`` with the registers of the partitions of ``data``; ``values`` are [P, ...] in fp32."""
    registers = core().accumulators
    state, ready = registers.setdefault(engine, (np.zeros(128, np.float32), np.zeros(128, bool)))
    lanes = slice(data.start_partition, data.start_partition + data.shape[0])
    if cmd in (ReduceCmd.reset, ReduceCmd.reset_reduce):
        state[lanes], ready[lanes] = _IDENTITY[op], True
    elif cmd is ReduceCmd.load_reduce:
        state[lanes], ready[lanes] = np.reshape(init, -1), True
    elif cmd is ReduceCmd.idle and engine == "vector":
        ready[lanes] = False  # documented: idle may change them
    continued = cmd is ReduceCmd.reduce or reduce_res is not None
    if continued and not ready[lanes].all() and not core().shape_only:
        raise NKIError(
            "accumulator-unset", f"the registers of the {engine} engine hold no reduction to continue or read"
        )
    if cmd in (ReduceCmd.reduce, ReduceCmd.reset_reduce, ReduceCmd.load_reduce):
        alu = OPS["add" if op == "subtract" else op].alu
        with np.errstate(all="ignore"):
            total = alu.reduce(values.reshape(values.shape[0], -1), axis=1)
            state[lanes] = state[lanes] - total if op == "subtract" else alu(state[lanes], total)
    if reduce_res is not None:
        result = -state[lanes] if negate else state[lanes]
        operands.write(reduce_res, operands.like(result.copy(), reduce_res))
