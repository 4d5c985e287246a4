"""Semantics of the on-chip instructions, against NumPy in float64 with the documented rounding."""

import math

import ml_dtypes
import numpy as np
import pytest

from trn_kernels import emulator

emulator.install()

import nki  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

bfloat16, e4m3, e5m2 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3, ml_dtypes.float8_e5m2
FLOATS = (np.float32, bfloat16, np.float16)
INTS = (np.int32, np.uint32, np.int16, np.uint16, np.int8, np.uint8)


def normal(rng, shape, dtype=np.float32, scale=1.0):
    return (scale * rng.standard_normal(shape)).astype(dtype)


def same(a, b):
    """Equal shape, dtype and values, NaN equal to NaN."""
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, a.dtype, b.shape, b.dtype)
    if a.dtype.kind in "iu":
        np.testing.assert_array_equal(a, b)
    else:
        np.testing.assert_array_equal(a.astype(np.float64), b.astype(np.float64))


# -- rounding -------------------------------------------------------------------------------------------

# Halfway between neighbours, on either side of it, subnormal, largest, overflow.
HARD = np.array(
    [0.0, -0.0, 1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 1 + 2**-11, 1 + 3 * 2**-11, 2.5, 3.5, -2.5, 0.5]
    + [1.5, 126.5, 127.5, 128.5, 255.5, 256.0, -0.5, -1e9, 1e9, 2**31 - 128.0, 2.0**31, 4e9, 2.0**32, 1e30, -1e30]
    + [65504.0, 65519.0, 65520.0, 3.0e38, 3.4e38, 2**-14, 2**-15, 2**-24, 2**-25, 1.5 * 2**-25, 1e-38, 1e-40, 240.0]
    + [np.inf, -np.inf, 1 / 3, math.pi, 12345.678],
    np.float32,
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", *(np.dtype(t).name for t in INTS)])
@pytest.mark.parametrize("instruction", [nisa.tensor_copy, nisa.dma_copy])
def test_fp32_is_rounded_to_nearest_even_and_integers_saturate(execute, store, instruction, dtype):
    x = HARD.reshape(1, -1)
    same(execute(instruction, x, out=(x.shape, dtype)), store(x, dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_memset_rounds_to_nearest_even(execute, store, dtype):
    def body(dst):
        for i, value in enumerate(HARD):
            nisa.memset(dst[:, i], float(value))

    same(execute(body, out=((1, HARD.size), dtype)), store(HARD[None], dtype))


@pytest.mark.parametrize("dtype", ["float8_e4m3", "float8_e5m2"])
def test_fp8_is_rounded_to_nearest_even(execute, store, dtype):
    x = np.concatenate([np.linspace(-230, 230, 1001), 2.0 ** np.arange(-20, 7) * 1.0625]).astype(np.float32)[None]
    same(execute(nisa.tensor_copy, x, out=(x.shape, dtype)), store(x, dtype))


@pytest.mark.parametrize("dtype", INTS)
def test_nan_becomes_zero_in_integers(execute, dtype):
    x = np.full((1, 2), np.nan, np.float32)
    same(execute(nisa.tensor_copy, x, out=(x.shape, dtype)), np.zeros((1, 2), dtype))


@pytest.mark.parametrize("source", INTS)
@pytest.mark.parametrize("target", [*INTS, *FLOATS])
def test_integers_convert_through_fp32(execute, load, store, source, target):
    info = np.iinfo(source)
    x = np.unique(np.linspace(info.min, info.max, 61).astype(np.int64)).astype(source)[None]
    wanted = x if source == target else store(load(x), np.dtype(target).name)
    same(execute(nisa.tensor_copy, x, out=(x.shape, target)), wanted)


@pytest.mark.parametrize("engine", [nisa.vector_engine, nisa.scalar_engine, nisa.gpsimd_engine, nisa.unknown_engine])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16, e4m3, e5m2, *INTS])
def test_copies_of_one_dtype_are_bit_exact(execute, rng, dtype, engine):
    bits = rng.integers(0, 256, (4, 64), np.uint8).view(dtype)  # NaN payloads included
    copied = execute(lambda dst, src: nisa.tensor_copy(dst, src, engine=engine), bits, out=(bits.shape, dtype))
    assert np.array_equal(copied.view(np.uint8), bits.view(np.uint8))


# -- memset ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, value, wanted",
    [
        (nl.float32, 2, 2.0),
        (nl.float32, 0.1, np.float32(0.1)),
        (nl.float32, float("-inf"), -np.inf),
        (nl.bfloat16, 0.1, bfloat16(0.1)),
        (nl.bfloat16, np.finfo(np.float32).min, -np.inf),
        (nl.float16, np.float32(1e6), np.inf),
        (nl.float8_e4m3, 240, 240),
        (nl.float8_e5m2, np.inf, np.inf),
        (nl.int32, -1, -1),
        (nl.int32, 2**31 - 1, 2**31 - 1),
        (nl.int32, -(2**31), -(2**31)),
        (nl.uint32, 2**32 - 1, 2**32 - 1),
        (nl.int32, 2**24, 2**24),
        (nl.uint8, np.int64(255), 255),
        (nl.int16, -32768, -32768),
        (nl.bool_, True, 1),
        (nl.bool_, 0, 0),
    ],
)
def test_memset(execute, dtype, value, wanted):
    out = execute(lambda dst: nisa.memset(dst, value), out=((3, 5), dtype))
    assert out.dtype == emulator.dtypes.NUMPY[dtype] and (out.astype(np.float64) == float(wanted)).all()


def test_memset_of_nan_and_of_a_part(execute):
    out = execute(
        lambda dst: nisa.memset(dst[:, 1:4:2], float("nan")), out=((2, 5), np.float32), initial=np.ones((2, 5), "f4")
    )
    assert np.isnan(out[:, [1, 3]]).all() and (out[:, [0, 2, 4]] == 1).all()


# -- tensor_tensor --------------------------------------------------------------------------------------

TRUTH = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "equal": np.equal,
    "not_equal": np.not_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
}
BITS = {"bitwise_and": np.bitwise_and, "bitwise_or": np.bitwise_or, "bitwise_xor": np.bitwise_xor}


@pytest.mark.parametrize("op", TRUTH)
@pytest.mark.parametrize("a, b, out", [
    (np.float32, np.float32, np.float32),
    (bfloat16, bfloat16, bfloat16),
    (np.float16, np.float32, bfloat16),
    (bfloat16, np.int16, np.float32),
    (np.float32, np.float32, np.int8),
    (np.uint8, e4m3, np.float16),
])  # fmt: skip
def test_tensor_tensor(execute, load, store, rng, op, a, b, out):
    x, y = normal(rng, (5, 40), np.float32, 20), normal(rng, (5, 40), np.float32, 20)
    y[:, ::3] = x[:, ::3]
    y[:, ::7] = 0
    x, y = (np.abs(t) if np.dtype(d).kind == "u" else t for t, d in ((x, a), (y, b)))
    x, y = x.astype(a), y.astype(b)
    got = execute(lambda dst, s, t: nisa.tensor_tensor(dst, s, t, getattr(nl, op)), x, y, out=(x.shape, out))
    same(got, store(TRUTH[op](load(x), load(y)), np.dtype(out).name))


def test_tensor_tensor_power(execute, rng):
    x, y = np.abs(normal(rng, (3, 9))), normal(rng, (3, 9))
    got = execute(lambda dst, s, t: nisa.tensor_tensor(dst, s, t, nl.power), x, y, out=(x.shape, np.float32))
    np.testing.assert_allclose(got, np.float64(x) ** np.float64(y), rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
@pytest.mark.parametrize("op", ["add", "subtract", "multiply", "maximum", "minimum", "equal", "less"])
def test_tensor_tensor_of_integers_is_exact(execute, rng, dtype, op):
    # Sums and products of odd numbers above 2**24, which fp32 does not hold.
    x = rng.integers(2**12, 2**15, (4, 32)).astype(dtype) * 2 + 1
    y = rng.integers(2**12, x + 1).astype(dtype)
    if op != "multiply":
        x, y = x * 2**14 + 1, y * 2**14
    y[:, :3] = x[:, :3]
    got = execute(lambda dst, s, t: nisa.tensor_tensor(dst, s, t, getattr(nl, op)), x, y, out=(x.shape, dtype))
    exact = TRUTH[op](x.astype(np.int64), y.astype(np.int64)).astype(np.int64)
    same(got, exact.astype(dtype))
    # In fp32 the result would differ: through its inputs, or for products by itself.
    inexact = exact if op == "multiply" else x.astype(np.int64)
    assert not np.array_equal(inexact, inexact.astype(np.float32))


def test_tensor_tensor_power_of_integers_is_exact(execute):
    x, y = np.array([[3, -7, 2, 5]], np.int32), np.array([[19, 11, 0, 1]], np.int32)
    got = execute(lambda dst, s, t: nisa.tensor_tensor(dst, s, t, nl.power), x, y, out=(x.shape, np.int32))
    same(got, np.array([[3**19, -(7**11), 1, 5]], np.int32))


@pytest.mark.parametrize("case", ["vector", "psum", "float dst", "mixed"])
def test_tensor_tensor_of_integers_elsewhere_is_fp32(execute, case):
    x, y = np.array([[2**24]], np.int32), np.array([[1]], np.uint32 if case == "mixed" else np.int32)
    out = np.float32 if case == "float dst" else np.int32

    def body(dst, s, t):
        nisa.tensor_tensor(dst, s, t, nl.add, engine=nisa.vector_engine if case == "vector" else nisa.unknown_engine)

    got = execute(body, x, y, out=((1, 1), out), psum=(0,) if case == "psum" else ())
    assert got[0, 0] == 2**24  # 2**24 + 1 rounds to even


@pytest.mark.parametrize("dtype", INTS)
@pytest.mark.parametrize("op", BITS)
def test_tensor_tensor_of_bits(execute, rng, dtype, op):
    x, y = (rng.integers(0, 256, (4, 16), np.uint8).view(dtype) for _ in range(2))
    got = execute(lambda dst, s, t: nisa.tensor_tensor(dst, s, t, getattr(nl, op)), x, y, out=(x.shape, dtype))
    same(got, BITS[op](x, y))


def test_bits_of_signed_and_unsigned_mix(execute):
    x, y = np.array([[-1, 5]], np.int32), np.array([[2**31, 4]], np.uint32)
    got = execute(lambda dst, s, t: nisa.tensor_tensor(dst, s, t, nl.bitwise_and), x, y, out=((1, 2), np.uint32))
    same(got, np.array([[2**31, 4]], np.uint32))


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int8])
def test_shifts_are_logical(execute, dtype):
    bits = 8 * np.dtype(dtype).itemsize
    x = np.array([[-1, 1, 37, -128]]).astype(dtype)
    amount = np.array([[1, 3, 0, bits - 1]]).astype(dtype)
    raw = [int(v) % 2**bits for v in x[0]]
    for op, wanted in (
        (nl.right_shift, [v >> int(n) for v, n in zip(raw, amount[0], strict=True)]),
        (nl.left_shift, [(v << int(n)) % 2**bits for v, n in zip(raw, amount[0], strict=True)]),
    ):
        wanted = np.array([wanted], np.uint64).astype(f"u{bits // 8}").view(dtype)
        same(
            execute(lambda dst, s, t, op=op: nisa.tensor_tensor(dst, s, t, op), x, amount, out=(x.shape, dtype)), wanted
        )


def test_operands_may_differ_in_rank_and_start_partition(execute, rng):
    x, y = normal(rng, (96, 4, 6)), normal(rng, (128, 24))

    def body(dst, s, t):
        nisa.tensor_tensor(dst[32:64], s[64:96], t[96:128], nl.add)

    got = execute(body, x, y, out=((64, 24), np.float32), initial=np.zeros((64, 24), "f4"))
    same(got[32:], x[64:].reshape(32, 24) + y[96:])
    assert not got[:32].any()


def test_in_place_and_psum_operands(execute, rng):
    x, y = normal(rng, (4, 8)), normal(rng, (4, 8))

    def body(dst, s, t):
        nisa.tensor_tensor(s, s, t, nl.add)
        nisa.tensor_tensor(dst, s, t.reshape((4, 2, 4)), nl.multiply)

    same(execute(body, x, y, out=(x.shape, np.float32), psum=(0, "dst")), (x + y) * y)


# -- tensor_scalar --------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [*TRUTH, "power"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("column", [False, True])
def test_tensor_scalar(execute, load, store, rng, op, reverse, column):
    x = normal(rng, (6, 3, 10), np.float32, 3)
    if op == "power":
        x = np.abs(x)
    operand = np.abs(normal(rng, (6, 1), np.float32, 3)) if column else 1.7
    x[:, 0, :3] = operand if column else np.float32(1.7)

    def body(dst, tile, scalar=operand):
        nisa.tensor_scalar(dst, tile, getattr(nl, op), scalar, reverse0=reverse)

    got = execute(body, x, *((operand,) if column else ()), out=(x.shape, bfloat16))
    a, b = load(x), operand.astype(np.float64)[:, :, None] if column else np.float64(np.float32(1.7))
    if op == "power":  # not exact in fp32
        wanted = (b**a if reverse else a**b).astype(np.float64)
        np.testing.assert_allclose(got.astype(np.float64), wanted, rtol=2**-8)
    else:
        same(got, store(TRUTH[op](b, a) if reverse else TRUTH[op](a, b), "bfloat16"))


@pytest.mark.parametrize("reverse0", [False, True])
@pytest.mark.parametrize("reverse1", [False, True])
def test_tensor_scalar_two_stages_round_to_fp32_between(execute, store, rng, reverse0, reverse1):
    x, column = normal(rng, (4, 50)), normal(rng, (4, 1))

    def body(dst, tile, scalar):
        nisa.tensor_scalar(dst, tile, nl.subtract, 0.3, reverse0, op1=nl.multiply, operand1=scalar, reverse1=reverse1)

    first = np.float64(np.float32(0.3))
    first = store(first - x if reverse0 else x - first, "float32").astype(np.float64)
    same(execute(body, x, column, out=(x.shape, np.float32)), store(first * column, "float32"))


def test_tensor_scalar_of_indices(execute):
    # Row numbers are incremented and scaled this way, with Python ints on an int32 tile.
    x = np.arange(12, dtype=np.int32).reshape(4, 3)
    got = execute(
        lambda dst, t: nisa.tensor_scalar(dst, t, nl.multiply, 128, op1=nl.add, operand1=-1), x, out=((4, 3), np.int32)
    )
    same(got, x * 128 - 1)


@pytest.mark.parametrize(
    "op, operand, reverse, truth",
    [
        (nl.bitwise_and, 0xF0, False, lambda x: x & 0xF0),
        (nl.bitwise_or, -1, False, lambda x: np.full_like(x, 2**32 - 1)),
        (nl.bitwise_xor, 2**32 - 1, False, lambda x: x ^ np.uint32(2**32 - 1)),
        (nl.right_shift, 31, False, lambda x: x >> np.uint32(31)),
        (nl.left_shift, 4, False, lambda x: x << np.uint32(4)),
        (nl.left_shift, 1, True, lambda x: np.uint32(1) << x),
    ],
)
def test_tensor_scalar_of_bits(execute, op, operand, reverse, truth):
    x = np.array([[-1, 7, -(2**31), 31]] if not reverse else [[0, 1, 30, 31]]).astype(np.int32)
    got = execute(lambda dst, t: nisa.tensor_scalar(dst, t, op, operand, reverse), x, out=(x.shape, np.int32))
    same(got, truth(x.view(np.uint32)).view(np.int32))


def test_tensor_scalar_of_bits_with_a_column_and_two_stages(execute, rng):
    x, mask = rng.integers(0, 2**16, (5, 8)).astype(np.uint16), rng.integers(0, 2**16, (5, 1)).astype(np.uint16)

    def body(dst, tile, column):
        nisa.tensor_scalar(dst, tile, nl.bitwise_xor, column, op1=nl.right_shift, operand1=3)

    same(execute(body, x, mask, out=(x.shape, np.uint16)), (x ^ mask) >> 3)


@pytest.mark.parametrize(
    "op, truth", [(nl.abs, np.abs), (nl.rsqrt, lambda x: 1 / np.sqrt(x)), (nl.reciprocal, np.reciprocal)]
)
def test_tensor_scalar_of_one_operand_ignores_the_second(execute, rng, op, truth):
    x = normal(rng, (3, 7)) if op is nl.abs else np.abs(normal(rng, (3, 7))) + np.float32(0.1)
    got = execute(lambda dst, t: nisa.tensor_scalar(dst, t, op, 123.0), x, out=(x.shape, np.float32))
    np.testing.assert_allclose(got, truth(x.astype(np.float64)), rtol=3e-7)


@pytest.mark.parametrize("engine, op", [(nisa.scalar_engine, nl.multiply), (nisa.gpsimd_engine, nl.rsqrt)])
def test_tensor_scalar_engines(execute, engine, op):
    x = np.full((2, 2), 4, np.float32)
    got = execute(lambda dst, t: nisa.tensor_scalar(dst, t, op, 2.0, engine=engine), x, out=((2, 2), np.float32))
    assert (got == (8 if op is nl.multiply else 0.5)).all()


# -- scalar_tensor_tensor -------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse0", [False, True])
@pytest.mark.parametrize("reverse1", [False, True])
@pytest.mark.parametrize("column", [False, True])
@pytest.mark.parametrize("psum", [(), (0,), (1,)])
def test_scalar_tensor_tensor(execute, store, rng, reverse0, reverse1, column, psum):
    x, y, scalar = normal(rng, (4, 20)), normal(rng, (4, 20), bfloat16), normal(rng, (4, 1))

    def body(dst, s, t, c):
        nisa.scalar_tensor_tensor(
            dst, s, nl.subtract, c if column else 0.7, nl.subtract, t, reverse0=reverse0, reverse1=reverse1
        )

    first = scalar.astype(np.float64) if column else np.float64(np.float32(0.7))
    first = store(first - x if reverse0 else x - first, "float32").astype(np.float64)
    second = y.astype(np.float64)
    wanted = store(second - first if reverse1 else first - second, "float16")
    same(execute(body, x, y, scalar, out=(x.shape, np.float16), psum=psum), wanted)


# -- activation -----------------------------------------------------------------------------------------


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


_erf = np.vectorize(math.erf)


def _derivative(function, x, step=1e-5):
    return (function(x + step) - function(x - step)) / (2 * step)


def _gelu(x):
    return 0.5 * x * (1 + _erf(x / math.sqrt(2)))


# The functions, written down again in float64 (derivatives as differences).
ACTIVATIONS = {
    "copy": lambda x: x,
    "square": lambda x: x * x,
    "sigmoid": _sigmoid,
    "relu": lambda x: np.where(x > 0, x, 0),
    "gelu": _gelu,
    "gelu_dx": lambda x: _derivative(_gelu, x),
    "gelu_apprx_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_apprx_sigmoid": lambda x: x * _sigmoid(1.702 * x),
    "gelu_apprx_sigmoid_dx": lambda x: _derivative(lambda t: t * _sigmoid(1.702 * t), x),
    "silu": lambda x: x * _sigmoid(x),
    "silu_dx": lambda x: _derivative(lambda t: t * _sigmoid(t), x),
    "tanh": np.tanh,
    "softplus": lambda x: np.log(1 + np.exp(x)),
    "mish": lambda x: x * np.tanh(np.log(1 + np.exp(x))),
    "erf": _erf,
    "erf_dx": lambda x: 2 / math.sqrt(math.pi) * np.exp(-(x**2)),
    "exp": np.exp,
    "log": lambda x: np.log(np.abs(x)),
    "sin": np.sin,
    "arctan": np.arctan,
    "sqrt": lambda x: np.sqrt(np.abs(x)),
    "rsqrt": lambda x: 1 / np.sqrt(np.abs(x)),
    "reciprocal": lambda x: 1 / x,
    "sign": np.sign,
    "abs": np.abs,
}


def test_every_activation_function_is_tested():
    assert set(ACTIVATIONS) == {name for name, op in emulator.operators.OPS.items() if op.activation is not None}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_functions(execute, name):
    x = np.concatenate([np.linspace(-3.1, 3.1, 400), [1e-3, -1e-3]]).astype(np.float32).reshape(6, 67)
    if name in ("log", "sqrt", "rsqrt"):
        x = np.abs(x)
    got = execute(lambda dst, t: nisa.activation(dst, getattr(nl, name), t), x, out=(x.shape, np.float32))
    np.testing.assert_allclose(got, ACTIVATIONS[name](x.astype(np.float64)), rtol=1e-6, atol=5e-7)


@pytest.mark.parametrize("name", ["sigmoid", "silu", "gelu_apprx_sigmoid", "tanh", "softplus", "exp", "erf", "gelu"])
def test_activation_of_large_numbers_has_no_nan(execute, name):
    x = np.array([[-1e4, -100.0, 100.0, 1e4]], np.float32)
    got = execute(lambda dst, t: nisa.activation(dst, getattr(nl, name), t), x, out=(x.shape, np.float32))
    assert not np.isnan(got).any()


def test_sin_beyond_pi_is_the_documented_cubic(execute):
    x = np.array([[9.0, -9.0, math.pi + 0.01, 3.0]], np.float32)
    got = execute(lambda dst, t: nisa.activation(dst, nl.sin, t), x, out=(x.shape, np.float32))
    np.testing.assert_allclose(got, [[27.65, -27.65, math.sin(math.pi + 0.01), math.sin(3.0)]], rtol=1e-3)


@pytest.mark.parametrize("scale", ["default", "number", "column"])
@pytest.mark.parametrize("bias", ["none", "zero", "number", "column", "bf16 column"])
def test_activation_scales_then_adds_the_bias(execute, store, rng, scale, bias):
    x, s, b = normal(rng, (5, 3, 8), bfloat16), normal(rng, (5, 1)), normal(rng, (5, 1))
    if bias == "bf16 column":
        b = b.astype(bfloat16)

    def body(dst, data, scale_tile, bias_tile):
        options = {"number": {"scale": 1.3}, "column": {"scale": scale_tile}}.get(scale, {})
        biases = {"none": None, "zero": 0.0, "number": -0.4}
        nisa.activation(dst, nl.copy, data, biases.get(bias, bias_tile), **options)

    factor = {"default": 1.0, "number": np.float32(1.3), "column": s[:, :, None]}[scale]
    term = {"none": 0.0, "zero": 0.0, "number": np.float32(-0.4)}.get(bias, b[:, :, None])
    product = store(x.astype(np.float64) * np.float64(factor), "float32").astype(np.float64)
    wanted = store(product + np.asarray(term, np.float64), "bfloat16")
    same(execute(body, x, s, b, out=(x.shape, bfloat16)), wanted)


# -- tensor_reduce --------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis, kept", [(1, ()), (2, (3,)), ((2,), (3,)), ([1, 2], ()), ((2, 1), ())])
@pytest.mark.parametrize(
    "op", ["add", "maximum", "minimum", "multiply", "subtract", "logical_and", "logical_or", "logical_xor"]
)
def test_tensor_reduce(execute, rng, op, axis, kept):
    x = normal(rng, (4, 3, 6) if axis != 1 else (4, 18), bfloat16)
    x[:, ..., ::2] = np.abs(x[:, ..., ::2])
    x[0, ..., 1] = 0
    rows = x.astype(np.float64).reshape(4, *kept, -1)
    truth = {"add": np.sum, "maximum": np.max, "minimum": np.min, "multiply": np.prod}
    if op in truth:
        wanted = truth[op](rows, axis=-1)
    elif op == "subtract":
        wanted = rows[..., 0] - rows[..., 1:].sum(axis=-1)
    else:
        wanted = getattr(np, op).reduce(rows != 0, axis=-1)
    shape = (4, *(kept or (1,)))
    got = execute(lambda dst, t: nisa.tensor_reduce(dst, getattr(nl, op), t, axis), x, out=(shape, np.float32))
    np.testing.assert_allclose(got, np.asarray(wanted, np.float64).reshape(shape), rtol=1e-5, atol=1e-6)


def test_tensor_reduce_negates_rounds_once_and_keeps_dimensions(execute, store):
    x = np.array([[1.0, 2**-8, 2**-8], [1.0, 2**-9, 2**-9]], np.float32)
    body = lambda dst, t: nisa.tensor_reduce(dst, nl.add, t, axis=[1], negate=True, keepdims=True)  # noqa: E731
    same(execute(body, x, out=((2, 1), bfloat16)), store(-x.astype(np.float64).sum(1, keepdims=True), "bfloat16"))


@pytest.mark.parametrize("op", BITS)
def test_tensor_reduce_of_bits(execute, rng, op):
    x = rng.integers(-(2**31), 2**31, (3, 2, 5)).astype(np.int32)
    got = execute(lambda dst, t: nisa.tensor_reduce(dst, getattr(nl, op), t, axis=2), x, out=((3, 2), np.int32))
    same(got, BITS[op].reduce(x, axis=2))


def test_tensor_reduce_into_its_own_first_column(execute, rng):
    x = np.arange(12, dtype=np.float32).reshape(3, 4)

    def body(dst, t):
        nisa.tensor_reduce(t[:, 0:1], nl.add, t, axis=1)
        nisa.tensor_copy(dst, t)

    wanted = x.copy()
    wanted[:, 0] = x.sum(1)
    same(execute(body, x, out=(x.shape, np.float32)), wanted)


# -- iota -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int32, np.float32, bfloat16, np.int16, np.uint8])
@pytest.mark.parametrize(
    "pattern, offset, multiplier",
    [
        ([[1, 8]], 0, 0),
        ([[3, 2], [-1, 4]], 10, 7),
        ([[0, 2], [1, 2], [100, 2]], -5, 1),
        ([[1, 2]] * 3, 2**25 + 2**17 + 1, 1),
    ],
)
def test_iota(execute, load, store, dtype, pattern, offset, multiplier):
    got = execute(
        lambda dst: nisa.iota(dst, pattern, offset=offset, channel_multiplier=multiplier), out=((3, 8), dtype)
    )
    free = np.zeros(1, np.int64)
    for step, count in pattern:
        free = np.add.outer(free, step * np.arange(count)).reshape(-1)
    values = offset + multiplier * np.arange(3)[:, None] + free
    same(got, values.astype(np.int32) if dtype is np.int32 else store(load(values), np.dtype(dtype).name))


def test_iota_reaches_the_ends_of_int32(execute):
    got = execute(lambda dst: nisa.iota(dst, [[-1, 2]], offset=2**31 - 1), out=((1, 2), np.int32))
    same(got, np.array([[2**31 - 1, 2**31 - 2]], np.int32))
    got = execute(lambda dst: nisa.iota(dst, [[1, 2]], offset=-(2**31)), out=((1, 2), np.int32))
    same(got, np.array([[-(2**31), -(2**31) + 1]], np.int32))


# -- nc_matmul ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k, m, n", [(1, 1, 1), (128, 128, 512), (73, 92, 33), (128, 1, 512), (64, 128, 1)])
@pytest.mark.parametrize("a, b", [
    (np.float32, np.float32), (bfloat16, bfloat16), (np.float16, bfloat16), (e4m3, e5m2), (bfloat16, e4m3)
])  # fmt: skip
def test_nc_matmul(execute, rng, k, m, n, a, b):
    x, y = normal(rng, (k, m), a), normal(rng, (k, n), b)
    got = execute(nisa.nc_matmul, x, y, out=((m, n), np.float32), psum=("dst",))
    x, y = x.astype(np.float64), y.astype(np.float64)
    # fp32 accumulation: an error of a few units of the sum of magnitudes.
    assert (np.abs(got - x.T @ y) <= 4 * 2**-24 * k**0.5 * (np.abs(x).T @ np.abs(y))).all()


def test_nc_matmul_flattens_free_dimensions(execute, rng):
    x, y = normal(rng, (32, 2, 3)), normal(rng, (32, 2, 2, 5))
    got = execute(nisa.nc_matmul, x, y, out=((6, 4, 5), np.float32), psum=("dst",))
    wanted = np.einsum("km,kn->mn", np.float64(x.reshape(32, 6)), np.float64(y.reshape(32, 20)))
    np.testing.assert_allclose(got.reshape(6, 20), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("poisoned")
def test_nc_matmul_takes_views(execute, rng):
    x, y = normal(rng, (64, 20)), normal(rng, (64, 30))

    def body(dst, s, t):
        moving = t.ap([[30, 32], [0, 2], [2, 4]], offset=32 * 30 + 1)  # partitions 32 to 63, every column twice
        nisa.nc_matmul(dst[0:5, 8:16], s[32:64, 0:20:4], moving)

    got = execute(body, x, y, out=((5, 32), np.float32), psum=("dst",))
    wanted = x[32:, 0:20:4].T @ np.tile(y[32:, 1:9:2], 2)
    np.testing.assert_allclose(got[:, 8:16], wanted, rtol=1e-5, atol=1e-5)
    assert np.isnan(got[:, :8]).all() and np.isnan(got[:, 16:]).all()


def _ones(k, n):
    tile = nl.ndarray((k, n), nl.float32)
    nisa.memset(tile, 1.0)
    return tile


@pytest.mark.parametrize("accumulate, wanted", [(None, [4, 8, 12]), (False, [4, 4, 4]), (True, [4, 8, 12])])
def test_nc_matmul_accumulates_by_element(execute, accumulate, wanted):
    # Each pair of columns is a sum of its own.
    def body(dst):
        for group in range(3):
            for step in range(group + 1):
                start = False if accumulate is False or step == 0 else accumulate
                nisa.nc_matmul(dst[:, 2 * group : 2 * group + 2], _ones(4, 3), _ones(4, 2), accumulate=start)

    got = execute(body, out=((3, 6), np.float32), psum=("dst",))
    np.testing.assert_array_equal(got, np.tile(np.repeat(np.float32(wanted), 2), (3, 1)))


def test_nc_matmul_groups_interleave_in_one_tensor(execute):
    def body(dst):
        for step in range(3):
            for column in range(2):
                nisa.nc_matmul(dst[:, column], _ones(2 + column + step, 1), _ones(2 + column + step, 1))

    same(execute(body, out=((1, 2), np.float32), psum=("dst",)), np.array([[9, 12]], np.float32))


def test_a_fresh_psum_tensor_is_a_fresh_group(execute):
    def body(dst):
        for column in range(2):
            group = nl.ndarray((1, 1), nl.float32, nl.psum, address=(0, 0))
            nisa.nc_matmul(group, _ones(4, 1), _ones(4, 1))
            nisa.tensor_copy(dst[:, column], group)

    same(execute(body, out=((1, 2), np.float32)), np.array([[4, 4]], np.float32))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("value", [0, 100])
@pytest.mark.parametrize("accumulate", [None, False])
def test_memset_is_no_matmul(execute, value, accumulate):
    def body(dst):
        nisa.memset(dst, value)
        nisa.nc_matmul(dst[:, 0:2], _ones(4, 1), _ones(4, 2), accumulate=accumulate)

    got = execute(body, out=((1, 3), np.float32), psum=("dst",))
    same(got, np.array([[4, 4, value]], np.float32))


def test_reinterpreted_psum_keeps_its_accumulation_flags(execute):
    def body(dst):
        half = nl.ndarray((1, 8), nl.bfloat16, nl.psum)
        group = half.ap([[4, 1], [1, 4]], dtype=nl.float32)
        nisa.nc_matmul(group[:, 0:2], _ones(4, 1), _ones(4, 2))
        nisa.nc_matmul(half.ap([[4, 1], [1, 2]], dtype=nl.float32), _ones(4, 1), _ones(4, 2))
        nisa.nc_matmul(group[:, 2:4], _ones(4, 1), _ones(4, 2))
        nisa.tensor_copy(dst, group)

    same(execute(body, out=((1, 4), np.float32)), np.array([[8, 8, 4, 4]], np.float32))


@pytest.mark.parametrize("dtype", [np.float32, bfloat16, np.float16])
def test_nc_matmul_transposes_bits(execute, rng, dtype):
    bits = rng.integers(0, 256, (32, 5 * np.dtype(dtype).itemsize), np.uint8).view(dtype)
    identity = np.eye(32, dtype=dtype)
    got = execute(
        lambda dst, s, t: nisa.nc_matmul(dst, s, t, is_transpose=True),
        bits, identity, out=((5, 32), dtype), psum=("dst",),
    )  # fmt: skip
    assert np.array_equal(got.view(np.uint8), np.ascontiguousarray(bits.T).view(np.uint8))


# -- nc_transpose ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (33, 128), (128, 65), (128, 128), (92, 3)])
@pytest.mark.parametrize("dtype", [np.float32, bfloat16, np.float16, np.int32, np.uint16])
@pytest.mark.parametrize("engine", [nisa.unknown_engine, nisa.tensor_engine])
def test_nc_transpose_on_the_tensor_engine(execute, rng, shape, dtype, engine):
    bits = rng.integers(0, 256, (shape[0], shape[1] * np.dtype(dtype).itemsize), np.uint8).view(dtype)
    got = execute(
        lambda dst, t: nisa.nc_transpose(dst, t, engine=engine), bits, out=(shape[::-1], dtype), psum=("dst",)
    )
    assert np.array_equal(got.view(np.uint8), np.ascontiguousarray(bits.T).view(np.uint8))


@pytest.mark.parametrize("shape", [(1, 7), (32, 32), (17, 31)])
@pytest.mark.parametrize("psum", [(), (0,), ("dst",), (0, "dst")])
@pytest.mark.parametrize("dtype", [np.float32, bfloat16, np.int8, e4m3])
def test_nc_transpose_on_the_vector_engine(execute, rng, shape, psum, dtype):
    x = rng.integers(-50, 50, shape).astype(dtype)
    body = lambda dst, t: nisa.nc_transpose(dst, t, engine=nisa.vector_engine)  # noqa: E731
    same(execute(body, x, out=(shape[::-1], dtype), psum=psum), np.ascontiguousarray(x.T))


def test_nc_transpose_flattens_and_picks_the_engine_by_dst(execute, rng):
    x = normal(rng, (40, 3, 4))
    same(
        execute(nisa.nc_transpose, x, out=((12, 40), np.float32), psum=("dst",)),
        np.ascontiguousarray(x.reshape(40, 12).T),
    )
    same(execute(nisa.nc_transpose, x[:32], out=((12, 32), np.float32)), np.ascontiguousarray(x[:32].reshape(32, 12).T))


def test_only_the_tensor_engine_marks_psum_as_written(execute):
    def body(dst):
        for column, engine in enumerate((nisa.vector_engine, nisa.tensor_engine)):
            nisa.nc_transpose(dst[:, column], _ones(1, 1), engine=engine)
            nisa.nc_matmul(dst[:, column], _ones(4, 1), _ones(4, 1))

    same(execute(body, out=((1, 2), np.float32), psum=("dst",)), np.array([[4, 5]], np.float32))


# -- run-time addresses on chip, sinks ------------------------------------------------------------------


def test_tensor_copy_with_a_run_time_address(execute, rng):
    x = normal(rng, (4, 6, 3))
    index = np.array([[4, 1]], np.int32)

    def body(dst, tile, at):
        row = [[18, 4], [1, 3]]
        nisa.tensor_copy(dst[:, 0], tile.ap(row, scalar_offset=at[:, 0], indirect_dim=1))
        nisa.tensor_copy(
            dst.ap([[6, 4], [1, 3]], scalar_offset=at.ap([[2, 1], [1, 1]], offset=1), indirect_dim=1), tile[:, 2]
        )

    got = execute(body, x, index, out=((4, 2, 3), np.float32))
    same(got, np.stack([x[:, 4], x[:, 2]], axis=1))


def test_the_index_is_read_when_the_instruction_runs(execute):
    x = np.arange(5, dtype=np.float32)[None]

    def body(dst, tile):
        at = nl.ndarray((1, 1), nl.uint32)
        source = tile.ap([[5, 1], [1, 1]], scalar_offset=at, indirect_dim=1)
        for column in range(3):
            nisa.memset(at, 4 - column)
            nisa.tensor_copy(dst[:, column], source)

    same(execute(body, x, out=((1, 3), np.float32)), np.array([[4, 3, 2]], np.float32))


@pytest.mark.parametrize("kind", ["activation", "tensor_tensor", "tensor_copy", "memset", "tensor_scalar", "bits"])
def test_a_dst_of_stride_zero_keeps_the_last_element(execute, kind):
    # nki-library throws results away like this where only an accumulated by-product counts.
    dtype = np.int32 if kind == "bits" else np.float32
    x = np.arange(30).reshape(3, 10).astype(dtype)

    def body(dst, t):
        sink = dst.ap([[1, 3], [0, 10]])
        if kind == "activation":
            nisa.activation(sink, nl.copy, t)
        elif kind == "tensor_tensor":
            nisa.tensor_tensor(sink, t, t, nl.maximum)
        elif kind == "tensor_copy":
            nisa.tensor_copy(sink, t)
        elif kind == "memset":
            nisa.memset(sink, 9)
        elif kind == "bits":
            nisa.tensor_scalar(sink, t, nl.bitwise_or, 0)
        else:
            nisa.tensor_scalar(sink, t, nl.add, 0.0)

    wanted = np.full((3, 1), 9, dtype) if kind == "memset" else x[:, -1:]
    same(execute(body, x, out=((3, 1), dtype)), wanted)


def test_positional_arguments_in_the_documented_order(execute):
    x = np.full((1, 1), 3, np.float32)

    def body(dst, t):
        nisa.tensor_scalar(t, t, nl.add, 1.0, False, nl.multiply, 2.0, False, nisa.vector_engine, "name")
        nisa.scalar_tensor_tensor(t, t, nl.add, 1.0, nl.add, t)
        nisa.activation(t, nl.copy, t, 1.0, 2.0)
        nisa.tensor_tensor(t, t, t, nl.add, nisa.vector_engine)
        nisa.tensor_reduce(t, nl.add, t, 1, True)
        nisa.tensor_copy(dst, t, nisa.vector_engine)

    assert execute(body, x, out=((1, 1), np.float32)) == -2 * (2 * (2 * 8 + 1) + 1)


def test_get_nc_version_compares_with_numbers():
    def kernel():
        assert nisa.get_nc_version() == nisa.nc_version.gen3 and nisa.get_nc_version() >= 3

    nki.simulate(kernel)()
