"""Runs kernels: ``nki.jit``, ``kernel[lnc]``, ``nki.simulate`` and the cores that a launch consists of.

With LNC=2 a kernel runs once per physical core. Both cores see the same ``shared_hbm`` tensors; SBUF, PSUM
and ``private_hbm`` are their own. The cores take turns (see ``cores``), in an order that tests can choose:
nothing in NKI orders them but ``core_barrier`` and ``sendrecv``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import threadpoolctl

from . import arch, dtypes, interop, races
from .cores import Meeting, Turns
from .errors import NKIError, kernel_location
from .lifetimes import Lifetimes
from .tensor import MemoryRegion, Storage, Tensor, allocate, from_array, integer

if TYPE_CHECKING:
    from .profiler import Recorder


class Core:
    """One physical core while it runs a kernel.

    Attributes:
        index: which core, what ``nl.program_id(0)`` returns.
        cores: how many run, what ``nl.num_programs()`` returns.
        has_grid: was the kernel launched with ``[lnc]``?
        target: the limits of the hardware.
        shape_only: nothing is computed in floating point.
    """

    def __init__(self, index: int, launch: _Launch):
        self.index = index
        self.cores = launch.cores
        self.has_grid = launch.has_grid
        self.target = arch.target()
        self.shape_only = launch.shape_only
        self._launch = launch
        self._shared = launch.shared
        self.shared_count = 0
        self._trips = launch.trips
        # What the reductions of the Scalar and the Vector engine add to: see ``isa.accumulators``.
        self._no_reorder = 0
        # Of the instruction that runs: which elements of its result are made of what nothing wrote.
        self.unwritten: np.ndarray | None = None
        self.accumulators: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.loops_count = 0
        self._loops: list[_Loop] = [_Loop(())]
        self.lifetimes = Lifetimes()
        self.recorder: Recorder | None = None

    def issue(self, name: str, reads, writes, args, kwargs) -> bool:
        """Note an instruction that passed its checks; False where its semantics need not run."""
        self.lifetimes.issue(reads, writes)
        return self.recorder is None or self.recorder.issue(name, reads, writes, args, kwargs)

    def ndarray(self, shape, dtype, region: MemoryRegion, name: str, address: tuple[int, int] | None = None) -> Tensor:
        """Allocate. The n-th ``shared_hbm`` tensor of every core is one tensor."""
        if region is not MemoryRegion.shared_hbm:
            tensor = self._launch.allocate(shape, dtype, region, name)
            storage, loop = tensor.storage, self.innermost_loop
            storage.loop, storage.slot = loop, (*loop.path, loop.ordinal())
            storage.address, storage.where = address, kernel_location()
            return tensor
        at = self.shared_count
        self.shared_count += 1
        if at == len(self._shared):
            self._shared.append(self._launch.allocate(shape, dtype, region, name))
            self._launch.adopt(self._shared[-1])
        tensor = self._shared[at]
        wanted = dtypes.name_of(dtype)
        if tensor.shape != tuple(shape) or tensor.dtype != wanted:
            raise NKIError(
                "shared-hbm",
                f"core {self.index} allocates {tuple(shape)} {wanted} where the other core allocated {tensor!r}",
            )
        return tensor

    def constant(self, array: np.ndarray) -> Tensor:
        """A read-only tensor in shared HBM with these values, the same on both cores."""
        new = self.shared_count == len(self._shared)
        tensor = self.ndarray(array.shape, array.dtype, MemoryRegion.shared_hbm, "")
        if new:
            tensor.array()[...] = array
            tensor.storage.filled, tensor.storage.writable = True, False
        elif not np.array_equal(dtypes.raw(tensor.array()), dtypes.raw(array.astype(tensor.array().dtype))):
            raise NKIError("shared-constant", f"the cores give {tensor!r} different values")
        return tensor

    @contextlib.contextmanager
    def no_reorder(self) -> Iterator[None]:
        """``with nl.no_reorder()``: no device loop starts inside."""
        self._no_reorder += 1
        try:
            yield
        finally:
            self._no_reorder -= 1

    def meet(self, meeting: Meeting) -> Meeting:
        """Wait for the other core; what it brought."""
        return self._launch.turns.meet(self.index, meeting)

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
    def loop(self) -> Iterator[_Loop]:
        """The body of a device loop runs."""
        if self._no_reorder:
            raise NKIError("loop-no-reorder", "a device loop inside nl.no_reorder()")
        outer = self._loops[-1]
        self._loops.append(_Loop((*outer.path, "loop", outer.ordinal())))
        try:
            yield self._loops[-1]
        finally:
            self._loops.pop()

    @property
    def innermost_loop(self) -> _Loop:
        """The device loop whose body runs, or the kernel outside loops."""
        return self._loops[-1]


class _Launch:
    """What the cores of one launch share."""

    def __init__(self, cores: int, has_grid: bool, shape_only: bool):
        self.cores = cores
        self.has_grid = has_grid
        self.shape_only = shape_only
        checked = not shape_only and "never-written" not in _unchecked
        self.allocate = functools.partial(allocate, checked=checked, floats=not shape_only, chip=arch.target())
        self.shared: list[Tensor] = []
        self.trips: list[int] = []
        self.turns: Turns | None = None
        watched = not shape_only and "core-race" not in _unchecked and cores == 2
        self._watched: list[Storage] | None = [] if watched else None

    def adopt(self, tensor: Tensor) -> None:
        """A tensor in shared HBM, an argument or a new one."""
        if self._watched is not None:
            tensor.storage.accesses = races.Log()
            self._watched.append(tensor.storage)

    def met(self) -> None:
        """The cores have met: what they did to shared HBM until now must not conflict."""
        for storage in self._watched or ():
            races.check(storage)


class _Loop:
    """A device loop that runs. ``path`` is the same for every iteration of the loops around it."""

    def __init__(self, path: tuple):
        self.path = path
        self._count = 0

    def iterate(self) -> None:
        """The next iteration begins: it allocates what the first did."""
        self._count = 0

    def ordinal(self) -> int:
        self._count += 1
        return self._count


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
        if running is None and os.environ.get("NKI_SIMULATOR") == "1":
            return Simulation(self)(*args, **kwargs)
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


CHECKS = frozenset(("never-written", "core-race", "capacity", "address-overlap"))
_unchecked: frozenset[str] = frozenset()


@contextlib.contextmanager
def unchecked(*checks: str) -> Iterator[None]:
    """Do without some of ``CHECKS`` in the launches of this block: less strict.

    Without ``"never-written"`` and ``"core-race"`` a launch is faster; without ``"capacity"`` a kernel that does not
    fit can be profiled, which shows what is live.
    """
    global _unchecked
    if not set(checks) <= CHECKS:
        raise ValueError(f"unchecked{checks}: what can be switched off is {', '.join(sorted(CHECKS))}")
    before, _unchecked = _unchecked, _unchecked | set(checks)
    try:
        yield
    finally:
        _unchecked = before


class Simulation:
    """A kernel that runs on the CPU when it is called: what ``simulate`` returns."""

    def __init__(self, kernel: Kernel):
        functools.update_wrapper(self, kernel.func)
        self.kernel = kernel

    def __getitem__(self, lnc) -> Simulation:
        """``simulate(kernel)[lnc]`` is ``simulate(kernel[lnc])``; nki-library's tests write it so."""
        return Simulation(self.kernel[lnc])

    def __call__(self, *args, **kwargs):
        return self.run(args, kwargs)

    def run(self, args, kwargs, recorders: list[Recorder] | None = None):
        """Run the kernel; ``recorders``, one per core, get every instruction."""
        func, cores = self.kernel.func, self.kernel.lnc or 1
        if getattr(_thread, "core", None) is not None:
            raise NKIError("no-kernel", "nki.simulate inside a kernel")
        bound = inspect.signature(func).bind(*args, **kwargs)
        torch_like = False
        dtypes.precise = os.environ.get("NKI_PRECISE_FP", "1") != "0"
        copies: list[tuple[np.ndarray, np.ndarray]] = []
        adopted: dict[tuple, Tensor] = {}
        shape_only = recorders is not None and any(r.shape_only for r in recorders)
        launch = _Launch(cores, self.kernel.lnc is not None, shape_only)
        for name, value in bound.arguments.items():
            if interop.is_torch(value):
                torch_like, value = True, interop.to_numpy(value)
            if isinstance(value, np.ndarray):
                if not value.dtype.isnative:
                    raise NKIError("argument", f"{name}: an array in native byte order is needed")
                dtype = dtypes.name_of(value.dtype, f"argument {name!r}: ")
                # What is passed twice is one tensor: cores race on it, and what one name writes the other reads.
                memory = (value.ctypes.data, value.shape, value.strides, dtype, value.flags.writeable)
                if value.size and memory in adopted:
                    bound.arguments[name] = adopted[memory]
                    continue
                contiguous = np.ascontiguousarray(value, None if dtypes.precise else dtypes.stored(dtype))
                if contiguous is not value:
                    contiguous.flags.writeable = value.flags.writeable
                    copies.append((value, contiguous))
                bound.arguments[name] = adopted[memory] = from_array(contiguous, name, dtype)
                launch.adopt(adopted[memory])

        results, counts = {}, {}

        def run(index: int) -> None:
            running = _thread.core = Core(index, launch)
            if recorders is not None:
                running.recorder = recorders[index]
            try:
                results[index] = func(*bound.args, **bound.kwargs)
            finally:
                _thread.core = None
            running.lifetimes.check(running.target, _unchecked)
            if recorders is not None:
                recorders[index].finish(running.lifetimes)
            counts[index] = running.shared_count

        with _one_blas_thread():
            if cores == 2:
                launch.turns = Turns(_core_order or (0, 1), run, launch.met)
                try:
                    launch.turns.run()
                finally:
                    launch.turns = None  # a cycle through `run` would keep every tensor of the launch
            else:
                run(0)
        for original, contiguous in copies:
            if original.flags.writeable:
                original[...] = contiguous
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
    result.check_inside()
    if result.buffer is not MemoryRegion.shared_hbm:
        raise NKIError("output", f"{result!r}: kernel outputs live in nl.shared_hbm")
    if (unwritten := result.unwritten()) is not None:
        first = tuple(int(i) for i in np.unravel_index(int(unwritten.argmax()), unwritten.shape))
        raise NKIError(
            "output-unwritten",
            f"{np.count_nonzero(unwritten)} of {unwritten.size} elements of the output {result!r} were never written, "
            f"the first is {first}{result.storage.from_where()}",
        )
    return convert(np.ascontiguousarray(result.array(), dtypes.NUMPY[result.dtype]))
