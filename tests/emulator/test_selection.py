"""Semantics of selections, searches, gathers, accumulating reductions and the other DMA instructions, against NumPy."""

import ml_dtypes
import numpy as np
import pytest

from trn_kernels import emulator

emulator.install()

import nki  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

bfloat16 = ml_dtypes.bfloat16
LOWEST = np.finfo(np.float32).min


def normal(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


def same(a, b):
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, a.dtype, b.shape, b.dtype)
    np.testing.assert_array_equal(a.astype(np.float64), b.astype(np.float64))


def close(a, b, tolerance=1e-6):
    np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=tolerance, atol=tolerance)


# -- selections -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
@pytest.mark.parametrize("psum", [(), (0,), (1,), ("dst",)])
def test_tensor_copy_predicated(execute, rng, dtype, reverse, psum):
    x, mask, start = normal(rng, 33, 6), rng.integers(0, 3, (33, 6)).astype(dtype), normal(rng, 33, 6)
    body = lambda d, s, p: nisa.tensor_copy_predicated(d, s, p, reverse_pred=reverse)  # noqa: E731
    got = execute(body, x, mask, out=((33, 6), np.float32), psum=psum, initial=start)
    same(got, np.where((mask != 0) ^ reverse, x, start))


def test_a_number_is_copied_where_the_predicate_holds(execute, rng):
    mask, start = rng.integers(0, 2, (4, 3, 2)).astype(np.uint8), normal(rng, 4, 6, dtype=bfloat16)
    body = lambda d, p: nisa.tensor_copy_predicated(d, 1.5, p)  # noqa: E731
    got = execute(body, mask, out=((4, 6), bfloat16), initial=start)
    same(got, np.where(mask.reshape(4, 6) != 0, bfloat16(1.5), start))


@pytest.mark.parametrize("vector", [False, True])
def test_select_reduce(execute, rng, vector):
    x, mask, other = normal(rng, 5, 8), rng.integers(-1, 2, (5, 8)).astype(np.int8), normal(rng, 5, 1)

    def body(dst, s, p, o):
        nisa.select_reduce(dst[:, 1:9], p, s, o if vector else -2.0, dst[:, 0:1], nisa.reduce_cmd.reset_reduce)

    got = execute(body, x, mask, other, out=((5, 9), np.float32))
    wanted = np.where(mask != 0, x, other if vector else np.float32(-2))
    same(got, np.concatenate([wanted.max(axis=1, keepdims=True), wanted], axis=1))


@pytest.mark.parametrize("op", ["equal", "not_equal", "greater", "greater_equal", "less", "less_equal"])
def test_affine_select(execute, rng, op):
    x = normal(rng, 40, 12)
    body = lambda d, s: nisa.affine_select(d, [[3, 4], [-1, 3]], 2, s, -7.5, getattr(nl, op), -20)  # noqa: E731
    got = execute(body, x, out=((40, 12), bfloat16))
    value = -20 + 2 * np.arange(40)[:, None, None] + 3 * np.arange(4)[:, None] - np.arange(3)
    same(got, np.where(getattr(np, op)(value, 0).reshape(40, 12), x.astype(bfloat16), bfloat16(-7.5)))


def test_affine_select_needs_only_what_it_selects(execute):
    def body(dst):
        tile = nl.ndarray((4, 4), nl.float32)
        nisa.memset(tile[:, 0:2], 1.0)
        nisa.affine_select(dst, [[-1, 4]], 0, tile, 0.0, nl.greater, 2)

    same(execute(body, out=((4, 4), np.float32)), np.tile(np.float32([1, 1, 0, 0]), (4, 1)))


@pytest.mark.parametrize("dtype, fill", [(np.float32, LOWEST), (bfloat16, -np.inf)])
def test_range_select(execute, rng, dtype, fill):
    x = normal(rng, 6, 10)
    low, high = rng.integers(0, 6, (2, 6, 1)).astype(np.float32)

    def body(dst, s, a, b):
        nisa.range_select(
            dst[:, 1:11], s, nl.greater_equal, nl.less, a, b, reduce_res=dst[:, 0:1], reduce_op=nl.maximum,
            range_start=2,
        )  # fmt: skip

    got = execute(body, x, low, high + 4, out=((6, 11), dtype), psum=(0,))
    index = 2 + np.arange(10)
    chosen = (index >= low) & (index < high + 4)
    row = np.where(chosen, x, LOWEST)
    with np.errstate(over="ignore"):
        wanted = np.concatenate([row.max(axis=1, keepdims=True), row], axis=1).astype(dtype)
    same(got, wanted)
    assert (got[:, 1:][~chosen] == dtype(fill)).all()


# -- searches -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 8), (5, 4, 5), (64, 100)])
def test_max8(execute, rng, shape):
    x = rng.integers(-9, 9, shape).astype(np.float32)
    got = execute(nisa.max8, x, out=((shape[0], 8), np.float32))
    same(got, -np.sort(-x.reshape(shape[0], -1), axis=1)[:, :8])


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_nc_find_index8_serves_equal_values_in_order(execute, dtype):
    data = np.float32([[1, 5, 5, 2, 5, 9, 0, 3, 3]])
    vals = np.float32([[5, 3, 5, 7, 5, 5, 9, 1]])
    got = execute(nisa.nc_find_index8, data, vals, out=((1, 8), dtype))
    none = np.iinfo(dtype).max
    same(got, np.array([[1, 7, 2, none, 4, none, 5, 0]], dtype))


def test_nc_match_replace8_serves_the_last_slot_first(execute):
    # The example of the documentation.
    data = np.float32([[1, 2, 3, 4] + [8] * 7])
    vals = np.float32([[3] + [8] * 7])

    def body(dst, d, v):
        index = nl.ndarray((1, 8), nl.uint32)
        nisa.nc_match_replace8(dst[:, 0:11], d, v, -1.0, dst_idx=index)
        nisa.tensor_copy(dst[:, 11:19], index)

    got = execute(body, data, vals, out=((1, 19), np.float32))
    same(got, np.float32([[1, 2, -1, 4] + [-1] * 7 + [2, 10, 9, 8, 7, 6, 5, 4]]))


def test_nc_match_replace8_in_place_without_indices(execute, rng):
    data = rng.permutation(40).astype(np.float32).reshape(2, 20)

    def body(dst, d):
        vals = nl.ndarray((2, 8), nl.float32)
        nisa.max8(vals, d)
        nisa.nc_match_replace8(d, d, vals, float("-inf"))
        nisa.max8(dst, d)

    same(execute(body, data, out=((2, 8), np.float32)), -np.sort(-data, axis=1)[:, 8:16])


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_nonzero_with_count_works_on_every_sixteenth_partition(execute, dtype):
    x = np.zeros((33, 6), dtype)
    x[0, [1, 4]], x[16, :], x[1] = 3, 1, 9
    start = np.full((33, 7), 5, np.int32)
    got = execute(lambda d, s: nisa.nonzero_with_count(d, s, 10, -2), x, out=((33, 7), np.int32), initial=start)
    wanted = start.copy()
    wanted[0], wanted[16], wanted[32] = [11, 14, -2, -2, -2, -2, 2], [10, 11, 12, 13, 14, 15, 6], [-2] * 6 + [0]
    same(got, wanted)


# -- shuffles and gathers -------------------------------------------------------------------------------


def test_nc_stream_shuffle_works_within_32_partitions(execute, rng):
    x, start = normal(rng, 64, 3), normal(rng, 64, 3)
    mask = [255 if i % 5 == 0 else (7 * i + 3) % 32 for i in range(32)]
    got = execute(lambda d, s: nisa.nc_stream_shuffle(d, s, mask), x, out=((64, 3), np.float32), initial=start)
    wanted = start.copy()
    for p in range(64):
        if mask[p % 32] != 255:
            wanted[p] = x[p // 32 * 32 + mask[p % 32]]
    same(got, wanted)


def test_one_partition_is_broadcast_to_a_quadrant_of_another(execute, rng):
    x = normal(rng, 1, 2, 5)

    def body(dst, s):
        tile = nl.ndarray((128, 10), nl.float32)
        nisa.nc_stream_shuffle(tile[96:120], s, [0] * 32)
        nisa.tensor_copy(dst, tile[96:120])

    same(execute(body, x, out=((24, 10), np.float32)), np.tile(x.reshape(1, 10), (24, 1)))


def test_nc_stream_shuffle_in_place(execute, rng):
    x = normal(rng, 32, 4)

    def body(dst, s):
        nisa.nc_stream_shuffle(s, s, list(reversed(range(32))))
        nisa.tensor_copy(dst, s)

    same(execute(body, x, out=((32, 4), np.float32)), x[::-1])


def test_nc_n_gather(execute, rng):
    x, index = normal(rng, 5, 3, 4, dtype=bfloat16), rng.integers(0, 12, (5, 7)).astype(np.uint32)
    got = execute(nisa.nc_n_gather, x, index, out=((5, 7), bfloat16))
    same(got, np.take_along_axis(x.reshape(5, 12), index.astype(int), axis=1))


@pytest.mark.parametrize("elements, valid", [(1, None), (4, None), (2, 19)])
def test_local_gather(execute, rng, elements, valid):
    x, index = normal(rng, 48, 40), rng.integers(0, 37, (48, 2)).astype(np.uint16)
    count = valid or 32
    body = lambda d, s, i: nisa.local_gather(d, s, i, elements, valid)  # noqa: E731
    got = execute(body, x, index, out=((48, count * elements), np.float32))
    wanted = np.empty_like(got)
    for p in range(48):
        group = index[p // 16 * 16 : p // 16 * 16 + 16]
        ids = [group[i % 16, i // 16] for i in range(count)]
        wanted[p] = np.concatenate([x[p, i : i + elements] for i in ids])
    same(got, wanted)


# -- reductions and statistics --------------------------------------------------------------------------


def test_activation_adds_up_over_several_tiles(execute, rng):
    x = normal(rng, 40, 24)

    def body(dst, s):
        CMD = nisa.reduce_cmd
        sink = nl.ndarray((40, 1), nl.bfloat16).ap([[1, 40], [0, 8]])
        for i, cmd in enumerate((CMD.reset_reduce, CMD.reduce, CMD.reduce)):
            res = dst[:, 0:1] if i == 2 else None
            part = s[:, 8 * i : 8 * i + 8]
            nisa.activation(sink, nl.exp, part, 0.5, 2.0, reduce_op=nl.add, reduce_res=res, reduce_cmd=cmd)
        nisa.activation_reduce(sink, nl.square, s[:, 0:8], nl.add, dst[:, 1:2])

    got = execute(body, x, out=((40, 2), np.float32))
    wide = x.astype(np.float64)
    wanted = np.stack([np.exp(2 * wide + 0.5).sum(axis=1), (wide[:, :8] ** 2).sum(axis=1)], axis=1)
    close(got, wanted, 1e-5)


def test_activation_result_may_be_its_own_sum(execute, rng):
    x = normal(rng, 4, 1)
    body = lambda d, s: nisa.activation_reduce(d, nl.copy, s, nl.add, d)  # noqa: E731
    same(execute(body, x, out=((4, 1), np.float32)), x)


@pytest.mark.parametrize(
    "op, reduce", [("add", np.sum), ("multiply", np.prod), ("maximum", np.max), ("minimum", np.min)]
)
def test_tensor_scalar_reduce(execute, rng, op, reduce):
    x, column = normal(rng, 6, 8), normal(rng, 6, 1)

    def body(dst, s, c):
        CMD = nisa.reduce_cmd
        op_ = getattr(nl, op)
        nisa.tensor_scalar_reduce(dst[:, 1:9], s, nl.subtract, c, op_, dst[:, 0:1])
        nisa.tensor_scalar_reduce(dst[:, 10:18], s, nl.abs, None, op_, None, reduce_cmd=CMD.reset_reduce)
        nisa.tensor_scalar_reduce(
            dst[:, 10:18], s, nl.multiply, 1.0, op_, dst[:, 9:10], reduce_cmd=CMD.reduce, reduce_res_negate=True
        )
        nisa.tensor_scalar_reduce(
            dst[:, 10:18], s, nl.multiply, 1.0, op_, dst[:, 18:19], reduce_cmd=CMD.load_reduce, reduce_init=0.25
        )

    got = execute(body, x, column, out=((6, 19), np.float32)).astype(np.float64)
    x, column = x.astype(np.float64), column.astype(np.float64)
    close(got[:, 1:9], x - column)
    close(got[:, 0], reduce(x - column, axis=1), 1e-5)
    close(got[:, 9], -reduce(np.concatenate([np.abs(x), x], axis=1), axis=1), 1e-5)
    close(got[:, 18], reduce(np.concatenate([x, np.full((6, 1), 0.25)], axis=1), axis=1), 1e-5)


@pytest.mark.parametrize("op", ["add", "maximum"])
def test_tensor_partition_reduce(execute, rng, op):
    x = normal(rng, 100, 2, 3)
    got = execute(lambda d, s: nisa.tensor_partition_reduce(d, getattr(nl, op), s), x, out=((1, 6), np.float32))
    close(got, getattr(np, op).reduce(x.astype(np.float64), axis=0).reshape(1, 6), 1e-5)


def test_tensor_partition_reduce_of_bits(execute, rng):
    x = rng.integers(0, 2**16, (9, 4)).astype(np.uint16)
    got = execute(lambda d, s: nisa.tensor_partition_reduce(d, nl.bitwise_or, s), x, out=((1, 4), np.uint16))
    same(got, np.bitwise_or.reduce(x, axis=0)[None])


@pytest.mark.parametrize("reverse0, reverse1", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("op0, op1", [("multiply", "add"), ("add", "maximum"), ("subtract", "subtract")])
@pytest.mark.parametrize("ones", [False, True])
def test_tensor_tensor_scan(execute, rng, op0, op1, reverse0, reverse1, ones):
    a, b, initial = normal(rng, 5, 9), normal(rng, 5, 9), normal(rng, 5, 1)
    if ones:
        a[:] = 1

    def body(dst, s, t, i):
        nisa.tensor_tensor_scan(dst, s, t, i, getattr(nl, op0), getattr(nl, op1), reverse0, reverse1)

    got = execute(body, a, b, initial, out=((5, 9), np.float32))
    state, wanted = initial[:, 0], []
    for i in range(9):
        first = (state, a[:, i]) if reverse0 else (a[:, i], state)
        first = getattr(np, op0)(*first)
        state = getattr(np, op1)(*((b[:, i], first) if reverse1 else (first, b[:, i])))
        wanted.append(state)
    same(got, np.stack(wanted, axis=1))


@pytest.mark.parametrize("counts", [(512,), (7, 1, 512), (8, 8)])
def test_bn_stats_and_bn_aggr(execute, rng, counts):
    x = normal(rng, 6, sum(counts)) + 3

    def body(dst, s):
        stats = nl.ndarray((6, len(counts), 6), nl.float32)
        at = 0
        for i, n in enumerate(counts):
            nisa.bn_stats(stats[:, i], s[:, at : at + n])
            at += n
        nisa.bn_aggr(dst, stats)

    got = execute(body, x, out=((6, 2), np.float32))
    wide = x.astype(np.float64)
    close(got, np.stack([wide.mean(axis=1), wide.var(axis=1)], axis=1), 1e-5)


def test_reciprocal(execute, rng):
    x = normal(rng, 9, 5)
    same(execute(nisa.reciprocal, x, out=((9, 5), bfloat16)), (np.float32(1) / x).astype(bfloat16))


# -- the Tensor engine ----------------------------------------------------------------------------------


def test_tiles_of_the_array(execute, rng):
    # Two row tiles of 64 by two column tiles of 32: four small matmuls in one tensor.
    x, y = normal(rng, 128, 32), normal(rng, 128, 6)

    def body(dst, s, t):
        for row in (0, 64):
            for column in (0, 32):
                nisa.nc_matmul(
                    dst[column : column + 32, row // 64 * 6 : row // 64 * 6 + 6], s[row : row + 64], t[row : row + 64],
                    tile_position=(row, column), tile_size=(64, 32),
                )  # fmt: skip

    got = execute(body, x, y, out=((64, 12), np.float32), psum=("dst",))
    parts = [x[r : r + 64].astype(np.float64).T @ y[r : r + 64] for r in (0, 64)]
    close(got, np.tile(np.concatenate(parts, axis=1), (2, 1)), 1e-5)


@pytest.mark.parametrize("mode", [nisa.matmul_perf_mode.double_row, "double_row"])
def test_double_row_contracts_256(execute, rng, mode):
    e4m3, e5m2 = ml_dtypes.float8_e4m3, ml_dtypes.float8_e5m2
    x, y = normal(rng, 128, 2, 5, dtype=e4m3), normal(rng, 128, 2, 7, dtype=e5m2)
    got = execute(
        lambda d, s, t: nisa.nc_matmul(d, s, t, perf_mode=mode), x, y, out=((5, 7), np.float32), psum=("dst",)
    )
    close(got, np.einsum("kdm,kdn->mn", x.astype(np.float64), y.astype(np.float64)), 1e-4)


# -- DMA ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape, axes", [((5, 7), (1, 0)), ((5, 3, 7), (2, 1, 0)), ((5, 2, 3, 7), (3, 1, 2, 0))])
@pytest.mark.parametrize("dtype", [bfloat16, np.int32])
@pytest.mark.parametrize("explicit", [False, True])
def test_dma_transpose(execute, rng, shape, axes, dtype, explicit):
    x = (100 * normal(rng, *shape)).astype(dtype)
    body = lambda d, s: nisa.dma_transpose(d, s, axes=axes if explicit else None)  # noqa: E731
    same(execute(body, x, out=(tuple(shape[a] for a in axes), dtype)), x.transpose(axes))


@pytest.mark.parametrize("columns", [1, 2])
def test_gather_transpose(rng, columns):
    rows = 128 * columns
    table, index = normal(rng, 300, 24, dtype=bfloat16), rng.integers(0, 300, (128, columns)).astype(np.uint32)
    index[3, 0] = 2**31  # outside: the column stays

    def kernel(table, index):
        at, dst = nl.ndarray(index.shape, nl.uint32), nl.ndarray((24, rows), nl.bfloat16)
        nisa.dma_copy(at, index)
        nisa.memset(dst, 9.0)
        src = table.ap([[24, rows], [1, 24]], vector_offset=at)
        nisa.dma_transpose(dst, src, axes=(1, 0), oob_mode=nisa.oob_mode.skip)
        out = nl.ndarray((24, rows), nl.bfloat16, nl.shared_hbm)
        nisa.dma_copy(out, dst)
        return out

    got = nki.simulate(kernel)(table, index)
    flat = index.T.reshape(-1)
    wanted = table[np.minimum(flat, 299)].T.copy()
    wanted[:, 3] = 9
    same(got, wanted)


def test_dma_compute_adds_in_fp32(execute, rng):
    x, y, z = normal(rng, 8, 6), normal(rng, 8, 6, dtype=bfloat16), normal(rng, 4, 12)
    body = lambda d, *s: nisa.dma_compute(d, s, nl.add, scales=[1.0] * 3)  # noqa: E731
    got = execute(body, x, y, z, out=((8, 6), bfloat16))
    same(got, (x + y.astype(np.float32) + z.reshape(8, 6)).astype(bfloat16))


@pytest.mark.parametrize("scatter", [False, True])
def test_dma_compute_adds_rows_by_index(rng, scatter):
    table, tile, index = normal(rng, 9, 4), normal(rng, 5, 4), np.int32([[4], [-1], [0], [8], [7]])

    def kernel(table, tile, index):
        at, moved = nl.ndarray((5, 1), nl.int32), nl.ndarray((5, 4), nl.float32)
        nisa.dma_copy(at, index)
        nisa.dma_copy(moved, tile)
        rows = table.ap([[4, 5], [1, 4]], vector_offset=at)
        dst = rows if scatter else moved
        nisa.dma_compute(dst, [rows, moved], nl.add, oob_mode=nisa.oob_mode.skip)
        out = nl.ndarray((5, 4), nl.float32, nl.shared_hbm)
        nisa.dma_copy(out, moved)
        return out

    changed = table.copy()
    got = nki.simulate(kernel)(changed, tile, index)
    inside = index[:, 0] >= 0
    wanted_table, wanted = table.copy(), tile.copy()
    if scatter:
        wanted_table[index[inside, 0]] += tile[inside]
    else:
        wanted[inside] += table[index[inside, 0]]
    same(changed, wanted_table)
    same(got, wanted)


# -- views and constants --------------------------------------------------------------------------------


def test_views(execute, rng):
    x = normal(rng, 4, 2, 3, 5)
    views = {
        "slice": (lambda t: t.slice(3, 1, 5, 2), x[:, :, :, 1:5:2]),
        "select": (lambda t: t.select(2, 1), x[:, :, 1]),
        "permute": (lambda t: t.permute((0, 3, 1, 2)), x.transpose(0, 3, 1, 2)),
        "broadcast": (lambda t: t[:, 0:1].broadcast(1, 4), np.broadcast_to(x[:, 0:1], (4, 4, 3, 5))),
        "expand": (lambda t: t.select(1, 0).expand_dim(1).squeeze_dim(1), x[:, 0]),
        "flatten": (lambda t: t.flatten_dims(1, 2), x.reshape(4, 6, 5)),
        "split": (lambda t: t.flatten_dims(1, 3).reshape_dim(1, (-1, 5)), x.reshape(4, 6, 5)),
        "rearrange": (
            lambda t: t.flatten_dims(1, 2).rearrange(("p", ("a", "b"), "c"), ("p", ("c", "a"), "b"), {"a": 2}),
            x.transpose(0, 3, 1, 2).reshape(4, 10, 3),
        ),
    }  # fmt: skip
    for name, (view, wanted) in views.items():
        if name == "rearrange":  # the merged dimensions are no run of memory
            with pytest.raises(emulator.NKIError, match="not one run"):
                execute(lambda d, s, view=view: nisa.tensor_copy(d, view(s)), x, out=(wanted.shape, np.float32))
            continue
        got = execute(lambda d, s, view=view: nisa.tensor_copy(d, view(s)), x, out=(wanted.shape, np.float32))
        same(got, np.ascontiguousarray(wanted))


def test_view_reinterprets_bytes(execute, rng):
    x = normal(rng, 3, 4)
    got = execute(lambda d, s: nisa.tensor_copy(d, s.view(nl.uint16)), x, out=((3, 8), np.uint16))
    same(got, x.view(np.uint16))


def test_dynamic_selects(rng):
    table, index = normal(rng, 6, 3, 4), np.int32([[5], [2]])

    def kernel(table, index):
        at, out = nl.ndarray((2, 1), nl.int32), nl.ndarray((3, 3, 4), nl.float32, nl.shared_hbm)
        nisa.dma_copy(at, index)
        nisa.dma_copy(out[0], table.select(0, at[0:1]))
        nisa.dma_copy(out[1:3], table.vector_select(0, at))
        return out

    same(nki.simulate(kernel)(table, index), table[[5, 5, 2]])


def test_constants(execute, tmp_path):
    table = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.save(tmp_path / "table.npy", table)

    def kernel():
        out = nl.ndarray((7, 4), nl.float32, nl.shared_hbm)
        nisa.dma_copy(out[0:3], nl.shared_constant(str(tmp_path / "table.npy")))
        nisa.dma_copy(out[3:7], nl.shared_identity_matrix(4, nl.float32))
        return out

    same(nki.simulate(kernel)(), np.concatenate([table, np.eye(4, dtype=np.float32)]))


# -- loops and objects of NKI up to 0.6 ------------------------------------------------------------------


def test_loops_of_older_versions():
    def kernel(count):
        left, bound = nl.ndarray((1, 1), nl.int32), nisa.register_alloc()
        nisa.dma_copy(left, count)
        nisa.register_load(bound, left)
        total = nl.ndarray((1, 2), nl.int32)
        nisa.memset(total, 0)
        for _ in nl.dynamic_range(0, bound, 2):
            nisa.tensor_scalar(total[:, 0:1], total[:, 0:1], nl.add, 1)
        while bound:
            nisa.tensor_scalar(total[:, 1:2], total[:, 1:2], nl.add, 1)
            nisa.tensor_scalar(left, left, nl.subtract, 1)
            nisa.register_load(bound, left)
        out = nl.ndarray((1, 2), nl.int32, nl.shared_hbm)
        nisa.dma_copy(out, total)
        return out

    same(nki.simulate(kernel)(np.int32([[5]])), np.int32([[3, 5]]))


def test_a_register_still_steers_no_if(refused):
    def kernel():
        if nisa.register_alloc(1):
            pass

    refused("register-value", kernel)


def test_nki_objects():
    from dataclasses import dataclass

    class Plain(nl.NKIObject):
        size: int = 3

    @dataclass
    class Fields(nl.NKIObject):
        first: int
        second: int = 2

    @dataclass(frozen=True)
    class Frozen(nl.NKIObject):
        first: int

    class Own(nl.NKIObject):
        def __init__(self, x):
            self.doubled = 2 * x

    assert Plain().size == 3 and Plain(size=4, other=5).other == 5
    assert Fields(1) == Fields(first=1, second=2) and Fields(second=5).second == 5
    assert not hasattr(Fields(second=5), "first") and Fields(first=1, extra=7).extra == 7
    assert Frozen(1).first == 1 and Frozen(first=1, more=2).more == 2
    assert Own(4).doubled == 8
    with pytest.raises(TypeError):
        Own(y=1)


def test_the_simulator_variable_runs_a_plain_call(monkeypatch):
    @nki.jit
    def double(x):
        tile, out = nl.ndarray(x.shape, x.dtype), nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        nisa.dma_copy(tile, x)
        nisa.tensor_tensor(tile, tile, tile, nl.add)
        nisa.dma_copy(out, tile)
        return out

    monkeypatch.setenv("NKI_SIMULATOR", "1")
    same(double[1](np.float32([[1, 2]])), np.float32([[2, 4]]))


def test_names_that_kernels_import():
    import nki.collectives as collectives
    import nki.dtype
    from nki.isa.constants import dge_mode, oob_mode

    assert dge_mode is nisa.dge_mode and oob_mode is nisa.oob_mode
    assert nki.dtype.bfloat16 == nl.bfloat16 and nl.bool == nl.bool_ and list(nl.range(2)) == [0, 1]
    assert collectives.ReplicaGroup([[0, 1]]).replica_groups == [[0, 1]]
    with pytest.raises(emulator.NKIError, match="all_reduce"):
        collectives.all_reduce([], [], None, nl.add)
    with pytest.raises(AttributeError):
        nl.no_such_name  # noqa: B018


@pytest.mark.parametrize("dtype", [bfloat16, np.float16, ml_dtypes.float8_e4m3])
def test_full_precision_keeps_fp32_between_instructions(monkeypatch, rng, dtype):
    def kernel(x):
        tile, out = nl.ndarray(x.shape, x.dtype), nl.ndarray(x.shape, nl.float32, nl.shared_hbm)
        nisa.dma_copy(tile, x)
        nisa.tensor_scalar(tile, tile, nl.multiply, 1 / 3)
        nisa.tensor_scalar(tile, tile, nl.multiply, 3.0)
        nisa.dma_copy(out, tile)
        nisa.dma_copy(x, tile)
        same_kind = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        nisa.dma_copy(same_kind, tile)
        return out, same_kind

    x = normal(rng, 4, 32, dtype=dtype)
    before = x.copy()
    rounded, _ = nki.simulate(kernel)(x.copy())
    monkeypatch.setenv("NKI_PRECISE_FP", "0")
    exact, narrow = nki.simulate(kernel)(x)
    close(exact, before.astype(np.float64))
    assert np.abs(rounded - exact).max() > 1e-4
    assert narrow.dtype == dtype and np.array_equal(narrow, before) and np.array_equal(x, before)


def test_invert_and_erf_dx(execute, rng):
    bits = rng.integers(0, 255, (3, 4)).astype(np.uint8)
    same(execute(lambda d, s: nisa.tensor_scalar(d, s, nl.invert, 0), bits, out=((3, 4), np.uint8)), ~bits)
    x = normal(rng, 3, 4)
    got = execute(lambda d, s: nisa.activation(d, nl.erf_dx, s), x, out=((3, 4), np.float32))
    close(got, 2 / np.sqrt(np.pi) * np.exp(-(x.astype(np.float64) ** 2)))
