"""Two cores: meetings, exchanges, and races on shared HBM found in either order of running."""

import threading

import numpy as np
import pytest

from trn_kernels import emulator
from trn_kernels.emulator import NKIError, core_order

emulator.install()

import nki  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

ORDERS = [(0, 1), (1, 0)]
X = np.arange(64, dtype=np.float32).reshape(8, 8)


def launch(kernel, *args, order=(0, 1)):
    with core_order(*order):
        return nki.simulate(nki.jit(kernel)[2])(*args)


def tile_of(value, *shape):
    tile = nl.ndarray(shape, nl.float32)
    nisa.memset(tile, value)
    return tile


@pytest.mark.parametrize("order", ORDERS)
def test_cores_exchange_tiles_and_meet_in_order(order):
    seen = []

    def kernel(x):
        me = nl.program_id()
        mine, theirs = nl.ndarray((4, 8), nl.float32), nl.ndarray((4, 8), nl.float32)
        nisa.dma_copy(mine, x[4 * me : 4 * me + 4])
        out = nl.ndarray((8, 8), nl.float32, nl.shared_hbm)
        for step in range(3):
            seen.append((step, me))
            nisa.sendrecv(mine, theirs, 1 - me, 1 - me, pipe_id=0)
            nisa.tensor_tensor(mine, mine, theirs, nl.add)
        nisa.core_barrier(out, (0, 1))
        seen.append((3, me))
        nisa.dma_copy(out[4 * me : 4 * me + 4], mine)
        return out

    total = 4 * (X[:4] + X[4:])
    assert np.array_equal(launch(kernel, X, order=order), np.concatenate([total, total]))
    assert seen == [(step, core) for step in range(4) for core in order]


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_written_before_a_barrier_is_read_after_it(order):
    def kernel(x):
        me = nl.program_id()
        middle = nl.ndarray((2, 8), nl.float32, nl.shared_hbm)
        out = nl.ndarray((2, 8), nl.float32, nl.shared_hbm)
        nisa.dma_copy(middle[me], x[me])
        nisa.core_barrier(middle, (0, 1))
        nisa.dma_copy(out[me], middle[1 - me])
        return out

    assert np.array_equal(launch(kernel, X, order=order), X[[1, 0]])


def test_a_launch_without_meetings_starts_no_thread():
    seen = []
    launch(lambda: seen.append(threading.current_thread()))
    assert seen == [threading.current_thread()] * 2


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_error_of_a_core_ends_the_launch(order, failing, after):
    def kernel():
        shared = nl.ndarray((2, 2), nl.float32, nl.shared_hbm)
        for step in range(2):
            if nl.program_id() == failing and step == after:
                raise ZeroDivisionError(step)
            nisa.core_barrier(shared, (0, 1))
        if nl.program_id() == failing:
            raise ZeroDivisionError(2)

    threads = threading.active_count()
    with pytest.raises(ZeroDivisionError, match=str(after)):
        launch(kernel, order=order)
    assert threading.active_count() == threads
    assert launch(lambda: None) is None  # the next launch is not affected


@pytest.mark.parametrize("order", ORDERS)
def test_the_race_names_both_lines_and_the_first_element(order):
    def kernel():
        out = nl.ndarray((8, 4), nl.float32, nl.shared_hbm)
        if nl.program_id() == 0:
            nisa.dma_copy(out[0:5], tile_of(0.0, 5, 4))
        else:
            nisa.dma_copy(out[4:8], tile_of(1.0, 4, 4))
        return out

    with pytest.raises(NKIError) as caught:
        launch(kernel, order=order)
    line = kernel.__code__.co_firstlineno
    assert caught.value.rule == "core-race"
    for words in (f"{__file__}:{line + 3}", f"{__file__}:{line + 5}", "(4, 0)"):
        assert words in str(caught.value)


def columns(width, step, offset):
    """Each core writes the columns of its half of a matrix [6, 8], in tiles of ``width``."""

    def kernel():
        out = nl.ndarray((6, 8), nl.float32, nl.shared_hbm)
        for first in range(nl.program_id() * offset, nl.program_id() * offset + 4, step):
            nisa.dma_copy(out[:, first : first + width], tile_of(float(nl.program_id()), 6, width))
        return out

    return kernel


@pytest.mark.parametrize("order", ORDERS)
def test_interleaved_columns_are_no_race(order):
    out = launch(columns(2, 2, 4), order=order)
    assert np.array_equal(out, np.repeat(np.float32([[0, 1]]), 4, axis=1).repeat(6, axis=0))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("width, step, offset", [(3, 2, 3), (2, 2, 3)])
def test_columns_that_touch_are_a_race(order, width, step, offset):
    with pytest.raises(NKIError, match="core-race"):
        launch(columns(width, step, offset), order=order)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rows, clash", [(([0, 5], [3, 1]), False), (([0, 5], [3, 5]), True)])
def test_scatters_race_by_the_rows_that_they_name(order, rows, clash):
    def kernel(index):
        out = nl.ndarray((8, 4), nl.float32, nl.shared_hbm)
        if nl.program_id() == 0:
            nisa.dma_copy(out, tile_of(-1.0, 8, 4))
        nisa.core_barrier(out, (0, 1))
        at = nl.ndarray((2, 1), nl.int32)
        nisa.dma_copy(at, index[nl.program_id()])
        nisa.dma_copy(out.ap([[4, 2], [1, 4]], vector_offset=at), tile_of(float(nl.program_id()), 2, 4))
        return out

    index = np.array(rows, np.int32)
    if clash:
        with pytest.raises(NKIError, match=r"core-race") as caught:
            launch(kernel, index, order=order)
        assert "(5, 0)" in str(caught.value)
    else:
        assert launch(kernel, index, order=order)[:, 0].tolist() == [0, 1, -1, 1, -1, 0, -1, -1]


@pytest.mark.parametrize("order", ORDERS)
def test_cores_that_do_the_same_work_twice_are_no_race(order):
    def kernel(x):
        out = nl.ndarray((8, 8), nl.float32, nl.shared_hbm)
        tile = nl.ndarray((8, 8), nl.float32)
        nisa.dma_copy(out, tile_of(0.0, 8, 8))
        nisa.dma_copy(tile, x)
        nisa.dma_copy(out, tile)
        nisa.dma_copy(out, out)  # waits for what was written
        return out

    assert np.array_equal(launch(kernel, X, order=order), X)


@pytest.mark.parametrize("order", ORDERS)
def test_adding_to_shared_memory_twice_is_a_race(order):
    def kernel(x):
        tile = nl.ndarray((8, 8), nl.float32)
        nisa.dma_copy(tile, x)
        nisa.tensor_scalar(tile, tile, nl.add, 1.0)
        nisa.dma_copy(x, tile)

    with pytest.raises(NKIError, match="core-race"):
        launch(kernel, X.copy(), order=order)


@pytest.mark.parametrize("step", [1, 2])  # a strided argument is copied in and out
@pytest.mark.parametrize("order", ORDERS)
def test_an_array_that_is_passed_twice_is_one_tensor(order, step):
    def apart(x, y):
        nisa.dma_copy((x, y)[nl.program_id()], tile_of(nl.program_id(), 8, 4))

    def together(x, y):
        me = nl.program_id()
        nisa.dma_copy((x, y)[me][4 * me : 4 * me + 4], tile_of(1 + me, 4, 4))

    z = np.zeros((8, 4 * step), np.float32)[:, ::step]
    with pytest.raises(NKIError, match="core-race"):
        launch(apart, z, z, order=order)
    launch(apart, z, z.copy(), order=order)
    launch(together, z, z, order=order)
    assert z[:, 0].tolist() == [1] * 4 + [2] * 4


@pytest.mark.parametrize("order", ORDERS)
def test_zeroing_what_the_other_core_fills_is_a_race(order):
    # As nki-library's MoE backward does with the affinity gradient: shares of the zeroing and of the work differ.
    def kernel():
        me = nl.program_id()
        out = nl.ndarray((8, 4), nl.float32, nl.shared_hbm)
        nisa.dma_copy(out[4 * me : 4 * me + 4], tile_of(0.0, 4, 4))
        nisa.dma_copy(out.ap([[8, 4], [1, 4]], offset=4 * me), tile_of(2.0, 4, 4))
        return out

    with pytest.raises(NKIError, match="core-race"):
        launch(kernel, order=order)


def test_races_can_be_left_unchecked():
    with emulator.unchecked("core-race", "never-written"):
        launch(columns(2, 2, 3))
    with pytest.raises(ValueError, match="address-overlap, capacity, core-race, never-written"):
        emulator.unchecked("everything").__enter__()
