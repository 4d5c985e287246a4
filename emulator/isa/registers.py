"""Registers of the engines: allocate, load, move, store."""

from __future__ import annotations

import numpy as np

from ..errors import NKIError
from ..registers import VirtualRegister
from ..table import instruction
from ..tensor import MemoryRegion, Tensor
from . import data_movement, operands


def register_alloc(x=None) -> VirtualRegister:
    """A new register, with the value of an int or of a one-element tensor if one is given."""
    register = VirtualRegister()
    if isinstance(x, Tensor):
        register_load(register, x)
    elif x is not None:
        register_move(register, x)
    return register


def _register(value, what: str) -> VirtualRegister:
    if not isinstance(value, VirtualRegister):
        raise NKIError("operand", f"{what} is a register, not {type(value).__name__}")
    return value


def _element(value, what: str) -> Tensor:
    t = operands.tensor(value, what)
    if t.size != 1 or t.dtype not in ("int32", "uint32"):
        raise NKIError("register-element", f"{what} is one int32 or uint32 element, got {t!r}")
    if t.buffer is MemoryRegion.psum:
        raise NKIError("buffer", f"{what} must be in SBUF or HBM, it is in psum")
    return t


def _check_register_load(dst, src, name=None):
    _register(dst, "dst")
    _element(src, "src")


@instruction(_check_register_load)
def register_load(dst, src, name=None):
    """Load one element of SBUF or HBM into a register."""
    dst.write(int(data_movement.loaded(src.moved()).reshape(-1)[0]))


def _check_register_store(dst, src, name=None):
    _element(dst, "dst")
    _register(src, "src")
    if not dst.storage.writable:
        raise NKIError("read-only", f"dst is the kernel argument {dst.name!r}, which this launch may not write")


@instruction(_check_register_store)
def register_store(dst, src, name=None):
    """Store a register into one element of SBUF or HBM."""
    data_movement.stored(dst.moved(), np.asarray(src.read()))


def _check_register_move(dst, src, name=None):
    _register(dst, "dst")
    if not isinstance(src, VirtualRegister) and (not isinstance(src, int) or isinstance(src, bool)):
        raise NKIError("operand", f"src is a register or an int, not {type(src).__name__}")


@instruction(_check_register_move)
def register_move(dst, src, name=None):
    """Set a register to an int or to the value of another."""
    dst.write(src.read() if isinstance(src, VirtualRegister) else src)
