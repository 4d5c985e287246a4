"""The grouped-expert kernels alone: shapes that break such kernels, schedules, traffic and memory budgets."""

import collections
import itertools

import numpy as np
import pytest
import torch

from trn_kernels import emulator

emulator.install()

import nki.isa as nisa  # noqa: E402

from trn_kernels.kernels import grouped_experts as module  # noqa: E402
from trn_kernels.kernels.grouped_experts import grouped_experts, grouped_experts_backward  # noqa: E402
from trn_kernels.ops.grouped_experts import EXTRA_SLOTS, MAX_DIM, SLOT_COLUMNS, TILE_ROWS, routing_tables  # noqa: E402


def silu(z):
    return z / (1 + np.exp(-z))


def truth(x, w1, w2, w3, counts, grad_y=None):
    """fp64, one expert after the other: y, and with grad_y the gradients of x, w1, w2, w3."""
    x, w1, w2, w3 = (t.astype(np.float64) for t in (x, w1, w2, w3))
    y, grads = np.zeros_like(x), [np.zeros_like(t) for t in (x, w1, w2, w3)]
    for e, (start, end) in enumerate(itertools.pairwise(np.concatenate([[0], np.cumsum(counts)]))):
        rows = slice(start, end)
        h1, h3 = x[rows] @ w1[e].T, x[rows] @ w3[e].T
        a = silu(h1) * h3
        y[rows] = a @ w2[e].T
        if grad_y is not None:
            s = 1 / (1 + np.exp(-h1))
            da = grad_y[rows].astype(np.float64) @ w2[e]
            dh1, dh3 = da * h3 * s * (1 + h1 * (1 - s)), da * h1 * s
            grads[0][rows] = dh1 @ w1[e] + dh3 @ w3[e]
            grads[1][e], grads[2][e], grads[3][e] = dh1.T @ x[rows], grad_y[rows].T @ a, dh3.T @ x[rows]
    return (y, *grads)


def inputs(counts, dim, hidden, rest=0, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    num_rows, num_experts = sum(counts) + rest, len(counts)

    def draw(*shape):
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(dtype)

    x, grad_y = (rng.standard_normal((num_rows, dim)).astype(dtype) for _ in range(2))
    weights = draw(num_experts, hidden, dim), draw(num_experts, dim, hidden), draw(num_experts, hidden, dim)
    return x, *weights, np.array(counts), grad_y


def tables(counts, num_rows, lnc):
    return [t.numpy() for t in routing_tables(torch.tensor(counts), num_rows, lnc)]


def run(x, w1, w2, w3, counts, grad_y, lnc, need=(True, True, True, True)):
    rows, slots = tables(counts, len(x), lnc)
    y, h1, h3 = emulator.simulate(grouped_experts[lnc])(x, w1, w2, w3, rows, slots, True)
    backward = emulator.simulate(grouped_experts_backward[lnc])
    return y, *backward(grad_y, x, w1, w2, w3, h1, h3, rows, slots, *need)


# counts of the experts, D, F, rows of no expert
SHAPES = {
    "two of eight experts": ([64, 64, 0, 0, 0, 0, 0, 0], 64, 32, 0),
    "all on expert 3": ([0, 0, 0, 512, 0, 0, 0, 0], 64, 32, 0),
    "one expert": ([300], 128, 128, 0),
    "odd number of experts": ([3, 130, 0, 128, 127, 1, 257], 96, 160, 0),
    "one token": ([0, 0, 1, 0], 64, 32, 0),
    "nothing is a multiple of anything": ([60, 1, 0, 129, 73, 128, 2], 97, 47, 0),
    "odd, more than a block of 128": ([5, 140], 257, 131, 1),
    "smaller than every tile": ([4, 0, 9], 12, 20, 0),
    "D of 1": ([5, 3], 1, 1, 0),
    "rows of no expert": ([100, 0, 30], 64, 130, 400),
    "only rows of no expert": ([0, 0, 0], 16, 16, 300),
    "several tiles, pairs and quads": ([1100, 140, 600], 40, 24, 3),
}


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("case", SHAPES)
def test_equals_the_definition(case, lnc):
    counts, dim, hidden, rest = SHAPES[case]
    args = inputs(counts, dim, hidden, rest)
    for got, want in zip(run(*args, lnc), truth(*args), strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * max(1.0, np.abs(want).max()))
    # What no row reaches is exactly zero, also where the memory was poisoned.
    y, grad_x, *grad_weights = run(*args, lnc)
    routed = sum(counts)
    assert not y[routed:].any() and not grad_x[routed:].any()
    for gradient in grad_weights:
        assert not gradient[[n == 0 for n in counts]].any()


@pytest.mark.parametrize("lnc", [1, 2])
def test_features_stay_in_place(lnc):
    """D 768 and F 384 with feature i = i: identity-like weights show any permutation of features."""
    dim, hidden = 768, 384
    x = np.tile(np.arange(dim, dtype=np.float32) / dim, (130, 1))
    w1 = np.full((1, hidden, dim), 0, np.float32)
    w3, w2 = w1.copy(), np.zeros((1, dim, hidden), np.float32)
    w1[0, :, 0] = 20.0  # feature 0 is 0 in x, so make the gate 1 through feature dim - 1
    w1[0, :, dim - 1] = 20.0
    w3[0, np.arange(hidden), 2 * np.arange(hidden)] = 1.0
    w2[0, 2 * np.arange(hidden) + 1, np.arange(hidden)] = 1.0
    args = (x, w1, w2, w3, np.array([130]), np.ones_like(x))
    y = run(*args, lnc)[0]
    gate = 20.0 * (dim - 1) / dim
    np.testing.assert_allclose(y[:, 1::2], np.tile(gate * x[0, ::2], (130, 1)), rtol=1e-6)
    assert not y[:, ::2].any()


@pytest.mark.parametrize("need", [n for n in itertools.product([False, True], repeat=4) if any(n)])
def test_only_the_gradients_asked_for(need):
    args = inputs([130, 5, 0], 40, 24, 10)
    full = run(*args, 2)[1:]
    got = run(*args, 2, need)[1:]
    for a, b in zip(got, itertools.compress(full, need), strict=True):
        np.testing.assert_array_equal(a, b)


def test_ten_runs_and_both_core_orders_give_the_same_bits():
    args = inputs([300, 0, 129, 7, 260], 64, 48, 40)
    first = run(*args, 2)
    for _ in range(9):
        for a, b in zip(run(*args, 2), first, strict=True):
            np.testing.assert_array_equal(a, b)
    with emulator.core_order(1, 0):
        for a, b in zip(run(*args, 2), first, strict=True):
            np.testing.assert_array_equal(a, b)


# What the forward and the backward do of D 64, F 300 in fp32 with this many bytes: experts whose weights are there,
# columns of F, tiles of an iteration.
BUDGETS = {
    50_000: ((2, 300, 2), (2, 300, 2)),
    30_000: ((2, 300, 2), (2, 300, 1)),
    23_000: ((2, 300, 1), (1, 300, 1)),
    21_000: ((2, 300, 1), (0, 256, 1)),
    18_000: ((1, 300, 1), (0, 128, 1)),
    15_000: ((0, 128, 1), (0, 128, 1)),
}


@pytest.mark.parametrize("budget", BUDGETS)
def test_every_use_of_sbuf_gives_the_same(monkeypatch, budget):
    args = inputs([200, 0, 129, 7], 64, 300)
    want = run(*args, 2)
    monkeypatch.setattr(module, "SBUF_BYTES", budget)
    monkeypatch.setattr(module, "ACCUMULATOR_BYTES", 256)
    monkeypatch.setattr(module, "ACCUMULATOR_COLUMNS", 48)
    assert (module._plan_forward(64, 300, 4, True), module._plan_backward(64, 300, 4, True)) == BUDGETS[budget]
    for a, b in zip(run(*args, 2), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_too_large_for_sbuf_says_so(monkeypatch):
    monkeypatch.setattr(module, "SBUF_BYTES", 3000)
    with pytest.raises(AssertionError, match="D 64 needs .* bytes per partition of SBUF, there are 3000"):
        run(*inputs([5], 64, 32), 1)


@pytest.mark.parametrize("dtype", MAX_DIM)
def test_the_largest_dim_has_a_plan_for_every_hidden(dtype):
    for hidden in (*range(1, 1100), 14336, 65536):
        module._plan_forward(MAX_DIM[dtype], hidden, dtype.itemsize, True)
        module._plan_backward(MAX_DIM[dtype], hidden, dtype.itemsize, True)
    with pytest.raises(AssertionError, match="bytes per partition of SBUF"):
        module._plan_forward(MAX_DIM[dtype] + 128, 768, dtype.itemsize, True)


def test_the_plan_of_real_shapes():
    """Qwen3-30B-A3B: in bf16 two experts' weights and two tiles at a time, forward and backward."""
    dim, hidden = 2048, 768
    assert module._plan_forward(dim, hidden, 2, True) == (2, hidden, 2)
    assert module._plan_backward(dim, hidden, 2, True) == (2, hidden, 2)
    assert module._plan_forward(dim, hidden, 4, True)[0] == 1
    assert emulator.arch.TRN2.sbuf_usable_bytes >= module.SBUF_BYTES
    # Weight gradients: accumulators, and four tiles of both operands, twice.
    for left, right in ((hidden, dim), (dim, hidden)):
        columns = min(right, module.ACCUMULATOR_COLUMNS)
        rows = min(left, module.ACCUMULATOR_BYTES // (columns * 4) * 128)
        assert module.ACCUMULATOR_BYTES + 2 * 4 * (rows + columns) * 4 <= module.SBUF_BYTES
    # Widths of Mixtral do not fit whole, nor does a D of 8192: chunks of F.
    for dim, hidden, size in ((4096, 14336, 2), (4096, 14336, 4), (8192, 2048, 2), (8192, 2048, 4)):
        plans = module._plan_forward(dim, hidden, size, True), module._plan_backward(dim, hidden, size, True)
        for buffers, chunk, group in plans:
            assert buffers == 0 and 128 <= chunk < hidden and group == 1


@pytest.mark.parametrize("dim", [2049, 4500])
def test_rows_wider_than_a_piece(dim):
    args = inputs([130, 3], dim, 20, 5)
    for got, want in zip(run(*args, 2), truth(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * max(1.0, np.abs(want).max()))


def traffic(monkeypatch, kernel, *args):
    """Bytes that the kernel's DMAs read and write, by tensor name; a gather counts the rows that are there."""
    reads, writes = collections.Counter(), collections.Counter()
    dma_copy = nisa.dma_copy

    def record(dst, src, **kwargs):
        for t, counts in ((src, reads), (dst, writes)):
            if not t.buffer.on_chip:
                size = t.size
                if t.runtime is not None and t.runtime.per_partition:
                    index = t.runtime.index.array()
                    size = size // index.size * int((index >= 0).sum())
                counts[t.name or str(t.storage.shape)] += size * emulator.dtypes.itemsize(t.dtype)
        dma_copy(dst, src, **kwargs)

    monkeypatch.setattr(nisa, "dma_copy", record)
    result = emulator.simulate(kernel)(*args)
    monkeypatch.setattr(nisa, "dma_copy", dma_copy)
    return result, reads, writes


@pytest.mark.parametrize("lnc", [1, 2])
def test_weights_are_loaded_once_and_gradients_written_once(monkeypatch, lnc):
    counts, dim, hidden = [300, 140, 128, 500], 64, 48
    x, w1, w2, w3, counts, grad_y = inputs(counts, dim, hidden)
    rows, slots = tables(counts, len(x), lnc)
    (y, h1, h3), reads, writes = traffic(monkeypatch, grouped_experts[lnc], x, w1, w2, w3, rows, slots, True)
    # The slot that is loaded ahead of the last one is empty: expert 0 once more per core.
    ahead = lnc * w1.nbytes // len(counts)
    assert reads["w1"] == reads["w2"] == reads["w3"] == w1.nbytes + ahead
    assert reads["x"] == x.nbytes
    assert sum(writes.values()) == y.nbytes + h1.nbytes + h3.nbytes
    arguments = (grad_y, x, w1, w2, w3, h1, h3, rows, slots)
    _, reads, writes = traffic(monkeypatch, grouped_experts_backward[lnc], *arguments)
    assert reads["w1"] == w1.nbytes + ahead
    assert writes[str(w1.shape)] == 2 * w1.nbytes and writes[str(w2.shape)] == w2.nbytes


def test_cores_write_disjoint_rows(monkeypatch):
    counts = [300, 140, 128, 500, 0, 3, 77]
    x, w1, w2, w3, counts, grad_y = inputs(counts, 32, 24, 50)
    rows, slots = tables(counts, len(x), 2)
    tiles = rows[:, : slots[0, 0, module.HEAD]]  # after them some tiles are there once more
    written = [tiles[core][tiles[core] >= 0] for core in range(2)]
    assert not set(written[0]) & set(written[1])
    assert sorted(np.concatenate(written)) == list(range(len(x)))
    experts = [set(slots[core, :-3, module.RESULT]) - {-1} for core in range(2)]
    assert not experts[0] & experts[1] and experts[0] | experts[1] == set(range(7))


def test_constants_are_those_of_the_operator():
    assert (TILE_ROWS, SLOT_COLUMNS, EXTRA_SLOTS) == (module.P, module.SLOT_COLUMNS, module.EXTRA_SLOTS)
