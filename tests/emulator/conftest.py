"""What is common to the emulator's tests: one instruction as a kernel, and rounding written down independently."""

import inspect

import numpy as np
import pytest

from trn_kernels import emulator
from trn_kernels.emulator.dtypes import NUMPY

emulator.install()

import nki  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

# Bits of the significand, exponent of the smallest normal number, largest finite number.
_FORMATS = {
    "float32": (24, -126, float(np.finfo(np.float32).max)),
    "bfloat16": (8, -126, (2 - 2.0**-7) * 2.0**127),
    "float16": (11, -14, 65504.0),
    "float8_e4m3": (4, -6, 240.0),
    "float8_e5m2": (3, -14, 57344.0),
}


def _nearest(values, name: str) -> np.ndarray:
    """float64 values rounded to nearest even in a float format; beyond its range they become inf."""
    bits, smallest, largest = _FORMATS[name]
    values = np.asarray(values, np.float64)
    _, exponent = np.frexp(values)
    unit = np.maximum(exponent - 1, smallest) - (bits - 1)
    rounded = np.ldexp(np.rint(np.ldexp(values, -unit)), unit)
    return np.where(np.abs(rounded) > largest, np.copysign(np.inf, values), rounded)


def _store(values, dtype: str) -> np.ndarray:
    """What an engine stores: fp32 first, then once to ``dtype``; integers saturate."""
    values = _nearest(values, "float32")
    if dtype in _FORMATS:
        return _nearest(values, dtype).astype(NUMPY[dtype])
    info = np.iinfo(NUMPY[dtype])
    return np.clip(np.rint(values), info.min, info.max).astype(np.int64).astype(NUMPY[dtype])


def _load(array) -> np.ndarray:
    """What an engine reads: fp32, here as float64."""
    return _nearest(np.asarray(array).astype(np.float64), "float32")


def _execute(body, *inputs, out, psum=(), initial=None, lnc=None):
    """Run ``body(dst, *tiles)`` and return dst.

    ``inputs`` are copied to tiles of their shape in SBUF, those numbered in ``psum`` on to PSUM; ``out`` is
    (shape, dtype) of dst, in PSUM if ``"dst"`` is in ``psum``. dst holds ``initial`` or is fresh.
    """

    def kernel(a=None, b=None, c=None, d=None, start=None):
        tiles = []
        for i, source in enumerate(t for t in (a, b, c, d) if t is not None):
            tile = nl.ndarray(source.shape, source.dtype)
            nisa.dma_copy(tile, source)
            if i in psum:
                moved = nl.ndarray(source.shape, source.dtype, nl.psum)
                nisa.tensor_copy(moved, tile)
                tile = moved
            tiles.append(tile)
        shape, dtype = out
        dst = nl.ndarray(shape, dtype, nl.psum if "dst" in psum else nl.sbuf)
        if start is not None:
            first = nl.ndarray(shape, dtype)
            nisa.dma_copy(first, start)
            nisa.tensor_copy(dst, first)
        body(dst, *tiles)
        result = nl.ndarray(shape, dtype, nl.shared_hbm)
        if "dst" in psum:
            moved = nl.ndarray(shape, dtype)
            nisa.tensor_copy(moved, dst)
            dst = moved
        nisa.dma_copy(result, dst)
        return result

    return nki.simulate(nki.jit(kernel)[lnc] if lnc else kernel)(
        *inputs, **({} if initial is None else {"start": initial})
    )


def _refused(rule: str, kernel, *args, says=()):
    """The kernel is refused with this rule; the error names a line of the calling test file."""
    with pytest.raises(emulator.NKIError) as caught:
        nki.simulate(kernel)(*args)
    error = caught.value
    assert error.rule == rule, str(error)
    file = inspect.getsourcefile(inspect.unwrap(kernel))
    assert error.location.rpartition(":")[0] == file and f"[{rule}]" in str(error)
    for words in says:
        assert words in str(error), f"{words!r} is not in {error}"
    return error


@pytest.fixture
def execute():
    return _execute


@pytest.fixture
def refused():
    return _refused


@pytest.fixture
def poisoned():
    """Fresh memory reads NaN, or 4 in integers, instead of being refused."""
    with emulator.unchecked("never-written"):
        yield


@pytest.fixture
def store():
    return _store


@pytest.fixture
def load():
    return _load


@pytest.fixture
def rng():
    return np.random.default_rng(0)
