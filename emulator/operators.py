"""ALU operators and activation functions: the ``nl.*`` names that instructions take as ``op``.

Sources: the tables "Supported Math Operators" and "Supported Activation Functions" of ``nki.api.shared``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Op:
    """A named operation.

    Attributes:
        name: as in ``nki.language``.
        alu: two-operand semantics for Vector, Scalar and GpSimd instructions, or None.
        kind: ``"arithmetic"`` or ``"bitvec"`` (acts on the raw bits of integers), for ``alu``.
        reduce: may it be a reduction?
        unary: does ``alu`` ignore its second operand?
        activation: one-operand semantics for ``nisa.activation``, or None.
    """

    name: str
    alu: Callable | None = None
    kind: str = "arithmetic"
    reduce: bool = False
    unary: bool = False
    activation: Callable | None = None

    def __repr__(self) -> str:
        return f"nl.{self.name}"


def _compare(ufunc):
    """Comparisons yield 1.0 or 0.0."""
    return lambda a, b: ufunc(a, b).astype(np.float32)


def _sigmoid(x):
    with np.errstate(over="ignore"):
        return np.float32(1) / (np.float32(1) + np.exp(-x))


_erf = np.vectorize(math.erf, otypes=[np.float32])
_SQRT_HALF = np.float32(math.sqrt(0.5))
_TANH_GELU = np.float32(math.sqrt(2 / math.pi))


def _gelu(x):
    return np.float32(0.5) * x * (1 + _erf(x * _SQRT_HALF))


def _gelu_dx(x):
    density = np.exp(np.float32(-0.5) * x * x) * np.float32(1 / math.sqrt(2 * math.pi))
    return np.float32(0.5) * (1 + _erf(x * _SQRT_HALF)) + x * density


def _swish_dx(scale):
    def function(x):
        s = _sigmoid(np.float32(scale) * x)
        return s * (1 + np.float32(scale) * x * (1 - s))

    return function


def _softplus(x):
    return np.logaddexp(np.float32(0), x)


def _sin(x):
    """Good in [-pi, pi]; outside, the cubic that continues it there (documented: sin(9) is about 27.65)."""
    beyond = np.abs(x) - np.float32(math.pi)
    return np.where(beyond > 0, np.sign(x) * (beyond**3 / np.float32(6) - beyond), np.sin(x))


_OPS = [
    # Two operands.
    Op("add", np.add, reduce=True),
    Op("subtract", np.subtract, reduce=True),
    Op("multiply", np.multiply, reduce=True),
    Op("maximum", np.maximum, reduce=True),
    Op("minimum", np.minimum, reduce=True),
    Op("power", np.power),
    Op("equal", _compare(np.equal)),
    Op("not_equal", _compare(np.not_equal)),
    Op("greater", _compare(np.greater)),
    Op("greater_equal", _compare(np.greater_equal)),
    Op("less", _compare(np.less)),
    Op("less_equal", _compare(np.less_equal)),
    Op("logical_and", _compare(np.logical_and), reduce=True),
    Op("logical_or", _compare(np.logical_or), reduce=True),
    Op("logical_xor", _compare(np.logical_xor), reduce=True),
    Op("bitwise_and", np.bitwise_and, kind="bitvec", reduce=True),
    Op("bitwise_or", np.bitwise_or, kind="bitvec", reduce=True),
    Op("bitwise_xor", np.bitwise_xor, kind="bitvec", reduce=True),
    Op("left_shift", np.left_shift, kind="bitvec"),
    Op("right_shift", np.right_shift, kind="bitvec"),
    # One operand; as ALU operators they ignore the second.
    Op("abs", lambda a, b: np.abs(a), unary=True, activation=np.abs),
    Op("rsqrt", lambda a, b: 1 / np.sqrt(a), unary=True, activation=lambda x: 1 / np.sqrt(x)),
    Op("reciprocal", lambda a, b: 1 / a, unary=True, activation=np.reciprocal),
    Op("invert", lambda a, b: np.invert(a), kind="bitvec", unary=True),
    # Activation functions.
    Op("copy", activation=lambda x: x),
    Op("square", activation=np.square),
    Op("sigmoid", activation=_sigmoid),
    Op("relu", activation=lambda x: np.maximum(x, 0)),
    Op("gelu", activation=_gelu),
    Op("gelu_dx", activation=_gelu_dx),
    Op(
        "gelu_apprx_tanh",
        activation=lambda x: np.float32(0.5) * x * (1 + np.tanh(_TANH_GELU * (x + np.float32(0.044715) * x**3))),
    ),
    Op("gelu_apprx_sigmoid", activation=lambda x: x * _sigmoid(np.float32(1.702) * x)),
    Op("gelu_apprx_sigmoid_dx", activation=_swish_dx(1.702)),
    Op("silu", activation=lambda x: x * _sigmoid(x)),
    Op("silu_dx", activation=_swish_dx(1.0)),
    Op("tanh", activation=np.tanh),
    Op("softplus", activation=_softplus),
    Op("mish", activation=lambda x: x * np.tanh(_softplus(x))),
    Op("erf", activation=_erf),
    Op("erf_dx", activation=lambda x: np.float32(2 / math.sqrt(math.pi)) * np.exp(-x * x)),
    Op("exp", activation=np.exp),
    Op("log", activation=np.log),
    Op("sin", activation=_sin),
    Op("arctan", activation=np.arctan),
    Op("sqrt", activation=np.sqrt),
    Op("sign", activation=np.sign),
    # Names that NKI has and no instruction here takes.
    Op("average"),
    Op("bypass"),
    Op("prelu"),
]
OPS: dict[str, Op] = {op.name: op for op in _OPS}
