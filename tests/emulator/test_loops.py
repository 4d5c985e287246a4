"""Registers and device loops: semantics, and what NKI forbids of them."""

import numpy as np
import pytest

from trn_kernels import emulator

emulator.install()

import nki  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402


def register_of(value):
    """A register with a value that the host does not know: loaded from SBUF."""
    tile = nl.ndarray((1, 1), nl.int32)
    nisa.memset(tile, value)
    register = nisa.register_alloc()
    nisa.register_load(register, tile)
    return register


def table(lower, upper, step):
    """out[i] = i for the values that a device loop takes, -7 elsewhere; the body runs once per value."""

    def kernel():
        out = nl.ndarray((1, 64), nl.int32, nl.shared_hbm)
        start = nl.ndarray((1, 64), nl.int32)
        nisa.memset(start, -7)
        nisa.dma_copy(out, start)

        def body(i):
            value = nl.ndarray((1, 1), nl.int32)
            nisa.register_store(value, i)
            nisa.dma_copy(out.ap([[1, 1], [1, 1]], scalar_offset=i, indirect_dim=1), value)

        nl.fori_loop(lower(), upper(), body, step=step)
        return out

    return nki.simulate(kernel)().reshape(-1)


@pytest.mark.parametrize("lower, upper, step", [(0, 5, 1), (3, 20, 4), (5, 5, 1), (9, 2, 1), (0, 64, 63)])
@pytest.mark.parametrize("registers", [False, True])
def test_fori_loop_is_a_range(lower, upper, step, registers):
    make = register_of if registers else int
    want = np.full(64, -7, np.int32)
    want[list(range(lower, upper, step))] = range(lower, upper, step)
    got = table(lambda: make(lower), lambda: make(upper), step)
    np.testing.assert_array_equal(got, want)


def test_loops_nest_and_carry_state_through_sbuf():
    def kernel():
        total = nl.ndarray((1, 1), nl.int32)
        nisa.memset(total, 0)

        def outer(i):
            def inner(j):
                nisa.tensor_scalar(total, total, op0=nl.add, operand0=1)

            nl.fori_loop(i, register_of(4), inner)

        nl.fori_loop(0, register_of(4), outer)
        out = nl.ndarray((1, 1), nl.int32, nl.shared_hbm)
        nisa.dma_copy(out, total)
        return out

    assert nki.simulate(kernel)().item() == 4 + 3 + 2 + 1


def test_while_loop_runs_until_its_register_is_zero():
    def kernel():
        left, count = nl.ndarray((1, 1), nl.int32), nl.ndarray((1, 1), nl.int32)
        nisa.memset(count, 0)

        def body(r):
            nisa.tensor_scalar(count, count, op0=nl.add, operand0=1)
            nisa.register_store(left, r)
            nisa.tensor_scalar(left, left, op0=nl.subtract, operand0=1)
            nisa.register_load(r, left)
            return r

        nl.while_loop(register_of(5), body)
        nl.while_loop(register_of(0), body)
        out = nl.ndarray((1, 1), nl.int32, nl.shared_hbm)
        nisa.dma_copy(out, count)
        return out

    assert nki.simulate(kernel)().item() == 5


def test_registers_move_and_address():
    def kernel(x):
        a = nisa.register_alloc(2)
        b = nisa.register_alloc()
        nisa.register_move(b, a)
        nisa.register_move(a, 0)
        out = nl.ndarray((1, 4), x.dtype, nl.shared_hbm)
        nisa.dma_copy(out, x.ap([[4, 1], [1, 4]], scalar_offset=b))
        return out

    x = np.arange(20, dtype=np.float32).reshape(5, 4)
    np.testing.assert_array_equal(nki.simulate(kernel)(x), x[2:3])


def test_register_alloc_from_a_tensor_and_load_from_hbm():
    def kernel(x):
        loaded = nisa.register_alloc()
        nisa.register_load(loaded, x[1:2])
        tile = nl.ndarray((1, 1), nl.int32)
        nisa.register_store(tile, loaded)
        again = nisa.register_alloc(tile)
        out = nl.ndarray((1, 1), nl.int32, nl.shared_hbm)
        nisa.register_store(tile, again)
        nisa.dma_copy(out, tile)
        return out

    assert nki.simulate(kernel)(np.array([3, -9, 4], np.int32)).item() == -9


USES = {
    "if": lambda r: 1 if r else 0,
    "while": lambda r: not r,
    "int": int,
    "range": range,
    "float": float,
    "compare": lambda r: r == 3,
    "order": lambda r: r < 3,
    "add": lambda r: r + 1,
    "index": lambda r: [1, 2, 3][r],
}


@pytest.mark.parametrize("use", USES)
def test_a_register_has_no_value_for_python(refused, use):
    def kernel():
        USES[use](register_of(1))

    refused("register-value", kernel, says=["nl.fori_loop"])


def test_rules_of_registers(refused):
    def unset():
        nisa.register_move(nisa.register_alloc(), nisa.register_alloc())

    def frozen():
        nl.fori_loop(0, 1, lambda i: nisa.register_move(i, 3))

    def too_large():
        nisa.register_alloc(2**32)

    def two_elements():
        tile = nl.ndarray((1, 2), nl.int32)
        nisa.register_load(nisa.register_alloc(), tile)

    def a_float():
        tile = nl.ndarray((1, 1), nl.float32)
        nisa.register_load(nisa.register_alloc(), tile)

    def psum():
        tile = nl.ndarray((1, 1), nl.int32, nl.psum)
        nisa.register_load(nisa.register_alloc(), tile)

    def no_register():
        nisa.register_move(3, 4)

    def no_number():
        nisa.register_move(nisa.register_alloc(), 1.5)

    refused("register-unset", unset)
    refused("register-frozen", frozen)
    refused("register-range", too_large, says=["4294967296"])
    refused("register-element", two_elements)
    refused("register-element", a_float)
    refused("buffer", psum)
    refused("operand", no_register)
    refused("operand", no_number)


def test_rules_of_loops(refused):
    def step():
        nl.fori_loop(0, 4, lambda i: None, step=0)

    def register_step():
        nl.fori_loop(0, 4, lambda i: None, step=register_of(1))

    def bound():
        nl.fori_loop(0, 4.0, lambda i: None)

    def returns():
        nl.fori_loop(0, 4, lambda i: i)

    def no_condition():
        nl.while_loop(register_of(1), lambda r: None)

    refused("loop-step", step)
    refused("loop-step", register_step)
    refused("loop-bound", bound)
    refused("loop-body", returns)
    refused("loop-body", no_condition)


def test_cores_run_every_loop_equally_often(refused):
    def kernel(trips):
        register = nisa.register_alloc()
        nisa.register_load(register, trips[nl.program_id(0) : nl.program_id(0) + 1])
        nl.fori_loop(0, register, lambda i: None)

    diverging = np.array([2, 3], np.int32)
    refused("loop-divergence", nki.jit(kernel)[2], diverging, says=["core 1", "3 times", "2 times"])
    nki.simulate(nki.jit(kernel)[2])(np.array([2, 2], np.int32))


def test_psum_does_not_carry_over_iterations(refused):
    def kernel():
        operand = nl.ndarray((128, 128), nl.float32)
        nisa.memset(operand, 1.0)
        outside = nl.ndarray((128, 128), nl.float32, nl.psum)
        nl.fori_loop(0, 2, lambda i: nisa.nc_matmul(outside, operand, operand))

    def corrected():
        operand, total = nl.ndarray((128, 128), nl.float32), nl.ndarray((128, 128), nl.float32)
        nisa.memset(operand, 1.0)
        nisa.memset(total, 0.0)

        def body(i):
            inside = nl.ndarray((128, 128), nl.float32, nl.psum)
            nisa.nc_matmul(inside, operand, operand)
            nisa.tensor_tensor(total, total, inside, op=nl.add)

        nl.fori_loop(0, 2, body)
        out = nl.ndarray((128, 128), nl.float32, nl.shared_hbm)
        nisa.dma_copy(out, total)
        return out

    refused("psum-loop", kernel)
    assert (nki.simulate(corrected)() == 256).all()
