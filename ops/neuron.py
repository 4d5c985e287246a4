"""Where kernels run: on a Neuron device, in a simulator, or as their PyTorch reference.

The only file that knows whether torch_neuronx, AWS's ``nki`` or the emulator is there. On a Neuron machine
``nki_op`` and ``wrap_nki`` are torch_neuronx's; elsewhere stand-ins of the same surface, so that an operator
file is the same on both.

``TRN_KERNELS_BACKEND``:
    auto        neuron tensors run on the device; CPU tensors run the kernel in ``nki.simulate``, AWS's where
                the real ``nki`` is installed, else the emulator's; other devices run the reference, with one
                warning. The default.
    neuron      the device only.
    simulate    AWS's simulator only.
    emulator    the emulator only.
    reference   plain PyTorch.
What an explicit value cannot honour is an error, never a fallback.
"""

from __future__ import annotations

import collections
import functools
import importlib
import inspect
import os
import sys
import threading
import warnings
from collections.abc import Callable

import torch

from trn_kernels import emulator
from trn_kernels.emulator import interop

BACKENDS = ("auto", "neuron", "simulate", "emulator", "reference")
_VARIABLE = "TRN_KERNELS_BACKEND"

# -- what is there --------------------------------------------------------------------------------------


def torch_neuronx():
    """The torch_neuronx module, or None. ``import torch`` loads it where it is installed; nothing here does.

    (The package of that name on the public index is an empty placeholder.)
    """
    module = sys.modules.get("torch_neuronx")
    return module if hasattr(module, "nki_op") else None


def logical_neuron_cores() -> int:
    """Physical cores per logical core (LNC), 1 or 2: ``NEURON_LOGICAL_NC_CONFIG``, the runtime's, or trn2's 2.

    Raises:
        ValueError: the variable is neither 1 nor 2.
    """
    value = os.environ.get("NEURON_LOGICAL_NC_CONFIG") or None
    if value is None and torch_neuronx() is not None:
        value = importlib.import_module("torch_neuronx.utils").get_logical_neuron_cores()
    if value is None:
        return 2
    if str(value) not in ("1", "2"):
        raise ValueError(f"NEURON_LOGICAL_NC_CONFIG is {value!r}; a logical core is 1 or 2 physical cores")
    return int(value)


def backend_for(device: torch.device) -> str:
    """The backend that a kernel on tensors of ``device`` runs on: neuron, simulate, emulator or reference.

    Raises:
        ValueError: ``TRN_KERNELS_BACKEND`` is unknown, or names what is not there or not fit for ``device``.
    """
    wanted = os.environ.get(_VARIABLE) or "auto"
    if wanted not in BACKENDS:
        raise ValueError(f"{_VARIABLE}={wanted!r} is not one of {', '.join(BACKENDS)}")
    if wanted == "reference":
        return wanted
    if wanted == "auto":
        if device.type == "neuron":
            wanted = "neuron"
        elif device.type == "cpu":
            return "simulate" if emulator.real_nki() else "emulator"
        else:
            _warn_reference(device.type)
            return "reference"
    if wanted == "neuron" and (torch_neuronx() is None or device.type != "neuron"):
        missing = "torch_neuronx is not loaded" if torch_neuronx() is None else "they need neuron tensors"
        raise ValueError(f"{_VARIABLE}={wanted}: kernels cannot run on {device}, {missing}")
    if wanted in ("simulate", "emulator") and device.type != "cpu":
        raise ValueError(f"{_VARIABLE}={wanted}: a simulator takes CPU tensors, not {device}")
    if wanted == "simulate" and not emulator.real_nki():
        raise ValueError(f"{_VARIABLE}=simulate: AWS's nki package is not installed")
    if wanted == "emulator" and emulator.real_nki():
        raise ValueError(f"{_VARIABLE}=emulator: AWS's nki package is installed, kernels use it; take simulate")
    return wanted


@functools.cache
def _warn_reference(device_type: str) -> None:
    warnings.warn(f"trn_kernels: no NKI kernel runs on {device_type} tensors, the PyTorch reference does", stacklevel=2)


# -- counters -------------------------------------------------------------------------------------------

_launches: collections.Counter[tuple[str, str]] = collections.Counter()
_lock = threading.Lock()


def launches() -> dict[tuple[str, str], int]:
    """How often each (operator, backend) really ran in this process.

    Tracing and shape inference do not count, nor do launches from inside a graph that the device replays.
    """
    with _lock:
        return dict(_launches)


def reset_launches() -> None:
    """Set every counter of ``launches()`` to zero."""
    with _lock:
        _launches.clear()


# -- operators and kernels ------------------------------------------------------------------------------

_operators: dict[str, tuple[str, str]] = {}


def nki_op(name: str, fn: Callable | None = None, mutates_args=()):
    """Register ``fn`` as the PyTorch operator ``name``; a decorator without ``fn``. Returns a CustomOpDef.

    torch_neuronx's own on a Neuron machine. The schema comes from the annotations of ``fn``. Give the result
    a ``register_fake``: the default fake of torch_neuronx runs ``fn``.

    Raises:
        ValueError: another function already has this name; PyTorch would drop the first and its gradient.
    """
    if fn is None:
        return functools.partial(nki_op, name, mutates_args=mutates_args)
    source = (fn.__module__, fn.__qualname__)
    if _operators.setdefault(name, source) != source:
        raise ValueError(f"operator {name} is already registered by {'.'.join(_operators[name])}")
    neuronx = torch_neuronx()
    register = torch.library.custom_op if neuronx is None else neuronx.nki_op
    return register(name, fn, mutates_args=mutates_args)


def wrap_nki(kernel, *, op: str | None = None, reference: Callable | None = None) -> NKICaller:
    """A kernel as PyTorch calls it: ``wrap_nki(kernel)[lnc](*args)``. Wrap once, at import.

    Args:
        kernel: a function under ``@nki.jit``, or ``"module:name"`` in ``trn_kernels.kernels``, imported at
            the first launch (so that importing an operator imports no Neuron package).
        op: the name that ``launches()`` counts it under; the kernel's own by default.
        reference: PyTorch function of the kernel's signature that computes the same, for the reference
            backend.
    """
    name = kernel.rpartition(":")[2] if isinstance(kernel, str) else kernel.__name__
    return NKICaller(kernel, op or name, reference)


class NKICaller:
    """See ``wrap_nki``. ``caller[lnc]`` sets the number of physical cores, 1 or 2 (default: the machine's)."""

    def __init__(self, kernel, op: str, reference: Callable | None, lnc: int | None = None):
        self._kernel = kernel
        self._op = op
        self._reference = reference
        self._lnc = lnc

    def __getitem__(self, grid: int | tuple[int] | list[int]) -> NKICaller:
        lnc = grid[0] if isinstance(grid, (tuple, list)) and len(grid) == 1 else grid
        if lnc not in (1, 2):
            raise ValueError(f"grid {grid!r}: a kernel runs on 1 or 2 physical cores")
        return NKICaller(self._kernel, self._op, self._reference, lnc)

    def __call__(self, *args, **kwargs):
        """Run where the first tensor lives. Tensors must be contiguous; they are never written.

        Returns a tensor, or a tuple of tensors, as the kernel does.

        Raises:
            TypeError: arguments that do not fit the kernel's signature.
            ValueError: ``TRN_KERNELS_BACKEND`` cannot be honoured for these tensors.
        """
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        if not tensors:
            raise TypeError(f"{self._op}: a kernel needs a tensor argument to know its device")
        backend = backend_for(tensors[0].device)
        real = all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in tensors)  # else: a trace, nothing runs
        if backend == "reference":
            if self._reference is None:
                raise ValueError(f"{_VARIABLE}=reference: {self._op} has no reference")
            result = self._reference(*args, **kwargs)
        elif backend == "neuron":
            result = self._on_device(args, kwargs)
        elif real:
            result = self._simulated(args, kwargs)
        else:
            kinds = sorted({type(t).__name__ for t in tensors} - {"Tensor", "Parameter"})
            raise TypeError(f"{self._op}: a kernel runs on plain tensors, not on {', '.join(kinds)}")
        if real:
            with _lock:
                _launches[self._op, backend] += 1
        return result

    def _on_device(self, args, kwargs):
        kernel = _load(self._kernel)
        # torch_neuronx drops surplus arguments without a word; this refuses them.
        inspect.signature(getattr(kernel, "func", kernel)).bind(*args, **kwargs)
        # The grid belongs on the wrapped kernel, as a tuple: the form that every release takes.
        return _device_kernel(kernel)[(self._lnc or logical_neuron_cores(),)](*args, **kwargs)

    def _simulated(self, args, kwargs):
        kernel = _load(self._kernel)[self._lnc or logical_neuron_cores()]
        # Without a device AWS's simulator assumes trn3.
        os.environ.setdefault("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
        simulate = importlib.import_module("nki").simulate
        result = simulate(kernel)(*map(_to_numpy, args), **{k: _to_numpy(v) for k, v in kwargs.items()})
        # A copy, so that torch owns the memory as it does on the device, and may resize it.
        if isinstance(result, (tuple, list)):
            return tuple(interop.to_torch(array).clone() for array in result)
        return interop.to_torch(result).clone()


def _to_numpy(value):
    if not isinstance(value, torch.Tensor):
        return value
    array = interop.to_numpy(value)
    array.flags.writeable = False  # an operator is functional: its kernel writes no argument
    return array


@functools.cache
def _load(kernel):
    """The kernel; ``module:name`` is imported, on the emulator where there is no other ``nki``."""
    emulator.install()
    if not isinstance(kernel, str):
        return kernel
    module, name = kernel.split(":")
    return getattr(importlib.import_module(f"trn_kernels.kernels.{module}"), name)


@functools.cache
def _device_kernel(kernel):
    """The kernel wrapped by torch_neuronx, once: every wrap is a new entry of its caches."""
    return torch_neuronx().wrap_nki(kernel)
