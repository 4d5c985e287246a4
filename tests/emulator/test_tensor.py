"""Tensors: indexing, access patterns, reshape, shared storage."""

import numpy as np
import pytest

from trn_kernels import emulator

emulator.install()

import nki  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

ON_CHIP = (nl.sbuf, nl.psum)
EVERYWHERE = (nl.sbuf, nl.psum, nl.hbm, nl.shared_hbm)


def in_kernel(body):
    """Run ``body`` inside a launch and return what it returns."""
    results = []
    nki.simulate(lambda: results.append(body()))()
    return results[0]


def fresh(shape, buffer, dtype=nl.float32):
    return nl.ndarray(shape, dtype=dtype, buffer=buffer)


def elements(t):
    """Numbers of the elements of the storage that a view holds, by the definition of an address."""
    grid = np.indices(t.shape)
    return t.offset + sum(stride * index for stride, index in zip(t.strides, grid, strict=True))


# -- attributes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffer", EVERYWHERE)
def test_attributes_of_a_fresh_tensor(buffer):
    t = in_kernel(lambda: nl.ndarray([4, 3, 5], dtype=nl.bfloat16, buffer=buffer, name="x"))
    assert (t.shape, t.strides, t.offset) == ((4, 3, 5), (15, 5, 1), 0)
    assert (t.dtype, t.buffer, t.ndim, t.size, t.name) == ("bfloat16", buffer, 3, 60, "x")


def test_buffer_is_sbuf_by_default():
    assert in_kernel(lambda: nl.ndarray((1, 1), nl.float32)).buffer is nl.sbuf


def test_a_tensor_is_compared_with_none_only():
    t, other = in_kernel(lambda: (fresh((2, 2), nl.sbuf), fresh((2, 2), nl.sbuf)))
    assert (t == None, t.__eq__(None), t != None) == (False, False, True)  # noqa: E711
    assert {t: 1, other: 2}[other] == 2 and len({t, other, t}) == 2
    for use in (lambda: t == other, lambda: t != 1, lambda: t + t, lambda: 2 * t, lambda: float(t)):
        with pytest.raises(emulator.NKIError, match="tensor-value"):
            use()
    for use in (lambda: list(t), lambda: len(t)):
        with pytest.raises(TypeError):
            use()


@pytest.mark.parametrize("buffer", EVERYWHERE)
@pytest.mark.parametrize("shape", [(2, 2), (1, 1)])
def test_a_condition_asks_whether_there_is_a_tensor(buffer, shape):
    """nki-library does, of outputs on HBM and of indices on chip."""
    assert in_kernel(lambda: fresh(shape, buffer))


@pytest.mark.parametrize("buffer", ON_CHIP)
def test_a_condition_does_not_ask_for_an_element(buffer):
    t = in_kernel(lambda: fresh((2, 2), buffer))
    assert t[0:1]
    with pytest.raises(emulator.NKIError, match="tensor-value"):
        bool(t[0:1, 1:2])


# -- indexing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffer", ON_CHIP)
@pytest.mark.parametrize(
    "key, shape, offset",
    [
        (0, (1, 64, 8), 0),
        (5, (1, 64, 8), 5 * 512),
        (-1, (1, 64, 8), 63 * 512),
        ((slice(None), 0, 3), (64, 1), 3),
        ((0, 0, 3), (1, 1), 3),
        ((slice(None), 2), (64, 8), 16),
        ((Ellipsis, 3), (64, 64), 3),
        ((32, Ellipsis), (1, 64, 8), 32 * 512),
        (Ellipsis, (64, 64, 8), 0),
        ((slice(0, 32), slice(1, 64, 3)), (32, 21, 8), 8),
        ((slice(-32, None), slice(-4, -1), slice(None)), (32, 3, 8), 32 * 512 + 60 * 8),
        ((slice(None), np.int64(2), np.int32(1)), (64, 1), 17),
        ((slice(0, 0),), (0, 64, 8), 0),
    ],
)
def test_index_on_chip_keeps_the_partitions_and_two_dimensions(buffer, key, shape, offset):
    t = in_kernel(lambda: fresh((64, 64, 8), buffer)[key])
    assert (t.shape, t.offset) == (shape, offset)


@pytest.mark.parametrize("buffer", (nl.hbm, nl.shared_hbm))
@pytest.mark.parametrize(
    "key, shape, offset",
    [
        (0, (5, 6), 0),
        (-1, (5, 6), 3 * 30),
        ((1, 2), (6,), 42),
        ((1, 2, 3), (1,), 45),
        ((slice(None), 2), (4, 6), 12),
        ((slice(1, 4, 2), Ellipsis, 5), (2, 5), 35),
    ],
)
def test_index_on_hbm_drops_dimensions_down_to_one(buffer, key, shape, offset):
    t = in_kernel(lambda: fresh((4, 5, 6), buffer)[key])
    assert (t.shape, t.offset) == (shape, offset)


@pytest.mark.parametrize(
    "key",
    [
        (slice(2, 9), slice(1, 20, 3), slice(None)),
        (Ellipsis, slice(4, 5)),
        (slice(None), slice(3, 17), 2),
        (3, Ellipsis, slice(0, 6, 5)),
        (slice(-5, -2), slice(-7, None, 2)),
    ],
)
@pytest.mark.parametrize("buffer", (nl.sbuf, nl.hbm))
def test_index_picks_the_elements_that_numpy_picks(buffer, key):
    shape = (10, 20, 6)
    t = in_kernel(lambda: fresh(shape, buffer)[key])
    wanted = np.arange(1200).reshape(shape)[key]
    assert np.array_equal(elements(t).reshape(-1), wanted.reshape(-1))


def test_index_of_an_index_composes():
    def view():
        return fresh((64, 10, 10), nl.sbuf)[32:64][:, 2:8, 1:9:2][:, 3]

    wanted = np.arange(6400).reshape(64, 10, 10)[32:64][:, 2:8, 1:9:2][:, 3]
    assert np.array_equal(elements(in_kernel(view)), wanted)


def test_ds_is_a_slice_of_a_size():
    t = in_kernel(lambda: fresh((8, 8), nl.hbm)[nl.ds(2, 3), nl.ds(1, 4)])
    assert (t.shape, t.offset) == ((3, 4), 17)


@pytest.mark.parametrize("buffer", (nl.sbuf, nl.psum, nl.hbm))
@pytest.mark.parametrize(
    "key, rule",
    [
        (8, "index"),
        (-9, "index"),
        ((0, 16), "index"),
        (slice(0, 9), "index"),
        (slice(9, 10), "index"),
        (slice(-9, None), "index"),
        (slice(5, 3), "index"),
        ((0, slice(0, 4, -1)), "index"),
        ((0, slice(0, 4, 0)), "index"),
        ((0, 0, 0), "index"),
        ((Ellipsis, Ellipsis), "index"),
        (None, "index"),
        (True, "index"),
        (np.bool_(True), "index"),
        (1.0, "index"),
        ([0, 1], "index"),
        (np.arange(2), "index"),
        (slice(0.0, 2), "integer"),
        (slice(0, True), "integer"),
    ],
)
def test_index_refused(refused, buffer, key, rule):
    refused(rule, lambda: fresh((8, 16), buffer)[key])


def test_index_by_a_tensor_is_refused(refused):
    refused("index", lambda: fresh((8, 16), nl.hbm)[fresh((1, 1), nl.sbuf, nl.int32)])


def test_partitions_have_no_step(refused):
    refused("partition-step", lambda: fresh((64, 4), nl.sbuf)[0:64:2], says=("step 2",))


# -- reshape --------------------------------------------------------------------------------------------


def test_reshape_keeps_storage_and_order():
    t = in_kernel(lambda: fresh((4, 6, 5), nl.hbm).reshape((2, 60)))
    assert (t.shape, t.strides) == ((2, 60), (60, 1))
    t = in_kernel(lambda: fresh((4, 6, 5), nl.sbuf)[:, 2:4].reshape([4, 10]))
    assert (t.shape, t.strides, t.offset) == ((4, 10), (30, 1), 10)


def test_reshape_of_a_contiguous_view_with_dimensions_of_one_element():
    # One row of a free dimension has no holes, whatever the stride of the dimension of size 1.
    t = in_kernel(lambda: fresh((4, 6, 5), nl.sbuf)[:, 2:3, 0:5].reshape((4, 5)))
    assert np.array_equal(elements(t), np.arange(120).reshape(4, 6, 5)[:, 2])


@pytest.mark.parametrize(
    "shape, buffer, new, rule",
    [
        ((4, 6), nl.hbm, (4, 5), "reshape"),
        ((4, 6), nl.sbuf, (8, 3), "reshape"),
        ((4, 6), nl.hbm, 24, "shape"),
        ((4, 6), nl.hbm, (-1, 6), "shape"),
        ((4, 6), nl.hbm, (4.0, 6), "integer"),
        ((4, 1), nl.sbuf, (4,), "on-chip-rank"),
    ],
)
def test_reshape_refused(refused, shape, buffer, new, rule):
    refused(rule, lambda: fresh(shape, buffer).reshape(new))


def test_reshape_of_a_view_with_holes_is_refused(refused):
    refused("reshape", lambda: fresh((4, 6, 4), nl.sbuf)[:, :, 0:2].reshape((4, 12)), says=("not contiguous",))


# -- access patterns ------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffer", ON_CHIP)
@pytest.mark.parametrize(
    "pattern, offset",
    [
        ([[24, 8], [1, 24]], 0),
        ([[24, 8], [6, 4], [1, 6]], 0),
        ([[24, 8], [1, 6], [6, 4]], 0),
        ([[24, 4], [0, 5], [2, 3]], 3 * 24 + 7),
        ([(24, 8), (0, 3)], 23),
        ([[1, 1], [1, 24]], 24),  # one partition: its step does not matter
        ([[24, 8]], 5),
    ],
)
def test_ap_on_chip(buffer, pattern, offset):
    t = in_kernel(lambda: fresh((8, 24), buffer).ap(pattern, offset=offset))
    assert t.shape == tuple(n for _, n in pattern) and t.strides == tuple(s for s, _ in pattern)
    assert t.offset == offset and t.buffer is buffer


def test_ap_of_a_single_column_steps_by_one():
    # One element per partition: [1, P] is the partition step, nki-library writes it so.
    assert in_kernel(lambda: fresh((64, 1), nl.sbuf).ap([[1, 64], [0, 100]])).shape == (64, 100)


@pytest.mark.parametrize("pattern, offset", [([[0, 128], [1, 60]], 0), ([[7, 3], [2, 5]], 4), ([[1, 60]], 0)])
def test_ap_on_hbm_takes_any_pattern(pattern, offset):
    assert in_kernel(lambda: fresh((60,), nl.hbm).ap(pattern=pattern, offset=offset)).offset == offset


def test_ap_addresses_the_storage_and_inherits_the_offset():
    t = in_kernel(lambda: fresh((64, 10), nl.sbuf)[32:64, 4:6].ap([[10, 32], [1, 6]]))
    assert (t.offset, t.shape) == (324, (32, 6))
    again = in_kernel(lambda: fresh((8, 10), nl.hbm).ap([[20, 4], [1, 3]]).ap([[10, 8], [1, 10]]))
    assert np.array_equal(elements(again), np.arange(80).reshape(8, 10))


def test_ap_reinterprets_the_bytes():
    bits = np.arange(32, dtype=np.int32).reshape(4, 8) * 0x10001 + 1

    def kernel(x):
        out = nl.ndarray((4, 16), nl.int16, nl.shared_hbm)
        nisa.dma_copy(out, x.ap([[16, 4], [1, 16]], dtype=nl.int16))
        return out

    assert np.array_equal(nki.simulate(kernel)(bits), bits.view(np.int16))


@pytest.mark.parametrize("buffer", ON_CHIP)
@pytest.mark.parametrize(
    "pattern, offset, rule, says",
    [
        ([[12, 8], [1, 12]], 0, "ap", "must be 24"),
        ([[48, 4], [1, 24]], 0, "ap", "must be 24"),
        ([[0, 8], [1, 24]], 0, "ap", "must be 24"),
        ([[24, 9], [1, 24]], 0, "ap", "of 192"),
        ([[24, 8], [1, 24]], 24, "ap", "of 192"),
        ([[24, 8], [1, 24]], 1, "ap", "1 to 24"),
        ([[24, 8], [6, 5]], 0, "ap", "0 to 24"),
        ([[24, 8], [-1, 24]], 23, "ap", ">= 0"),
        ([[24, 8], [1, -1]], 0, "ap", ">= 0"),
        ([[24, 8], [1, 24]], -1, "ap", ">= 0"),
        ([], 0, "ap", ">= 0"),
        ([24, 8], 0, "ap", "[[stride, count], ...]"),
        (None, 0, "ap", "[[stride, count], ...]"),
        ([[24, 8], [1, 2.0]], 0, "integer", "2.0"),
        ([[24, True], [1, 2]], 0, "integer", "True"),
        ([[24, 8], [1, 2]], 1.0, "integer", "offset"),
    ],
)
def test_ap_refused_on_chip(refused, buffer, pattern, offset, rule, says):
    # A view that leaves its tensor may be made, not used: kernels make some that they do not use.
    refused(rule, lambda: fresh((8, 24), buffer).ap(pattern, offset=offset)[...], says=(says,))


def test_ap_refused_on_hbm(refused):
    refused("ap", lambda: fresh((8, 24), nl.hbm).ap([[24, 8], [1, 25]])[...], says=("192",))
    refused("ap", lambda: fresh((0, 24), nl.hbm).ap([[24, 1], [1, 1]])[...], says=("of 0",))
    refused("ap", lambda: fresh((4, 0), nl.sbuf).ap([[1, 1], [1, 1]])[...], says=("of 0",))


def test_ap_with_an_offset_on_a_view_is_ambiguous(refused):
    refused("ap-offset", lambda: fresh((64, 8), nl.hbm)[2:].ap([[8, 2], [1, 8]], offset=0))
    refused("ap-offset", lambda: fresh((64, 8), nl.hbm)[2:].ap([[8, 2], [1, 4]], dtype=nl.int16))


# -- storage --------------------------------------------------------------------------------------------


def test_views_share_storage():
    def kernel():
        tile = nl.ndarray((64, 4, 3), nl.int32)
        nisa.memset(tile, 0)
        nisa.memset(tile[:, 1], 1)
        nisa.memset(tile.reshape((64, 12))[0:32, 11:12], 2)
        nisa.memset(tile.ap([[12, 32], [3, 4]], offset=32 * 12 + 2), 3)
        out = nl.ndarray((64, 12), nl.int32, nl.shared_hbm)
        nisa.dma_copy(out, tile)
        return out

    wanted = np.zeros((64, 4, 3), np.int32)
    wanted[:, 1] = 1
    wanted[:32, 3, 2] = 2
    wanted[32:, :, 2] = 3
    assert np.array_equal(nki.simulate(kernel)(), wanted.reshape(64, 12))


@pytest.mark.usefixtures("poisoned")
def test_every_ndarray_is_its_own_storage_also_at_one_address():
    def kernel():
        out = nl.ndarray((2, 4), nl.float32, nl.shared_hbm)
        for i in range(2):
            tile = nl.ndarray((1, 4), nl.float32, address=(0, 0))
            if i == 0:
                nisa.memset(tile, 1.0)
            nisa.dma_copy(out[i], tile)
        return out

    out = nki.simulate(kernel)()
    assert (out[0] == 1).all() and np.isnan(out[1]).all()


def test_zero_elements_move_nothing():
    def kernel(x):
        out = nl.ndarray((0, 4), nl.float32, nl.shared_hbm)
        tile = nl.ndarray((64, 4), nl.float32)
        nisa.memset(tile[0:0], 0.0)
        nisa.tensor_tensor(tile[:, 2:2], tile[:, 0:0], tile[:, 1:1], nl.add)
        nisa.dma_copy(tile[0:0], x)
        nisa.dma_copy(out, tile[0:0])
        return out

    assert nki.simulate(kernel)(np.empty((0, 4), np.float32)).shape == (0, 4)
