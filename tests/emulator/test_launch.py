"""Launches: cores, memories, poison, failed calls, threads, kernels in kernels."""

import gc
import threading

import numpy as np
import pytest

from trn_kernels import emulator
from trn_kernels.emulator import NKIError, core_order
from trn_kernels.emulator.dtypes import FLOATS, INTEGERS

emulator.install()

import nki  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402


@nki.jit
def double(x):
    """2 * x through SBUF."""
    tile = nl.ndarray(x.shape, x.dtype)
    nisa.dma_copy(tile, x)
    nisa.tensor_tensor(tile, tile, tile, nl.add)
    out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    nisa.dma_copy(out, tile)
    return out


ONES = np.ones((3, 4), np.float32)


# -- poison ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("buffer", [nl.sbuf, nl.hbm, nl.shared_hbm])
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, "bool"])
def test_fresh_memory_reads_nan_or_four(buffer, dtype):
    def kernel():
        out = nl.ndarray((2, 3), dtype, nl.shared_hbm)
        nisa.dma_copy(out, nl.ndarray((2, 3), dtype, buffer))
        return out

    out = nki.simulate(kernel)()
    assert np.isnan(out.astype(np.float64)).all() if dtype in FLOATS else (out == 4).all()


@pytest.mark.usefixtures("poisoned")
def test_fresh_psum_reads_nan():
    def kernel():
        tile = nl.ndarray((2, 3), nl.float32)
        nisa.tensor_copy(tile, nl.ndarray((2, 3), nl.float32, nl.psum))
        out = nl.ndarray((2, 3), nl.float32, nl.shared_hbm)
        nisa.dma_copy(out, tile)
        return out

    assert np.isnan(nki.simulate(kernel)()).all()


@pytest.mark.usefixtures("poisoned")
def test_what_a_kernel_forgets_to_store_shows():
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        nisa.dma_copy(out[0:2], x[0:2])
        return out

    out = nki.simulate(kernel)(ONES)
    assert (out[:2] == 1).all() and np.isnan(out[2]).all()


# -- cores ----------------------------------------------------------------------------------------------


def facts(seen):
    def kernel():
        seen.append(
            (nl.program_ndim(), nl.program_id(0), nl.program_id(axis=0), nl.num_programs(), nl.num_programs(None))
        )

    return nki.jit(kernel)


@pytest.mark.parametrize(
    "grid, wanted",
    [
        (None, [(0, 0, 0, 1, 1)]),
        (1, [(1, 0, 0, 1, 1)]),
        (2, [(1, 0, 0, 2, 2), (1, 1, 1, 2, 2)]),
        ((2,), [(1, 0, 0, 2, 2), (1, 1, 1, 2, 2)]),
        ([1], [(1, 0, 0, 1, 1)]),
        (np.int64(2), [(1, 0, 0, 2, 2), (1, 1, 1, 2, 2)]),
    ],
)
@pytest.mark.parametrize("grid_on", ["kernel", "simulation"])
def test_the_grid(grid, wanted, grid_on):
    seen = []
    kernel = facts(seen)
    if grid is None:
        nki.simulate(kernel)()
    elif grid_on == "kernel":
        nki.simulate(kernel[grid])()
    else:
        nki.simulate(kernel)[grid]()
    assert seen == wanted


@pytest.mark.parametrize("grid", [0, 3, -1, (1, 1), (), (3,)])
def test_grids_that_nki_does_not_have(grid):
    with pytest.raises(NKIError, match="1 or 2 cores") as caught:
        double[grid]
    assert caught.value.rule == "lnc"


def test_the_grid_leaves_the_kernel_as_it_was():
    seen = []
    kernel = facts(seen)
    kernel[2]
    nki.simulate(kernel)()
    assert seen == [(0, 0, 0, 1, 1)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("buffer", [nl.shared_hbm, nl.private_hbm])
def test_shared_hbm_is_one_tensor_and_private_hbm_two(order, buffer):
    def kernel(x):
        # Each core writes its row into the middle tensor, then copies all of the middle to its part of out.
        middle = nl.ndarray((2, 4), x.dtype, buffer)
        out = nl.ndarray((2, 2, 4), x.dtype, nl.shared_hbm)
        me = nl.program_id()
        nisa.dma_copy(middle[me], x[me])
        nisa.dma_copy(out[me], middle)
        return out

    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    # A race, as both cores run: the order shows which memory is shared.
    with core_order(*order), emulator.unchecked("never-written", "core-race"):
        out = nki.simulate(nki.jit(kernel)[2])(x)
    first, second = order
    assert np.array_equal(out[first][first], x[first]) and np.isnan(out[first][second]).all()
    assert np.array_equal(out[second][second], x[second])
    if buffer is nl.shared_hbm:
        assert np.array_equal(out[second][first], x[first])
    else:
        assert np.isnan(out[second][first]).all()


def test_several_shared_tensors_pair_by_order_of_allocation():
    def kernel(x):
        outs = [nl.ndarray((2, 4), x.dtype, nl.shared_hbm) for _ in range(3)]
        for i, out in enumerate(outs):
            nisa.dma_copy(out[nl.program_id()], x[i])
        return tuple(outs)

    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    for order in ((0, 1), (1, 0)):
        with core_order(*order):
            outs = nki.simulate(nki.jit(kernel)[2])(x)
        assert all(np.array_equal(out, np.stack([x[i]] * 2)) for i, out in enumerate(outs))


def test_core_order_is_one_of_two_and_ends_with_the_block():
    seen = []
    kernel = facts(seen)[2]
    with pytest.raises(RuntimeError), core_order(1, 0):
        nki.simulate(kernel)()
        raise RuntimeError
    nki.simulate(kernel)()
    assert [core[1] for core in seen] == [1, 0, 0, 1]
    for order in ((0,), (1, 1), (0, 1, 2), ()):
        with pytest.raises(ValueError, match="core_order"), core_order(*order):
            pass


def test_both_cores_see_the_same_arguments():
    def kernel(x):
        nisa.dma_copy(x[nl.program_id()], x[2])
        return x

    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    out = nki.simulate(nki.jit(kernel)[2])(x)
    assert np.array_equal(out, np.stack([out[2]] * 3)) and np.array_equal(x, out)


# -- kernels --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "decorate",
    [nki.jit, nki.jit(), nki.jit(mode="trace"), lambda f: nki.jit(f, debug_kernel=True), lambda f: nki.jit(nki.jit(f))],
)
def test_jit_keeps_name_document_and_signature(decorate):
    import inspect

    def kernel(x, y=3):
        """What it does."""

    decorated = decorate(kernel)
    for wrapped in (decorated, decorated[2], nki.simulate(decorated)):
        assert wrapped.__name__ == "kernel" and wrapped.__doc__ == "What it does."
        assert list(inspect.signature(wrapped).parameters) == ["x", "y"]


def test_a_kernel_calls_kernels():
    @nki.jit
    def outer(x):
        return double(double[1](x))

    assert (nki.simulate(outer[1])(ONES) == 4).all()


def test_a_plain_function_is_a_kernel():
    assert (nki.simulate(double.func)(ONES) == 2).all()


def test_arguments_bind_as_python_binds_them():
    def kernel(x, scale, *, shift=0.0):
        tile = nl.ndarray(x.shape, x.dtype)
        nisa.dma_copy(tile, x)
        nisa.tensor_scalar(tile, tile, nl.multiply, scale, op1=nl.add, operand1=shift)
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        nisa.dma_copy(out, tile)
        return out

    assert (nki.simulate(kernel)(ONES, shift=1, scale=3) == 4).all()
    for args, kwargs in (((ONES,), {}), ((ONES, 1.0, 2.0), {}), ((ONES, 1.0), {"other": 1})):
        with pytest.raises(TypeError):
            nki.simulate(kernel)(*args, **kwargs)


def test_what_is_no_array_passes_through():
    seen = []
    values = (None, 3, "text", (1, 2), {"a": 1}, 2.5)
    nki.simulate(lambda *args: seen.append(args))(*values)
    assert seen == [values]


# -- failures, repetition, threads ----------------------------------------------------------------------


@pytest.mark.parametrize("error", [NKIError("index", "x"), AssertionError("x"), KeyError("x")])
@pytest.mark.parametrize("core", [0, 1])
def test_a_failed_call_leaves_nothing_behind(error, core):
    def kernel(x):
        nl.ndarray((5, 5), x.dtype, nl.shared_hbm)
        if nl.program_id() == core:
            raise error
        return x

    for _ in range(2):
        with pytest.raises(type(error)):
            nki.simulate(nki.jit(kernel)[2])(ONES)
        assert (nki.simulate(double[2])(ONES) == 2).all()
        assert (nki.simulate(double)(ONES[:1]) == 2).all()
    with pytest.raises(NKIError, match="only legal while a kernel runs"):
        nl.program_id()


def test_calls_do_not_share_memory():
    run = nki.simulate(double)
    first, second = run(ONES), run(3 * ONES)
    assert (first == 2).all() and (second == 6).all() and not np.shares_memory(first, second)
    third = run(np.ones((2, 5), np.float16))
    assert third.dtype == np.float16 and third.shape == (2, 5)


def test_threads_run_kernels_of_their_own():
    threads, barrier, results = [], threading.Barrier(4), {}

    def kernel(x, number):
        barrier.wait(timeout=30)  # all are inside a kernel now
        out = double(x)
        barrier.wait(timeout=30)
        return out

    def work(number):
        results[number] = nki.simulate(kernel)(number * ONES, number)

    for number in range(4):
        threads.append(threading.Thread(target=work, args=(number,)))
        threads[-1].start()
    for thread in threads:
        thread.join(timeout=60)
    assert all((results[number] == 2 * number).all() for number in range(4))


def test_a_thread_started_by_a_kernel_is_outside_of_it():
    errors = []

    def outside():
        try:
            nl.program_id()
        except NKIError as error:
            errors.append(error.rule)

    def kernel():
        thread = threading.Thread(target=outside)
        thread.start()
        thread.join()

    nki.simulate(kernel)()
    assert errors == ["no-kernel"]


# -- names ----------------------------------------------------------------------------------------------


def test_tile_sizes_of_trn2():
    def kernel():
        size = nl.tile_size
        assert (size.pmax, size.psum_fmax, size.gemm_stationary_fmax, size.gemm_moving_fmax) == (128, 512, 128, 512)
        assert size.psum_num_banks == 8
        assert size.total_available_sbuf_size == size.sbuf_fmax_bytes == 224 * 1024 - 16384 - 8 - 256

    nki.simulate(kernel)()
    assert nl.tile_size.pmax == 128  # kernels also read it at import


def test_ranges_are_python_ranges():
    for loop in (nl.affine_range, nl.sequential_range, nl.static_range):
        assert list(loop(3)) == [0, 1, 2] and list(loop(1, 7, 2)) == [1, 3, 5] and list(loop(2, 4)) == [2, 3]


def test_hbm_is_private_hbm():
    assert nl.hbm is nl.private_hbm and len({nl.sbuf, nl.psum, nl.hbm, nl.shared_hbm}) == 4


@pytest.mark.parametrize("lnc", [1, 2])
def test_a_launch_leaves_no_cycles(lnc):
    """Trainers turn Python's collector off, so memory must go with the last reference."""

    @nki.jit
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)

        def body(i):
            tile = nl.ndarray(x.shape, x.dtype)
            nisa.dma_copy(tile, x)
            if nl.program_id(0) == 0:
                nisa.dma_copy(out, tile)

        nl.fori_loop(0, 2, body)
        return out

    def storages():
        return sum(isinstance(o, emulator.tensor.Storage) for o in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = storages()
        for _ in range(3):
            nki.simulate(kernel[lnc])(np.ones((4, 4), np.float32))
        assert storages() == before
    finally:
        gc.enable()
