"""The RoPE kernel alone, against NumPy, in both layouts, on one and two cores and in both core orders."""

import collections

import ml_dtypes
import numpy as np
import pytest

from trn_kernels import emulator

emulator.install()

import nki.isa as nisa  # noqa: E402

from trn_kernels.kernels import rope as module  # noqa: E402
from trn_kernels.kernels.rope import rope  # noqa: E402
from trn_kernels.kernels.rope_hf import rope_hf  # noqa: E402


def expected(x, table, positions=None, backward=False):
    """fp32 arithmetic, one rounding: the definition, one batch row at a time."""
    head_dim = x.shape[-1]
    out = np.empty_like(x)
    for b in range(x.shape[0]):
        rows = table[b] if table.ndim == 3 else table
        index = np.arange(x.shape[1]) if positions is None else positions[b % positions.shape[0]]
        cos, sin = np.split(rows[index].astype(np.float32)[:, None, :], 2, axis=-1)
        y = x[b].astype(np.float32)
        (y1, y2), (c1, c2), (s1, s2) = (np.split(t, 2, axis=-1) for t in (y, cos, sin))
        halves = (y1 * c1 + y2 * s2, y2 * c2 - y1 * s1) if backward else (y1 * c1 - y2 * s1, y2 * c2 + y1 * s2)
        out[b] = np.concatenate(halves, axis=-1).astype(x.dtype)
    assert out.shape[-1] == head_dim
    return out


def inputs(rng, shape, heads, dtype, table_dtype=np.float32, table_shape=None):
    batch, seq, head_dim = shape
    query, key = (rng.standard_normal((batch, seq, n, head_dim)).astype(dtype) for n in heads)
    # Random tables: their halves differ, so a swapped or negated half shows.
    table = rng.standard_normal(table_shape or (seq + 5, 2 * head_dim)).astype(table_dtype)
    return query, key, table


# (batch, sequence, head_dim), (query heads, key heads)
SHAPES = [
    ((2, 100, 92), (5, 1)),  # less than a tile; head_dim no power of two
    ((1, 129, 128), (32, 8)),  # one row more than a tile
    ((3, 1, 64), (7, 7)),  # one position: with two cores the second has none
    ((1, 300, 2), (3, 2)),  # smallest head_dim
    ((1, 5, 128), (213, 73)),  # more heads than one chunk holds
    ((1, 3, 4098), (2, 1)),  # more columns than one chunk holds
    ((2, 0, 64), (2, 1)),  # no position at all
]


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("shape, heads", SHAPES)
def test_equals_the_definition(shape, heads, dtype, lnc):
    rng = np.random.default_rng(0)
    query, key, table = inputs(rng, shape, heads, dtype)
    batch, seq, _ = shape
    for positions in (None, rng.integers(0, seq + 5, (batch, seq)), rng.integers(0, seq + 5, (1, seq))):
        if positions is not None:
            positions = positions.astype(np.int32)
        for backward in (False, True):
            got = emulator.simulate(rope[lnc])(query, key, table, positions, False, backward)
            for x, y in zip((query, key), got, strict=True):
                np.testing.assert_array_equal(y, expected(x, table, positions, backward))


@pytest.mark.parametrize("positions", [False, True])
def test_a_table_per_batch(positions):
    rng = np.random.default_rng(1)
    query, key, table = inputs(rng, (3, 130, 64), (2, 1), np.float32, table_shape=(3, 140, 128))
    index = rng.integers(0, 140, (3, 130)).astype(np.int32) if positions else None
    got = emulator.simulate(rope[2])(query, key, table, index)
    np.testing.assert_array_equal(got[0], expected(query, table, index))
    np.testing.assert_array_equal(got[1], expected(key, table, index))


def test_a_table_in_the_dtype_of_the_tensors():
    rng = np.random.default_rng(2)
    query, key, table = inputs(rng, (1, 70, 64), (2, 1), ml_dtypes.bfloat16, ml_dtypes.bfloat16)
    got = emulator.simulate(rope[1])(query, key, table)
    np.testing.assert_array_equal(got[0], expected(query, table))


@pytest.mark.parametrize("lnc", [None, 1, 2])
def test_heads_first_is_another_access_pattern(lnc):
    rng = np.random.default_rng(3)
    query, key, table = inputs(rng, (2, 200, 64), (5, 3), np.float32)
    kernel = rope if lnc is None else rope[lnc]
    swapped = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (query, key)]
    got = emulator.simulate(kernel)(*swapped, table, heads_first=True)
    for x, y in zip((query, key), got, strict=True):
        np.testing.assert_array_equal(y.swapaxes(1, 2), expected(x, table))


def test_both_core_orders_give_the_same_bits():
    rng = np.random.default_rng(4)
    args = inputs(rng, (2, 423, 64), (3, 2), ml_dtypes.bfloat16)
    forwards = emulator.simulate(rope[2])(*args)
    with emulator.core_order(1, 0):
        backwards = emulator.simulate(rope[2])(*args)
    for a, b in zip(forwards, backwards, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("position", [-1, 64, 2**31 - 1])
def test_a_position_outside_the_table_never_reads(position):
    rng = np.random.default_rng(5)
    query, key, table = inputs(rng, (1, 8, 64), (1, 1), np.float32, table_shape=(64, 128))
    positions = np.full((1, 8), 3, np.int32)
    positions[0, 5] = position
    with pytest.raises(emulator.NKIError, match=f"index {position}") as error:
        emulator.simulate(rope[2])(query, key, table, positions)
    assert error.value.rule == "indirect-range"


@pytest.mark.parametrize("lnc", [1, 2])
def test_each_element_crosses_hbm_once(monkeypatch, lnc):
    reads, writes = collections.Counter(), collections.Counter()

    def record(dst, src, *args, **kwargs):
        for tensor, counts in ((src, reads), (dst, writes)):
            if not tensor.buffer.on_chip:
                counts[tensor.name or "output"] += tensor.size * emulator.dtypes.itemsize(tensor.dtype)
        dma_copy(dst, src, *args, **kwargs)

    dma_copy = nisa.dma_copy
    monkeypatch.setattr(nisa, "dma_copy", record)
    rng = np.random.default_rng(6)
    query, key, table = inputs(rng, (2, 300, 64), (40, 5), ml_dtypes.bfloat16)
    emulator.simulate(rope[lnc])(query, key, table)
    assert reads == {"query": query.nbytes, "key": key.nbytes, "rope_cache": table[:300].nbytes}
    assert writes == {"output": query.nbytes + key.nbytes}


def test_two_chunks_and_two_tables_fit_on_chip():
    """The largest: fp32, and a head fills a bank of PSUM."""
    query, key = (np.empty((1, 128, heads, 512), np.float32) for heads in (40, 8))
    (core,) = emulator.profile(module.rope, shape_only=True)(query, key, np.empty((128, 1024), np.float32)).cores
    assert 2 * core.sbuf <= emulator.arch.TRN2.sbuf_usable_bytes
    assert 2 * core.psum <= emulator.arch.TRN2.psum_bytes


def test_what_is_not_finite_stays_in_its_tile():
    """The Tensor engine multiplies other positions of the tile by 0; nothing else may change."""
    rng = np.random.default_rng(9)
    query, key, table = inputs(rng, (1, 300, 64), (3, 1), np.float32)
    clean = emulator.simulate(rope)(query, key, table)
    query[0, 130, 1, 5] = np.inf
    with np.errstate(all="ignore"):
        got = emulator.simulate(rope)(query, key, table)
    np.testing.assert_array_equal(got[1], clean[1])
    reached = ~np.isfinite(got[0])
    assert reached[0, 130, 1, [5, 37]].all()
    assert not reached[:, :128].any() and not reached[:, 256:].any() and not reached[:, :, [0, 2]].any()
    np.testing.assert_array_equal(got[0][~reached], clean[0][~reached])


@pytest.mark.parametrize("lnc, seq", [(1, 128), (2, 512), (2, 0)])
def test_rope_hf_contract(lnc, seq):
    rng = np.random.default_rng(7)
    query, key, table = inputs(rng, (2, seq, 64), (4, 2), np.float32)
    swapped = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (query, key)]
    got = emulator.simulate(rope_hf[lnc])(*swapped, table, True)
    np.testing.assert_array_equal(got[0].swapaxes(1, 2), expected(query, table, backward=True))


def test_rope_hf_refuses_a_partial_tile():
    rng = np.random.default_rng(8)
    query, key, table = inputs(rng, (1, 64, 64), (1, 1), np.float32)
    with pytest.raises(AssertionError, match="sequence length 64 is no multiple of 256"):
        emulator.simulate(rope_hf[2])(query.swapaxes(1, 2).copy(), key.swapaxes(1, 2).copy(), table)
