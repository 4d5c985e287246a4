"""NKI on the CPU, strict: the files that run on Trainium run, and are checked, on a laptop and in CI.

``install()`` makes ``import nki`` mean the emulator where the real ``nki`` is absent.
``simulate(kernel[lnc])(*arrays)`` runs a kernel as ``nki.simulate`` of AWS does.

How it is built: ``tensor`` (storage and views), ``isa`` (one table of instructions: checks and semantics),
``machine`` (cores and launches), ``language`` and ``nki`` (the names that kernels import).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

from .errors import NKIError
from .machine import core_order, simulate, unchecked
from .profiler import Report, profile
from .table import INSTRUCTIONS

__all__ = [
    "INSTRUCTIONS",
    "NKIError",
    "Report",
    "core_order",
    "install",
    "installed",
    "profile",
    "real_nki",
    "simulate",
    "unchecked",
]

_SUBMODULES = ("collectives", "dtype", "isa", "isa.constants", "language", "typing")


def real_nki() -> bool:
    """Is AWS's ``nki`` importable? (The package of that name on the public index is an empty placeholder.)"""
    if installed():
        return False
    try:
        return importlib.util.find_spec("nki.isa") is not None
    except ModuleNotFoundError:
        return False


def installed() -> bool:
    """Does ``import nki`` mean the emulator?"""
    return sys.modules.get("nki") is sys.modules.get(f"{__name__}.nki", object())


def install() -> None:
    """Make ``import nki`` mean the emulator, unless the real ``nki`` is there. Repeating it does no harm."""
    if installed() or real_nki():
        return
    package = importlib.import_module(f"{__name__}.nki")
    sys.modules["nki"] = package
    for name in _SUBMODULES:
        sys.modules[f"nki.{name}"] = importlib.import_module(f"{__name__}.{name}")
