"""Device loops: their trip counts are read when the kernel runs.

The body is compiled once, so a tensor that is allocated in it is one buffer for all iterations, and what one
iteration leaves for the next lives in SBUF or HBM, not in PSUM. With LNC=2 both cores must run every loop equally
often: the documents leave it undefined where they diverge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .errors import NKIError
from .machine import core
from .registers import VirtualRegister


def fori_loop(lower, upper, body_fun: Callable, step: int = 1) -> None:
    """``body_fun(i)`` for i from lower to upper (exclusive); the bounds are ints or registers.

    ``i`` is a register that the body reads, for example as ``scalar_offset``.
    """
    if not isinstance(step, int) or isinstance(step, bool) or step < 1:
        raise NKIError("loop-step", f"step is a positive int known when the kernel is built, not {step!r}")
    _check_body(body_fun)
    trips = range(_bound(lower, "lower"), _bound(upper, "upper"), step)
    running = core()
    running.count_trips(len(trips))
    with running.loop() as loop:
        for i in trips:
            loop.iterate()
            _run(body_fun, VirtualRegister(i, frozen=True))


def while_loop(init: VirtualRegister, body_fun: Callable) -> None:
    """``r = body_fun(r)`` while the register r is not zero, starting with ``init``."""
    _check_body(body_fun)
    register, trips = init, 0
    running = core()
    with running.loop() as loop:
        while _condition(register).read():
            loop.iterate()
            register = body_fun(VirtualRegister(register.read(), frozen=False))
            trips += 1
    running.count_trips(trips)


def _check_body(body_fun) -> None:
    if not callable(body_fun):
        raise NKIError("loop-body", f"the body of a device loop is a function, not {type(body_fun).__name__}")


def _run(body_fun: Callable, index: VirtualRegister) -> None:
    if body_fun(index) is not None:
        raise NKIError("loop-body", "the body of nl.fori_loop returns nothing; state goes through SBUF or HBM")


def _condition(register) -> VirtualRegister:
    if not isinstance(register, VirtualRegister):
        raise NKIError("loop-body", f"the condition of nl.while_loop is a register, not {type(register).__name__}")
    return register


def _bound(value, what: str) -> int:
    if isinstance(value, VirtualRegister):
        return value.read()
    if not isinstance(value, int) or isinstance(value, bool):
        raise NKIError("loop-bound", f"{what} is an int or a register, not {type(value).__name__}")
    return value


def dynamic_range(start, stop=None, step: int = 1) -> Iterator[VirtualRegister]:
    """The device loop of NKI up to 0.6: ``for i in nl.dynamic_range(start, stop, step)``; i is a register."""
    start, stop = (0, start) if stop is None else (start, stop)
    if not isinstance(step, int) or isinstance(step, bool) or step < 1:
        raise NKIError("loop-step", f"step is a positive int known when the kernel is built, not {step!r}")
    trips = range(_bound(start, "start"), _bound(stop, "stop"), step)
    running = core()
    running.count_trips(len(trips))
    with running.loop() as loop:
        for i in trips:
            loop.iterate()
            yield VirtualRegister(i, frozen=True)
