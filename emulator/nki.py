"""What ``import nki`` means where the emulator is installed."""

from . import collectives, dtype, isa, language, typing
from .machine import jit, simulate

__version__ = "0.7.0+emulator"
__all__ = ["collectives", "dtype", "isa", "jit", "language", "simulate", "typing"]
