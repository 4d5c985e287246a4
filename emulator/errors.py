"""The one error of the emulator: a broken NKI rule, with the place in the kernel that broke it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_EMULATOR = str(Path(__file__).parent) + os.sep


class NKIError(Exception):
    """A kernel did what NKI or the hardware does not allow.

    Attributes:
        rule: short name of the rule, for example ``"start-partition"``.
        message: what was found and what the limit is.
        instruction: the ``nki.isa`` instruction, or None outside one.
        location: ``file:line`` in the kernel, or None.
    """

    def __init__(self, rule: str, message: str):
        super().__init__(rule, message)
        self.rule = rule
        self.message = message
        self.instruction: str | None = None
        self.location = kernel_location(2)

    def __str__(self) -> str:
        where = f"{self.location}: " if self.location else ""
        what = f"nisa.{self.instruction}: " if self.instruction else ""
        return f"{where}{what}{self.message} [{self.rule}]"


def kernel_location(depth: int = 1) -> str | None:
    """``file:line`` of the innermost frame outside the emulator: the kernel's own line."""
    frame = sys._getframe(depth)
    while frame is not None and frame.f_code.co_filename.startswith(_EMULATOR):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else None
