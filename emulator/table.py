"""The table of instructions: for each its checks, its semantics and the page that documents it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass

from .errors import NKIError
from .machine import core
from .tensor import Tensor


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

_WRITTEN = frozenset(("dst", "reduce_res", "dst_idx"))
"""Operands that instructions write, by the names that all of them use."""


_KEEPS = frozenset(("tensor_copy_predicated",))
"""Instructions that leave a part of dst as it was, and so depend on it."""


def _operands(names: tuple[str, ...], args, kwargs, keeps: bool) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an instruction reads, indices included, and those that it writes."""
    reads, writes = [], []
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        for t in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(t, Tensor):
                (writes if name in _WRITTEN else reads).append(t)
                if name == "dst" and keeps:
                    reads.append(t)
                if t.runtime is not None and isinstance(t.runtime.index, Tensor):
                    reads.append(t.runtime.index)
    return reads, writes


def _misuse(signature: inspect.Signature, args, kwargs, error: Exception) -> NKIError:
    """What a check that Python itself stopped says of the arguments. (After the checks such an error is a bug.)"""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as misfit:
        return NKIError("signature", f"{misfit}; it takes {signature}")
    return NKIError("signature", f"an argument is of no kind that it takes: {error}; it takes {signature}")


def instruction(check: Callable) -> Callable:
    """Decorate the semantics of an instruction; ``check`` takes the same arguments."""

    def decorate(execute: Callable) -> Callable:
        name = execute.__name__
        INSTRUCTIONS[name] = Instruction(name, check, execute, f"nki/api/generated/nki.isa.{name}.html")

        signature = inspect.signature(execute)
        names = tuple(signature.parameters)

        @functools.wraps(execute)
        def issue(*args, **kwargs):
            try:
                try:
                    check(*args, **kwargs)
                except (TypeError, ValueError, OverflowError) as error:
                    raise _misuse(signature, args, kwargs, error) from error
                if core().issue(name, *_operands(names, args, kwargs, name in _KEEPS), args, kwargs):
                    execute(*args, **kwargs)
            except NKIError as error:
                error.instruction = name
                raise

        return issue

    return decorate
