"""Runs kernels: ``nki.jit``, ``kernel[lnc]``, ``nki.simulate`` and the cores that a launch consists of.

With LNC=2 a kernel runs once per physical core. Both cores see the same ``shared_hbm`` tensors; SBUF, PSUM
and ``private_hbm`` are their own. The cores run one after the other, in an order that tests can choose:
nothing in NKI orders them but barriers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator

import numpy as np

from . import arch, interop
from .errors import NKIError
from .tensor import MemoryRegion, Tensor, allocate, from_array


class Core:
    """One physical core while it runs a kernel.

    Attributes:
        index: which core, what ``nl.program_id(0)`` returns.
        cores: how many run, what ``nl.num_programs()`` returns.
        has_grid: was the kernel launched with ``[lnc]``?
        target: the limits of the hardware.
    """

    def __init__(self, index: int, cores: int, has_grid: bool, shared: list[Tensor]):
        self.index = index
        self.cores = cores
        self.has_grid = has_grid
        self.target = arch.target()
        self._shared = shared
        self._shared_count = 0

    def ndarray(self, shape, dtype, region: MemoryRegion, name: str) -> Tensor:
        """Allocate. The n-th ``shared_hbm`` tensor of every core is one tensor."""
        if region is not MemoryRegion.shared_hbm:
            return allocate(shape, dtype, region, name)
        at = self._shared_count
        self._shared_count += 1
        if at == len(self._shared):
            self._shared.append(allocate(shape, dtype, region, name))
        tensor = self._shared[at]
        wanted = allocate((0,), dtype, region).dtype
        if tensor.shape != tuple(shape) or tensor.dtype != wanted:
            raise NKIError(
                "shared-hbm",
                f"core {self.index} allocates {tuple(shape)} {wanted} where the other core allocated {tensor!r}",
            )
        return tensor


_thread = threading.local()


def core() -> Core:
    """The core that runs the current kernel."""
    running = getattr(_thread, "core", None)
    if running is None:
        raise NKIError("no-kernel", "this NKI call is only legal while a kernel runs (nki.simulate(kernel)(...))")
    return running


class Kernel:
    """What ``@nki.jit`` makes of a function. ``kernel[lnc]`` sets how many cores it runs on."""

    def __init__(self, func: Callable, lnc: int | None = None):
        functools.update_wrapper(self, func)
        self.func = func
        self.lnc = lnc

    def __getitem__(self, lnc) -> Kernel:
        grid = tuple(lnc) if isinstance(lnc, (tuple, list)) else (lnc,)
        if len(grid) != 1 or grid[0] not in (1, 2):
            raise NKIError("lnc", f"kernel[{lnc!r}]: NKI launches on 1 or 2 cores")
        return Kernel(self.func, int(grid[0]))

    def __call__(self, *args, **kwargs):
        if getattr(_thread, "core", None) is None:
            raise NKIError(
                "no-device",
                f"{self.func.__name__} was called without a device; use nki.simulate(kernel)(...)",
            )
        # A kernel that calls a kernel: the callee is inlined.
        return self.func(*args, **kwargs)


def jit(func: Callable | None = None, **options):
    """Mark a function as a kernel. Compiler options are accepted and have no meaning here."""
    if func is None:
        return lambda f: jit(f, **options)
    return func if isinstance(func, Kernel) else Kernel(func)


_core_order: tuple[int, ...] | None = None


@contextlib.contextmanager
def core_order(*order: int) -> Iterator[None]:
    """Run the cores of an LNC=2 launch in this order, for example ``core_order(1, 0)``."""
    global _core_order
    if sorted(order) != [0, 1]:
        raise ValueError(f"core_order{order}: the two cores are 0 and 1")
    before, _core_order = _core_order, order
    try:
        yield
    finally:
        _core_order = before


def simulate(kernel):
    """``simulate(kernel[lnc])(*arrays)`` runs the kernel on the CPU and returns its outputs.

    Arguments are NumPy arrays or torch tensors (the outputs are of the same kind); everything else is passed
    through. An argument that the kernel writes is updated in place.

    Raises:
        NKIError: the kernel breaks a rule of NKI or of the hardware.
        TypeError: the arguments do not fit the kernel's signature.
    """
    kernel = jit(kernel)

    @functools.wraps(kernel.func)
    def run(*args, **kwargs):
        if getattr(_thread, "core", None) is not None:
            raise NKIError("no-kernel", "nki.simulate inside a kernel")
        bound = inspect.signature(kernel.func).bind(*args, **kwargs)
        torch_like = False
        for name, value in bound.arguments.items():
            if interop.is_torch(value):
                torch_like, value = True, interop.to_numpy(value)
            if isinstance(value, np.ndarray):
                if not value.flags.c_contiguous:
                    raise NKIError("argument", f"{name} is not contiguous")
                bound.arguments[name] = from_array(value, name)

        lnc = kernel.lnc or 1
        shared: list[Tensor] = []
        results = {}
        for index in (_core_order or (0, 1)) if lnc == 2 else (0,):
            _thread.core = Core(index, lnc, kernel.lnc is not None, shared)
            try:
                results[index] = kernel.func(*bound.args, **bound.kwargs)
            finally:
                _thread.core = None
        return _outputs(results[0], interop.to_torch if torch_like else lambda array: array)

    return run


def _outputs(result, convert):
    """Arrays of what a kernel returned: a tensor in shared_hbm, or a tuple or list of them."""
    if result is None:
        return None
    if isinstance(result, (tuple, list)):
        return tuple(_outputs(item, convert) for item in result)
    if not isinstance(result, Tensor):
        raise NKIError("output", f"a kernel returns tensors, not {type(result).__name__}")
    if result.buffer is not MemoryRegion.shared_hbm:
        raise NKIError("output", f"{result!r}: kernel outputs live in nl.shared_hbm")
    return convert(np.ascontiguousarray(result.array()))
