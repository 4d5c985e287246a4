"""dma_copy: static patterns, gather and scatter, run-time offsets, indices out of range, conversion."""

import ml_dtypes
import numpy as np
import pytest

from trn_kernels import emulator

emulator.install()

import nki  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

# Many of these look at what a copy leaves as it was.
pytestmark = pytest.mark.usefixtures("poisoned")

SKIP, ERROR = nisa.oob_mode.skip, nisa.oob_mode.error
ROWS, COLUMNS = 7, 5


def table(dtype=np.float32):
    return np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS).astype(dtype)


def load_index(index):
    tile = nl.ndarray((index.shape[0], 1), index.dtype)
    nisa.dma_copy(tile, index)
    return tile


def through_sbuf(source, shape, dtype=None):
    tile = nl.ndarray(shape, dtype or source.dtype)
    nisa.dma_copy(tile, source)
    return tile


# -- static ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shapes", [[(6,), (6, 1)], [(6,), (1, 6)], [(2, 3, 4), (2, 12)], [(24,), (4, 2, 3)], [(1, 8), (2, 4)]]
)
def test_only_the_number_of_elements_must_agree(shapes):
    x = np.arange(np.prod(shapes[0]), dtype=np.int32).reshape(shapes[0])

    def kernel(x):
        out = nl.ndarray(shapes[0], nl.int32, nl.shared_hbm)
        nisa.dma_copy(out, through_sbuf(x, shapes[1]))
        return out

    assert np.array_equal(nki.simulate(kernel)(x), x)


def test_hbm_to_hbm_and_sbuf_to_sbuf_at_any_partition():
    x = table()

    def kernel(x):
        tile, other = nl.ndarray((ROWS, COLUMNS), x.dtype), nl.ndarray((128, COLUMNS), x.dtype)
        nisa.dma_copy(tile, x)
        nisa.dma_copy(dst=other[3 : 3 + ROWS], src=tile)  # no start-partition rule for a DMA
        turned = nl.ndarray((128, ROWS), x.dtype)
        nisa.dma_transpose(turned[5 : 5 + COLUMNS], other[3 : 3 + ROWS])
        nisa.dma_transpose(other[7 : 7 + ROWS], turned[5 : 5 + COLUMNS])
        middle = nl.ndarray(x.shape, x.dtype, nl.hbm)
        nisa.dma_copy(middle, other[7 : 7 + ROWS])
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        nisa.dma_copy(out, middle)
        nisa.dma_copy(out, out)  # a fence at the end of a kernel
        return out

    assert np.array_equal(nki.simulate(kernel)(x), x)


def test_rows_repeat_and_transpose_by_patterns():
    x = table()

    def kernel(x):
        out = nl.ndarray((3, COLUMNS, ROWS), x.dtype, nl.shared_hbm)
        nisa.dma_copy(out, x.ap([[0, 3], [1, COLUMNS], [COLUMNS, ROWS]]))
        return out

    assert np.array_equal(nki.simulate(kernel)(x), np.broadcast_to(x.T, (3, COLUMNS, ROWS)))


def test_interleaved_writes_do_not_overlap():
    # Strides 2 and 3 with counts 3 and 2: six different elements, though the dimensions cross.
    def kernel(x):
        out = nl.ndarray((8,), nl.float32, nl.shared_hbm)
        nisa.dma_copy(out.ap([[2, 3], [3, 2]]), x)
        return out

    out = nki.simulate(kernel)(np.arange(6, dtype=np.float32))
    np.testing.assert_array_equal(out, [0, np.nan, 2, 1, 4, 3, np.nan, 5])


def test_rows_of_one_tensor_move_within_it():
    def kernel(x):
        nisa.dma_copy(x[0:3], x[3:6])
        return x

    x = table()
    assert np.array_equal(nki.simulate(kernel)(x)[:3], table()[3:6])


@pytest.mark.parametrize("mode", list(nisa.dge_mode))
def test_static_copies_in_every_dge_mode(mode):
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        engine = nisa.engine.sync if mode is nisa.dge_mode.hwdge else nisa.engine.unknown
        nisa.dma_copy(out, x, ERROR, mode, engine, "name")
        return out

    assert np.array_equal(nki.simulate(kernel)(table()), table())


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, np.int32, np.uint8])
def test_equal_dtypes_are_copied_bit_for_bit(dtype):
    bits = np.random.default_rng(0).integers(0, 256, (4, 64), np.uint8).view(dtype)

    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        nisa.dma_copy(out, through_sbuf(x, x.shape))
        return out

    assert np.array_equal(nki.simulate(kernel)(bits).view(np.uint8), bits.view(np.uint8))


# -- scalar_offset --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
@pytest.mark.parametrize("dim, index, wanted", [
    (0, 3, lambda x: x[3:5, 1:4]),
    (1, 1, lambda x: x[0:2, 2:5]),
])  # fmt: skip
def test_scalar_offset_moves_a_window(dtype, dim, index, wanted):
    def kernel(x, index):
        at = load_index(index)
        window = x.ap([[COLUMNS, 2], [1, 3]], offset=1, scalar_offset=at, indirect_dim=dim)
        out = nl.ndarray((2, 3), x.dtype, nl.shared_hbm)
        nisa.dma_copy(out, window, dge_mode=nisa.dge_mode.hwdge)
        return out

    out = nki.simulate(kernel)(table(), np.array([index], dtype))
    assert np.array_equal(out, wanted(table()))


def test_scalar_offset_on_the_destination():
    def kernel(x, index):
        out = nl.ndarray((4, COLUMNS), x.dtype, nl.shared_hbm)
        nisa.dma_copy(out.ap([[COLUMNS, 1], [1, COLUMNS]], scalar_offset=load_index(index)), x[0:1])
        return out

    out = nki.simulate(kernel)(table(), np.array([2], np.int32))
    assert np.array_equal(out[2], table()[0]) and np.isnan(out[[0, 1, 3]]).all()


def test_scalar_offset_of_a_reshaped_tensor_counts_its_rows():
    def kernel(x, index):
        halves = x.reshape((ROWS * COLUMNS,))
        out = nl.ndarray((2,), x.dtype, nl.shared_hbm)
        nisa.dma_copy(out, halves.ap([[1, 2]], scalar_offset=load_index(index)))
        return out

    assert np.array_equal(nki.simulate(kernel)(table(), np.array([33], np.int32)), [33, 34])


@pytest.mark.parametrize("where", ["src", "dst"])
@pytest.mark.parametrize("index", [-1, -1000000, 6, 7, 2**31 - 1])
def test_scalar_offset_out_of_range(refused, where, index):
    # Windows of two rows: 5 is the last index inside.
    def kernel(x, index, mode=ERROR):
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        at = load_index(index)
        pattern = [[COLUMNS, 2], [1, COLUMNS]]
        if where == "src":
            nisa.dma_copy(out[0:2], x.ap(pattern, scalar_offset=at), oob_mode=mode)
        else:
            nisa.dma_copy(out.ap(pattern, scalar_offset=at), x[0:2], oob_mode=mode)
        return out

    index = np.array([index], np.int32)
    refused("indirect-range", kernel, table(), index, says=(f"index {index[0]}", "nisa.dma_copy"))
    assert np.isnan(nki.simulate(kernel)(table(), index, SKIP)).all()
    assert not np.isnan(nki.simulate(kernel)(table(), np.array([5], np.int32))).all()


def test_scalar_offset_stays_in_its_partition(refused):
    def kernel(x, index):
        tile, at = through_sbuf(x, x.shape), load_index(index)
        out = nl.ndarray((ROWS, 2), x.dtype, nl.shared_hbm)
        nisa.dma_copy(out, tile.ap([[COLUMNS, ROWS], [1, 2]], scalar_offset=at, indirect_dim=1))
        return out

    assert np.array_equal(nki.simulate(kernel)(table(), np.array([3], np.int32)), table()[:, 3:5])
    refused("indirect-range", kernel, table(), np.array([4], np.int32), says=("index 4", "of 5"))


# -- vector_offset --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
@pytest.mark.parametrize("leading", [1, COLUMNS])
def test_gather(dtype, leading):
    index = np.array([6, 0, 3, 3], dtype)

    def kernel(x, index):
        # The leading stride is not used; nki-library writes 1 there.
        rows = x.ap([[leading, 4], [2, 2]], offset=1, vector_offset=load_index(index), indirect_dim=0)
        out = nl.ndarray((4, 2), x.dtype, nl.shared_hbm)
        nisa.dma_copy(out, rows)
        return out

    assert np.array_equal(nki.simulate(kernel)(table(), index), table()[index][:, 1:4:2])


def test_scatter_leaves_other_rows_and_the_last_of_a_repeated_row():
    index = np.array([5, 0, 5], np.int32)

    def kernel(x, index):
        out = nl.ndarray((ROWS, COLUMNS), x.dtype, nl.shared_hbm)
        rows = out.ap([[COLUMNS, 3], [1, COLUMNS]], vector_offset=load_index(index))
        nisa.dma_copy(rows, through_sbuf(x[0:3], (3, COLUMNS)))
        return out

    out = nki.simulate(kernel)(table(), index)
    assert np.array_equal(out[[5, 0]], table()[[2, 1]]) and np.isnan(out[[1, 2, 3, 4, 6]]).all()


def test_gather_into_scatter_with_conversion():
    source, target = np.array([2, 6, 1], np.int32), np.array([0, 4, 3], np.uint32)

    def kernel(x, source, target):
        out = nl.ndarray((5, COLUMNS), nl.float32, nl.shared_hbm)
        pattern = [[COLUMNS, 3], [1, COLUMNS]]
        nisa.dma_copy(
            out.ap(pattern, vector_offset=load_index(target)), x.ap(pattern, vector_offset=load_index(source))
        )
        return out

    out = nki.simulate(kernel)(table(np.int32), source, target)
    assert np.array_equal(out[target], table()[source]) and np.isnan(out[[1, 2]]).all()


OUTSIDE = [(np.int32, -1), (np.int32, -1000000), (np.int32, ROWS), (np.uint32, 2**32 - 1), (np.uint32, ROWS)]


@pytest.mark.parametrize("dtype, bad", OUTSIDE)
@pytest.mark.parametrize("shape", [(3, COLUMNS), (3 * COLUMNS,), (1, 3, COLUMNS)])
def test_gather_out_of_range(refused, dtype, bad, shape):
    index = np.array([ROWS - 1, bad, 0], dtype)

    def kernel(x, index, mode=ERROR):
        rows = x.ap([[COLUMNS, 3], [1, COLUMNS]], vector_offset=load_index(index))
        tile = nl.ndarray(shape, nl.float16, nl.shared_hbm)
        nisa.dma_copy(tile, rows, oob_mode=mode)
        return tile

    refused("indirect-range", kernel, table(), index, says=(str(bad), f"{ROWS} rows"))
    out = nki.simulate(kernel)(table(), index, SKIP).reshape(3, COLUMNS)
    assert np.array_equal(out[[0, 2]], table()[[ROWS - 1, 0]]) and np.isnan(out[1]).all()


@pytest.mark.parametrize("dtype, bad", OUTSIDE)
def test_scatter_out_of_range(refused, dtype, bad):
    index = np.array([1, bad], dtype)

    def kernel(x, index, mode=ERROR):
        out = nl.ndarray((ROWS, COLUMNS), x.dtype, nl.shared_hbm)
        rows = out.ap([[COLUMNS, 2], [1, COLUMNS]], vector_offset=load_index(index))
        nisa.dma_copy(rows, x[0:2], oob_mode=mode)
        return out

    refused("indirect-range", kernel, table(), index, says=(str(bad),))
    out = nki.simulate(kernel)(table(), index, SKIP)
    assert np.array_equal(out[1], table()[0]) and np.isnan(np.delete(out, 1, 0)).all()


def test_rows_end_where_the_pattern_would_leave_the_tensor(refused):
    # From element 5 on, row 6 of the pattern would start at element 35, outside the table of 35.
    def kernel(x, index):
        rows = x.ap([[1, 1], [1, COLUMNS]], offset=COLUMNS, vector_offset=load_index(index))
        out = nl.ndarray((1, COLUMNS), x.dtype, nl.shared_hbm)
        nisa.dma_copy(out, rows)
        return out

    assert np.array_equal(nki.simulate(kernel)(table(), np.array([5], np.int32)), table()[6:7])
    refused("indirect-range", kernel, table(), np.array([6], np.int32), says=("index 6", "6 rows"))


def test_indices_may_be_a_strided_view():
    index = np.array([[9, 2], [9, 0], [9, 4]], np.int32)

    def kernel(x, index):
        at = through_sbuf(index, (3, 2))
        out = nl.ndarray((3, COLUMNS), x.dtype, nl.shared_hbm)
        nisa.dma_copy(out, x.ap([[1, 3], [1, COLUMNS]], vector_offset=at.ap([[2, 3], [1, 1]], offset=1)))
        return out

    assert np.array_equal(nki.simulate(kernel)(table(), index), table()[[2, 0, 4]])


def test_skipped_integers_keep_their_bits():
    def kernel(x, index):
        tile = nl.ndarray((2, COLUMNS), nl.int32)
        nisa.memset(tile, -(2**31))
        nisa.dma_copy(tile, x.ap([[1, 2], [1, COLUMNS]], vector_offset=load_index(index)), oob_mode=SKIP)
        out = nl.ndarray((2, COLUMNS), nl.int32, nl.shared_hbm)
        nisa.dma_copy(out, tile)
        return out

    x = table(np.int32) + 2**24 + 1
    out = nki.simulate(kernel)(x, np.array([-1, 2], np.int32))
    assert (out[0] == -(2**31)).all() and np.array_equal(out[1], x[2])
