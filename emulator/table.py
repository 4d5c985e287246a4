"""The table of instructions: for each its checks, its semantics and the page that documents it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass

from .errors import NKIError
from .machine import recorder


@dataclass(frozen=True)
class Instruction:
    """One ``nki.isa`` instruction.

    Attributes:
        name: as in ``nki.isa``.
        check: refuses what hardware or compiler refuse; takes the arguments of the instruction.
        execute: the semantics, on arguments that passed ``check``.
        page: the page of the Neuron documentation that both follow.
    """

    name: str
    check: Callable
    execute: Callable
    page: str


INSTRUCTIONS: dict[str, Instruction] = {}


def instruction(check: Callable) -> Callable:
    """Decorate the semantics of an instruction; ``check`` takes the same arguments."""

    def decorate(execute: Callable) -> Callable:
        name = execute.__name__
        INSTRUCTIONS[name] = Instruction(name, check, execute, f"nki/api/generated/nki.isa.{name}.html")

        signature = inspect.signature(execute)

        @functools.wraps(execute)
        def issue(*args, **kwargs):
            try:
                check(*args, **kwargs)
                profile = recorder()
                if profile is None or profile.issue(name, args, kwargs):
                    execute(*args, **kwargs)
            except NKIError as error:
                error.instruction = name
                raise
            except TypeError:
                try:
                    signature.bind(*args, **kwargs)
                except TypeError as misfit:
                    error = NKIError("signature", f"{misfit}; it takes {signature}")
                    error.instruction = name
                    raise error from None
                raise

        return issue

    return decorate
