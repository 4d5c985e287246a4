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
import threadpoolctl

from . import arch, dtypes, interop
from .errors import NKIError
from .tensor import MemoryRegion, Tensor, allocate, from_array, integer


class Core:
    """One physical core while it runs a kernel.

    Attributes:
        index: which core, what ``nl.program_id(0)`` returns.
        cores: how many run, what ``nl.num_programs()`` returns.
        has_grid: was the kernel launched with ``[lnc]``?
        target: the limits of the hardware.
    """

    def __init__(self, index: int, cores: int, has_grid: bool, shared: list[Tensor], trips: list[int]):
        self.index = index
        self.cores = cores
        self.has_grid = has_grid
        self.target = arch.target()
        self._shared = shared
        self.shared_count = 0
        self._trips = trips
        self.loops_count = 0
        self._loops: list[object] = [object()]

    def ndarray(self, shape, dtype, region: MemoryRegion, name: str) -> Tensor:
        """Allocate. The n-th ``shared_hbm`` tensor of every core is one tensor."""
        if region is not MemoryRegion.shared_hbm:
            tensor = allocate(shape, dtype, region, name)
            tensor.storage.loop = self.innermost_loop
            return tensor
        at = self.shared_count
        self.shared_count += 1
        if at == len(self._shared):
            self._shared.append(allocate(shape, dtype, region, name))
        tensor = self._shared[at]
        wanted = dtypes.name_of(dtype)
        if tensor.shape != tuple(shape) or tensor.dtype != wanted:
            raise NKIError(
                "shared-hbm",
                f"core {self.index} allocates {tuple(shape)} {wanted} where the other core allocated {tensor!r}",
            )
        return tensor

    def count_trips(self, trips: int) -> None:
        """Record how often the next device loop of this core runs; the n-th of every core runs equally often."""
        at = self.loops_count
        self.loops_count += 1
        if at == len(self._trips):
            self._trips.append(trips)
        elif self._trips[at] != trips:
            raise NKIError(
                "loop-divergence",
                f"core {self.index} runs a device loop {trips} times, the other core ran it {self._trips[at]} times",
            )

    @contextlib.contextmanager
    def loop(self) -> Iterator[None]:
        """The body of a device loop runs."""
        self._loops.append(object())
        try:
            yield
        finally:
            self._loops.pop()

    @property
    def innermost_loop(self) -> object:
        """Identity of the device loop whose body runs, or of the kernel outside loops."""
        return self._loops[-1]


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
        if len(grid) != 1 or integer(grid[0], "the grid of a launch") not in (1, 2):
            raise NKIError("lnc", f"kernel[{lnc!r}]: NKI launches on 1 or 2 cores")
        return Kernel(self.func, int(grid[0]))

    def __call__(self, *args, **kwargs):
        running = getattr(_thread, "core", None)
        if running is None:
            raise NKIError(
                "no-device",
                f"{self.func.__name__} was called without a device; use nki.simulate(kernel)(...)",
            )
        if self.lnc not in (None, running.cores):
            raise NKIError("lnc", f"{self.func.__name__}[{self.lnc}] inside a launch on {running.cores} cores")
        # A kernel that calls a kernel: the callee is inlined.
        return self.func(*args, **kwargs)


def jit(func: Callable | None = None, **options):
    """Mark a function as a kernel. Compiler options are accepted and have no meaning here."""
    if func is None:
        return lambda f: jit(f, **options)
    return func if isinstance(func, Kernel) else Kernel(func)


@functools.cache
def _thread_pools() -> threadpoolctl.ThreadpoolController:
    return threadpoolctl.ThreadpoolController()


def _one_blas_thread():
    """A matmul of the Tensor engine is too small for threads, and those of torch compete: 30 times slower."""
    return _thread_pools().limit(limits=1, user_api="blas")


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


class Simulation:
    """A kernel that runs on the CPU when it is called: what ``simulate`` returns."""

    def __init__(self, kernel: Kernel):
        functools.update_wrapper(self, kernel.func)
        self.kernel = kernel

    def __getitem__(self, lnc) -> Simulation:
        """``simulate(kernel)[lnc]`` is ``simulate(kernel[lnc])``; nki-library's tests write it so."""
        return Simulation(self.kernel[lnc])

    def __call__(self, *args, **kwargs):
        func, cores = self.kernel.func, self.kernel.lnc or 1
        if getattr(_thread, "core", None) is not None:
            raise NKIError("no-kernel", "nki.simulate inside a kernel")
        bound = inspect.signature(func).bind(*args, **kwargs)
        torch_like = False
        for name, value in bound.arguments.items():
            if interop.is_torch(value):
                torch_like, value = True, interop.to_numpy(value)
            if isinstance(value, np.ndarray):
                if not value.flags.c_contiguous or not value.dtype.isnative:
                    raise NKIError("argument", f"{name}: a contiguous array in native byte order is needed")
                bound.arguments[name] = from_array(value, name)

        shared: list[Tensor] = []
        trips: list[int] = []
        results, counts = {}, {}
        for index in (_core_order or (0, 1)) if cores == 2 else (0,):
            running = _thread.core = Core(index, cores, self.kernel.lnc is not None, shared, trips)
            try:
                with _one_blas_thread():
                    results[index] = func(*bound.args, **bound.kwargs)
            finally:
                _thread.core = None
            counts[index] = running.shared_count
        if len(set(counts.values())) > 1:
            raise NKIError("shared-hbm", f"the cores allocate different numbers of tensors in shared_hbm: {counts}")
        return _outputs(results[0], interop.to_torch if torch_like else lambda array: array)


def simulate(kernel) -> Simulation:
    """``simulate(kernel[lnc])(*arrays)`` runs the kernel on the CPU and returns its outputs.

    Arguments are NumPy arrays or torch tensors (the outputs are of the same kind); everything else is passed
    through. An argument that the kernel writes is updated in place.

    Raises:
        NKIError: the kernel breaks a rule of NKI or of the hardware.
        TypeError: the arguments do not fit the kernel's signature.
    """
    return Simulation(jit(kernel))


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
