"""Random instructions on random views against NumPy, by explicit addresses: the model shares no code with views.

Every operand is a storage of random bytes and a view of it (slices with steps, ``.ap`` with any strides and
offset, ``.reshape``), known to the model as an array of element numbers. After the instruction the *whole*
storage of dst must be what the model says, so that a stray write shows too.
"""

import os

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trn_kernels import emulator

emulator.install()

import nki  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

DTYPES = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float8_e4m3": ml_dtypes.float8_e4m3,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    **{name: np.dtype(name).type for name in ("int32", "uint32", "int16", "uint16", "int8", "uint8")},
}
# What an overflow of fp8 stores is not documented, so results are not stored as fp8.
RESULTS = [name for name in DTYPES if not name.startswith("float8")]

# 2,000 cases in CI, always the same; ``EMULATOR_FUZZ=100000 pytest tests/emulator/test_property.py`` draws others.
CASES = int(os.environ.get("EMULATOR_FUZZ", "2000"))
TESTS = 10
common = settings(
    max_examples=CASES // TESTS,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize="EMULATOR_FUZZ" not in os.environ,
)


class Operand:
    """A storage and a view of it: ``view(tensor)`` in the kernel, ``addresses`` for the model."""

    def __init__(self, shape, view, addresses, text):
        self.shape, self.view, self.addresses, self.text = shape, view, addresses, text

    def __repr__(self):
        return f"{self.shape}{self.text}"


@st.composite
def pattern(draw, counts, written, base):
    """Strides for ``counts`` and the room they take, from ``base`` on; none repeats where it is ``written``."""
    order = draw(st.permutations(range(len(counts))))
    strides, reach = [0] * len(counts), 0
    for dim in order:
        least = reach + 1 if written else 0
        strides[dim] = draw(st.integers(least, least + 3))
        reach += strides[dim] * (counts[dim] - 1)
    return strides, base + reach + 1


@st.composite
def on_chip(draw, partitions, counts, written=False):
    """A view of ``partitions`` x ``counts`` of an on-chip tensor."""
    start = draw(st.sampled_from([0, 32, 64, 96] if partitions <= 32 else [0, 64]))
    rows = draw(st.integers(start + partitions, min(128, start + partitions + 3)))
    kind = draw(st.sampled_from(["ap", "slice", "reshape"]))
    if kind == "ap":
        column = draw(st.integers(0, 3))
        strides, room = draw(pattern(counts, written, column))
        row = room + draw(st.integers(0, 2))
        pairs = [[row, partitions], *([s, n] for s, n in zip(strides, counts, strict=True))]
        offset = start * row + column
        grid = np.indices((partitions, *counts))
        addresses = offset + sum(s * i for (s, _), i in zip(pairs, grid, strict=True))
        return Operand((rows, row), lambda t: t.ap(pairs, offset=offset), addresses, f".ap({pairs}, {offset})")
    steps = [draw(st.integers(1, 3)) if kind == "slice" else 1 for _ in counts]
    firsts = [draw(st.integers(0, 2)) if kind == "slice" else 0 for _ in counts]
    sizes = [f + (n - 1) * s + 1 + draw(st.integers(0, 2)) for f, n, s in zip(firsts, counts, steps, strict=True)]
    if kind == "reshape":  # contiguous: only the first free dimension may be a part
        sizes[1:] = counts[1:]
    key = (slice(start, start + partitions),) + tuple(
        slice(f, f + (n - 1) * s + 1, s) for f, n, s in zip(firsts, counts, steps, strict=True)
    )
    shape = (rows, *sizes)
    addresses = np.arange(np.prod(shape)).reshape(shape)[key]
    if kind == "slice":
        return Operand(shape, lambda t: t[key], addresses, f"[{key}]")
    flat = (partitions, int(np.prod(counts)))
    return Operand(shape, lambda t: t[key].reshape(flat), addresses.reshape(flat), f"[{key}].reshape({flat})")


@st.composite
def on_hbm(draw, size, written=False):
    """A view of ``size`` elements of a tensor in HBM, in one to three dimensions."""
    outer = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    counts = draw(st.sampled_from([[size], [outer, size // outer], [size // outer, 1, outer]]))
    offset = draw(st.integers(0, 4))
    strides, room = draw(pattern(counts, written, offset))
    shape = (room + draw(st.integers(0, 3)),)
    pairs = [[s, n] for s, n in zip(strides, counts, strict=True)]
    addresses = offset + sum(s * i for s, i in zip(strides, np.indices(counts), strict=True))
    return Operand(shape, lambda t: t.ap(pairs, offset=offset), addresses, f".ap({pairs}, {offset})")


def fill(rng, shape, dtype):
    """Random values: any integer, floats of many magnitudes with some specials."""
    kind = np.dtype(DTYPES[dtype])
    if kind.kind in "iu":
        info = np.iinfo(kind)
        if rng.random() < 0.5:
            return rng.integers(-min(40, -info.min), 40, shape).astype(kind)
        return rng.integers(info.min, info.max, shape, endpoint=True).astype(kind)
    values = rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 3, shape)
    if dtype.startswith("float8"):
        return np.clip(values, -200, 200).astype(kind)
    values = np.where(rng.random(shape) < 0.05, rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan], shape), values)
    return values.astype(kind)


def run(body, dst, dst_values, *sources, psum=()):
    """``body(dst view, *source views)`` in a kernel; the storage of dst afterwards, flat."""

    def load(array, region):
        if region in (nl.hbm, nl.shared_hbm):
            tensor = nl.ndarray(array.shape, array.dtype, region)
            nisa.dma_copy(tensor, array)
            return tensor
        tensor = nl.ndarray(array.shape, array.dtype)
        nisa.dma_copy(tensor, array)
        if region is nl.psum:
            moved = nl.ndarray(array.shape, array.dtype, nl.psum)
            nisa.tensor_copy(moved, tensor)
            tensor = moved
        return tensor

    def kernel(start, a=None, b=None, c=None):
        target = load(start, regions[0])
        views = [
            operand.view(load(array, region))
            for array, (operand, _), region in zip((a, b, c), sources, regions[1:], strict=False)
        ]
        body(dst.view(target), *views)
        if regions[0] is nl.psum:
            moved = nl.ndarray(start.shape, start.dtype)
            nisa.tensor_copy(moved, target)
            target = moved
        out = nl.ndarray(start.shape, start.dtype, nl.shared_hbm)
        nisa.dma_copy(out, target)
        return out

    regions = list(psum) + [nl.sbuf] * (4 - len(psum))
    arrays = [values for _, values in sources]
    return nki.simulate(kernel)(dst_values, *arrays).reshape(-1)


def check(got, dst, dst_values, wanted):
    """The storage: ``wanted`` where the view is, what was there elsewhere."""
    model = dst_values.reshape(-1).copy()
    model[dst.addresses.reshape(-1)] = wanted.reshape(-1)
    if model.dtype.kind in "iu":
        np.testing.assert_array_equal(got, model)
    else:
        np.testing.assert_array_equal(got.astype(np.float64), model.astype(np.float64))


def shapes(draw):
    partitions = draw(st.sampled_from([1, 2, 5, 32, 33, 64]))
    return partitions, draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))


def operand_values(draw, rng, partitions, counts, names=tuple(DTYPES)):
    operand, dtype = draw(on_chip(partitions, counts)), draw(st.sampled_from(names))
    values = fill(rng, operand.shape, dtype)
    return operand, values, values.reshape(-1)[operand.addresses].reshape(-1)


BINARY = {
    nl.add: np.add,
    nl.subtract: np.subtract,
    nl.multiply: np.multiply,
    nl.maximum: np.maximum,
    nl.less: np.less,
    nl.logical_or: np.logical_or,
}


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
class TestElementwise:
    @common
    @given(st.data())
    def test_tensor_tensor(self, load, store, data):
        draw = data.draw
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        partitions, counts = shapes(draw)
        integers = draw(st.booleans())
        names = ["int32"] if integers else tuple(DTYPES)
        a, a_values, x = operand_values(draw, rng, partitions, counts, names)
        b, b_values, y = operand_values(draw, rng, partitions, counts, names)
        dst, dtype = (
            draw(on_chip(partitions, counts, written=True)),
            draw(st.sampled_from(names if integers else RESULTS)),
        )
        start = fill(rng, dst.shape, dtype)
        op = draw(st.sampled_from(list(BINARY)))
        psum = draw(st.sampled_from([(), (nl.psum,), (nl.sbuf, nl.psum), (nl.psum, nl.sbuf, nl.psum)]))
        got = run(lambda d, s, t: nisa.tensor_tensor(d, s, t, op), dst, start, (a, a_values), (b, b_values), psum=psum)
        exact = a_values.dtype == b_values.dtype == start.dtype and start.dtype in (np.int32, np.uint32) and not psum
        if exact:
            wide = BINARY[op](x.astype(np.int64), y.astype(np.int64)).astype(np.int64)
            wanted = (wide & 0xFFFFFFFF).astype(np.uint32).view(start.dtype)  # overflow wraps around
        else:
            wanted = _stored(store, BINARY[op](load(x), load(y)), dtype)
        check(got, dst, start, wanted)

    @common
    @given(st.data())
    def test_tensor_scalar_and_activation(self, load, store, data):
        draw = data.draw
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        partitions, counts = shapes(draw)
        a, a_values, x = operand_values(draw, rng, partitions, counts)
        column, column_values, y = operand_values(draw, rng, partitions, [1], ("float32",))
        dst, dtype = draw(on_chip(partitions, counts, written=True)), draw(st.sampled_from(RESULTS))
        start = fill(rng, dst.shape, dtype)
        number = draw(st.floats(-100, 100, width=32))
        activation, reverse = draw(st.booleans()), draw(st.booleans())

        def body(d, s, c):
            if activation:
                nisa.activation(d, nl.copy, s, bias=number, scale=c)
            else:
                nisa.tensor_scalar(d, s, nl.multiply, c, op1=nl.subtract, operand1=number, reverse1=reverse)

        got = run(body, dst, start, (a, a_values), (column, column_values))
        product = load(x) * np.repeat(y.astype(np.float64), np.prod(counts))
        product = load(product)
        wanted = product + number if activation else number - product if reverse else product - number
        check(got, dst, start, _stored(store, wanted, dtype))

    @common
    @given(st.data())
    def test_scalar_tensor_tensor(self, load, store, data):
        draw = data.draw
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        partitions, counts = shapes(draw)
        a, a_values, x = operand_values(draw, rng, partitions, counts)
        b, b_values, y = operand_values(draw, rng, partitions, counts)
        dst, dtype = draw(on_chip(partitions, counts, written=True)), draw(st.sampled_from(RESULTS))
        start = fill(rng, dst.shape, dtype)
        number = draw(st.floats(-100, 100, width=32))
        body = lambda d, s, t: nisa.scalar_tensor_tensor(d, s, nl.multiply, number, nl.add, t)  # noqa: E731
        got = run(body, dst, start, (a, a_values), (b, b_values))
        check(got, dst, start, _stored(store, load(load(x) * number) + load(y), dtype))

    @common
    @given(st.data())
    def test_tensor_copy_and_memset(self, load, store, data):
        draw = data.draw
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        partitions, counts = shapes(draw)
        a, a_values, x = operand_values(draw, rng, partitions, counts)
        dst, dtype = draw(on_chip(partitions, counts, written=True)), draw(st.sampled_from(RESULTS))
        start = fill(rng, dst.shape, dtype)
        if draw(st.booleans()):
            got = run(nisa.tensor_copy, dst, start, (a, a_values))
            wanted = x if x.dtype == start.dtype else _stored(store, load(x), dtype)
        else:
            number = draw(st.integers(0, 100) if "int" in dtype else st.floats(-1e3, 1e3))
            got = run(lambda d: nisa.memset(d, number), dst, start)
            wanted = _stored(store, np.full(x.size, number, np.float64), dtype)
        check(got, dst, start, wanted)


COMPARISONS = ("equal", "greater", "greater_equal", "less", "less_equal")
LOWEST = float(np.finfo(np.float32).min)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
class TestSelections:
    @common
    @given(st.data())
    def test_by_a_predicate(self, load, store, data):
        draw = data.draw
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        partitions, counts = shapes(draw)
        copy, reverse = draw(st.booleans()), draw(st.booleans())
        masks = ["uint8", "uint16", "uint32"] if copy else ["int8", "uint8", "int16", "uint16"]
        mask, mask_values, m = operand_values(draw, rng, partitions, counts, masks)
        mask_values = (mask_values % 3).astype(mask_values.dtype)
        m = mask_values.reshape(-1)[mask.addresses].reshape(-1)
        dtype = draw(st.sampled_from(RESULTS))
        names = [dtype] if copy else [name for name in DTYPES if name not in ("int32", "uint32")]
        a, a_values, x = operand_values(draw, rng, partitions, counts, names)
        dst = draw(on_chip(partitions, counts, written=True))
        start = fill(rng, dst.shape, dtype)
        number = draw(st.floats(-100, 100, width=32))
        psum = draw(st.sampled_from([(), (nl.psum,), (nl.sbuf, nl.psum), (nl.sbuf, nl.sbuf, nl.psum)]))

        def body(d, s, p):
            if copy:
                nisa.tensor_copy_predicated(d, s, p, reverse)
            else:
                nisa.select_reduce(d, p, s, number, reverse_pred=reverse)

        got = run(body, dst, start, (a, a_values), (mask, mask_values), psum=psum)
        chosen = (m != 0) != reverse
        if copy:
            wanted = start.reshape(-1)[dst.addresses].reshape(-1).copy()
            wanted[chosen] = x[chosen]
        else:
            wanted = _stored(store, np.where(chosen, load(x), number), dtype)
        check(got, dst, start, wanted)

    @common
    @given(st.data())
    def test_by_position(self, load, store, data):
        draw = data.draw
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        partitions, counts = shapes(draw)
        size = int(np.prod(counts))
        affine = draw(st.booleans())
        floats = [name for name in DTYPES if "float" in name]
        a, a_values, x = operand_values(draw, rng, partitions, counts, tuple(DTYPES) if affine else floats)
        low, low_values, y = operand_values(draw, rng, partitions, [1], ("float32",))
        dst, dtype = draw(on_chip(partitions, counts, written=True)), draw(st.sampled_from(RESULTS))
        start = fill(rng, dst.shape, dtype)
        op, other = (draw(st.sampled_from(COMPARISONS)) for _ in range(2))
        steps = [draw(st.integers(-5, 5)) for _ in counts]
        offset, multiplier, number = (
            draw(st.integers(-9, 9)),
            draw(st.integers(-3, 3)),
            draw(st.floats(-9, 9, width=32)),
        )

        def body(d, s, bound):
            if affine:
                pattern = [[step, n] for step, n in zip(steps, counts, strict=True)]
                nisa.affine_select(d, pattern, multiplier, s, number, getattr(nl, op), offset)
            else:
                nisa.range_select(d, s, getattr(nl, op), getattr(nl, other), bound, bound, range_start=offset)

        got = run(body, dst, start, (a, a_values), (low, low_values))
        if affine:
            grid = np.indices((partitions, *counts))
            value = offset + multiplier * grid[0] + sum(s * g for s, g in zip(steps, grid[1:], strict=True))
            chosen, fallback = getattr(np, op)(value, 0).reshape(-1), number
            kept = x if x.dtype == start.dtype else _stored(store, load(x), dtype)
            wanted = np.where(chosen, kept, _stored(store, np.full(x.size, fallback), dtype))
        else:
            index, bound = np.tile(offset + np.arange(size), partitions), np.repeat(y.astype(np.float64), size)
            chosen = getattr(np, op)(index, bound) & getattr(np, other)(index, bound)
            wanted = _stored(store, np.where(chosen, load(x), LOWEST), dtype)
        check(got, dst, start, wanted)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@common
@given(st.data())
def test_reductions(load, store, data):
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    partitions, counts = shapes(draw)
    a, a_values, x = operand_values(draw, rng, partitions, counts)
    dst, dtype = (
        draw(on_chip(partitions, [1], written=True)),
        draw(st.sampled_from([n for n in RESULTS if "int" not in n])),
    )
    start = fill(rng, dst.shape, dtype)
    name, number = draw(st.sampled_from(["maximum", "minimum"])), draw(st.floats(-9, 9, width=32))
    scalar = draw(st.booleans())

    def body(d, s):
        if scalar:
            sink = nl.ndarray((partitions, int(np.prod(counts))), nl.float32)
            nisa.tensor_scalar_reduce(sink, s, nl.multiply, number, getattr(nl, name), d)
        else:
            nisa.tensor_reduce(d, getattr(nl, name), s, axis=tuple(range(1, s.ndim)))

    got = run(body, dst, start, (a, a_values))
    rows = load(load(x) * number if scalar else x).reshape(partitions, -1)
    check(got, dst, start, _stored(store, getattr(np, name).reduce(rows, axis=1), dtype))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@common
@given(st.data())
def test_dma_transpose_and_compute(load, store, data):
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    transpose = draw(st.booleans())
    rows, columns = draw(st.integers(1, 9)), draw(st.sampled_from([1, 2, 5, 32, 33, 64]))
    dst = draw(on_chip(columns, [rows], written=True))
    if transpose:
        dtype = draw(st.sampled_from(["float32", "bfloat16", "float16", "int32", "uint16"]))
        start = fill(rng, dst.shape, dtype)
        src = draw(on_hbm(rows * columns))
        values = fill(rng, src.shape, dtype)
        matrix = src.addresses.reshape(rows, columns)  # only row-major views have two dimensions to give
        view = lambda t: src.view(t)  # noqa: E731
        if src.addresses.shape != (rows, columns):
            offset = draw(st.integers(0, 3))
            matrix = offset + np.arange(rows)[:, None] * (columns + 1) + np.arange(columns)
            values = fill(rng, (int(matrix.max()) + 2,), dtype)
            view = lambda t: t.ap([[columns + 1, rows], [1, columns]], offset=offset)  # noqa: E731
        operand = Operand(values.shape, view, matrix, "")
        shaped = Operand(dst.shape, lambda t: dst.view(t), dst.addresses, "")
        got = run(nisa.dma_transpose, shaped, start, (operand, values), psum=(nl.sbuf, nl.hbm))
        check(got, dst, start, np.ascontiguousarray(values.reshape(-1)[matrix].T))
        return
    dtype = draw(st.sampled_from(RESULTS))
    start = fill(rng, dst.shape, dtype)
    sources = [operand_values(draw, rng, columns, [rows]) for _ in range(2)]
    body = lambda d, s, t: nisa.dma_compute(d, [s, t], nl.add)  # noqa: E731
    got = run(body, dst, start, *[(operand, values) for operand, values, _ in sources])
    check(got, dst, start, _stored(store, load(sources[0][2]) + load(sources[1][2]), dtype))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@common
@given(st.data())
def test_dma_copy(load, store, data):
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    partitions, counts = shapes(draw)
    size = int(partitions * np.prod(counts))
    regions = [draw(st.sampled_from([nl.sbuf, nl.hbm])) for _ in range(2)]
    dst, src = (
        draw(on_chip(partitions, counts, written) if region is nl.sbuf else on_hbm(size, written))
        for region, written in zip(regions, (True, False), strict=True)
    )
    source, target = draw(st.sampled_from(list(DTYPES))), draw(st.sampled_from(RESULTS))
    values, start = fill(rng, src.shape, source), fill(rng, dst.shape, target)
    got = run(nisa.dma_copy, dst, start, (src, values), psum=regions)
    x = values.reshape(-1)[src.addresses].reshape(-1)
    check(got, dst, start, x if source == target else _stored(store, load(x), target))


@common
@given(st.data())
def test_gather_and_scatter(data):
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows, columns, count = draw(st.integers(1, 9)), draw(st.integers(1, 6)), draw(st.integers(1, 6))
    first = draw(st.integers(0, columns - 1))
    step = draw(st.integers(1, 3))
    width = draw(st.integers(1, (columns - 1 - first) // step + 1))
    # Indices of the table, with some outside; a scatter must not name a row twice (the order is undefined).
    scatter = draw(st.booleans())
    inside = st.integers(0, rows - 1)
    outside = st.sampled_from([-1, -(10**6), rows, 2**31 - 1])
    index = draw(st.lists(inside | outside, min_size=count, max_size=count, unique=scatter))
    table, moved = rng.standard_normal((2, max(rows, count), columns)).astype(np.float32)
    table, moved = table[:rows], moved[:count, :width]
    table, moved = np.ascontiguousarray(table), np.ascontiguousarray(moved)

    def kernel(table, moved, index):
        at = nl.ndarray((count, 1), nl.int32)
        nisa.dma_copy(at, index)
        copy = nl.ndarray(table.shape, nl.float32, nl.shared_hbm)
        nisa.dma_copy(copy, table)
        picked = copy.ap([[columns, count], [step, width]], offset=first, vector_offset=at)
        other = nl.ndarray((count, width), nl.float32)
        nisa.dma_copy(other, moved)
        pair = (picked, other) if scatter else (other, picked)
        nisa.dma_copy(*pair, oob_mode=nisa.oob_mode.skip)
        out = nl.ndarray((count, width), nl.float32, nl.shared_hbm)
        nisa.dma_copy(out, other)
        return copy, out

    copy, out = nki.simulate(kernel)(table, moved, np.array(index, np.int32))
    model_table, model_out = table.copy(), moved.copy()
    for p, row in enumerate(index):
        if 0 <= row < rows:
            columns_of = slice(first, first + (width - 1) * step + 1, step)
            if scatter:
                model_table[row, columns_of] = moved[p]
            else:
                model_out[p] = table[row, columns_of]
    assert np.array_equal(copy, model_table) and np.array_equal(out, model_out)


def _stored(store, values, dtype):
    """As ``store``; NaN becomes 0 in an integer."""
    values = np.asarray(values, np.float64)
    if "int" in dtype:
        values = np.where(np.isnan(values), 0, values)
    return store(values, dtype)
