"""Registers: 32-bit integers of an engine, known only when the kernel runs."""

from __future__ import annotations

import ast
import functools
import linecache
import sys

from .errors import NKIError


@functools.cache
def _while_conditions(file: str) -> tuple[tuple[int, int], ...]:
    """First and last line of the condition of every ``while name:`` of a file."""
    tree = ast.parse("".join(linecache.getlines(file)))
    tests = [node.test for node in ast.walk(tree) if isinstance(node, ast.While) and isinstance(node.test, ast.Name)]
    return tuple((test.lineno, test.end_lineno) for test in tests)


def _is_while_condition(file: str, line: int) -> bool:
    return any(first <= line <= last for first, last in _while_conditions(file))


class VirtualRegister:
    """A register. What NKI knows only on the device cannot steer Python: a register has no value there.

    Attributes:
        frozen: the index of a device loop, which the kernel may read but not write.
    """

    __slots__ = ("_value", "frozen")

    def __init__(self, value: int | None = None, frozen: bool = False):
        self._value = value
        self.frozen = frozen

    def read(self) -> int:
        """The value, for the emulator."""
        if self._value is None:
            raise NKIError("register-unset", "a register is read before it was written")
        return self._value

    def write(self, value: int) -> None:
        if self.frozen:
            raise NKIError("register-frozen", "the index of a device loop cannot be written")
        if not -(2**31) <= value < 2**32:
            raise NKIError("register-range", f"{value} does not fit a 32-bit register")
        self._value = value

    def _no_value(self, *_):
        raise NKIError(
            "register-value",
            "the value of a register is not known while the kernel is built: it cannot be compared, indexed or "
            "counted with; use nl.fori_loop, nl.while_loop or .ap(scalar_offset=)",
        )

    def __bool__(self) -> bool:
        """Only as the condition of ``while reg:``, the device loop of NKI up to 0.6."""
        frame = sys._getframe(1)
        if not _is_while_condition(frame.f_code.co_filename, frame.f_lineno):
            self._no_value()
        return self.read() != 0

    __int__ = __index__ = __float__ = _no_value
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _no_value
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _no_value
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = __pow__ = __rpow__ = _no_value
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __and__ = __rand__ = __or__ = __ror__ = _no_value
    __xor__ = __rxor__ = __neg__ = __pos__ = __abs__ = __invert__ = _no_value
    __hash__ = None
