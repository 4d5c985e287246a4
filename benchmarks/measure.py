"""What is measured, and the three backends that measure it: ``model``, ``cpu`` and ``trn2``.

A figure knows the backend that made it, and nothing else can name one: ``ModelFigures`` come from reports of the
emulator's cost model alone, ``WallFigures`` take theirs from the device that the results of the timed call live on.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from trn_kernels import emulator
from trn_kernels.emulator import arch, cost, interop, profiler
from trn_kernels.ops import neuron

BACKENDS = ("model", "cpu", "trn2")
_DEVICES = {"cpu": "cpu", "neuron": "trn2"}
CAPTURE = """\
export NEURON_FRAMEWORK_DEBUG=1   # before the run: it then keeps the compiled kernels (graph.neff)
neuron-explorer capture -n graph.neff -s profile.ntff --profile-nth-exec=2 --enable-dge-notifs
neuron-explorer view -d . --output-format summary-text"""
"""How to look inside a kernel on the device (Neuron's guide to profiling NKI kernels)."""


class Launch(NamedTuple):
    """One launch of a kernel (with its grid) for the model. Floats of the arguments are never read."""

    kernel: object
    args: tuple
    kwargs: dict


@dataclass(frozen=True)
class Case:
    """One thing to measure. Cases with the same op, direction, shape and lnc are the same problem.

    Attributes:
        op: "rope" or "grouped_experts".
        implementation: whose; "trn_kernels" is ours.
        direction: "forward", "backward", or "both" one after the other.
        shape: sizes and dtypes as a reader wants them.
        lnc: physical cores.
        min_bytes: HBM bytes that no implementation can avoid: inputs that are used read once, outputs written once.
        flops: useful multiplications and additions of its matmuls.
        series: (name of a sweep, value on its axis) if it is part of one.
        parts: cases that the model measures one after the other instead of launches of this one.
        launches: makes what the model profiles; None if the model cannot.
        call: makes, for a device, the function that is timed there; None if only the model can run it.
        devices: where ``call`` makes sense.
        counts: operators that a timed call must have launched on a Neuron device, as ``launches()`` names them.
    """

    op: str
    implementation: str
    direction: str
    shape: str
    lnc: int
    min_bytes: int
    flops: int = 0
    series: tuple[str, int] | None = None
    parts: tuple[Case, ...] = field(default=(), repr=False, compare=False)
    launches: Callable[[], Iterable[Launch]] | None = field(default=None, repr=False, compare=False)
    call: Callable[[str], Callable[[], object]] | None = field(default=None, repr=False, compare=False)
    devices: tuple[str, ...] = field(default=("trn2",), compare=False)
    counts: tuple[str, ...] = field(default=(), compare=False)

    @property
    def bound_ns(self) -> float:
        """Least time of one launch on ``lnc`` cores: the larger of bytes over bandwidth and FLOPs over peak."""
        return max(self.min_bytes / cost.HBM_GB_PER_S, self.flops / (cost.PE_TFLOPS * 1000)) / self.lnc

    def runs_on(self, backend: str) -> bool:
        if backend == "model":
            return self.launches is not None or bool(self.parts)
        return self.call is not None and backend in self.devices


# -- the cost model -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelFigures:
    """What the model says of a case. Times in nanoseconds, of the slower core; memory in bytes per partition."""

    backend: ClassVar[str] = "model"

    target: str
    time_ns: float
    """With the dependencies between instructions."""
    overlapped_ns: float
    """If all engines overlapped perfectly."""
    hbm_bytes: int
    hbm_bound_ns: float
    """Of the bytes that it moves; ``pe_bound_ns`` of the matmuls that it was given. See ``Case.bound_ns``."""
    pe_bound_ns: float
    issued_flops: int
    """What the tensor engine could have computed in the time of the matmuls."""
    busy_ns: dict[str, float]
    """By engine, of the busier core."""
    sbuf_bytes: int
    psum_bytes: int
    dma_bytes: int
    descriptors: int

    @property
    def mean_descriptor_bytes(self) -> float:
        return self.dma_bytes / max(1, self.descriptors)

    @property
    def limiting_engine(self) -> str:
        return max(self.busy_ns, key=self.busy_ns.get)


def model_figures(report: emulator.Report) -> ModelFigures:
    """Of one launch."""
    assert report.backend == ModelFigures.backend, report.backend
    sizes: Counter[int] = Counter()
    for core in report.cores:
        sizes.update(core.descriptors())
    return ModelFigures(
        target=report.target,
        time_ns=report.scheduled_ns,
        overlapped_ns=report.overlapped_ns,
        hbm_bytes=report.hbm_bytes,
        hbm_bound_ns=report.hbm_bound_ns,
        pe_bound_ns=report.pe_bound_ns,
        issued_flops=sum(core.total("issued") for core in report.cores),
        busy_ns={engine: max(core.busy_ns()[engine] for core in report.cores) for engine in profiler.ENGINES},
        sbuf_bytes=max(core.sbuf for core in report.cores),
        psum_bytes=max(core.psum for core in report.cores),
        dma_bytes=sum(size * count for size, count in sizes.items()),
        descriptors=sum(sizes.values()),
    )


def sum_figures(launches: list[ModelFigures]) -> ModelFigures:
    """Of launches one after the other: memory is the largest, everything else adds up."""
    first, *rest = launches
    for other in rest:
        values = {name: getattr(first, name) + getattr(other, name) for name in _SUMS}
        values |= {name: max(getattr(first, name), getattr(other, name)) for name in ("sbuf_bytes", "psum_bytes")}
        busy = {engine: first.busy_ns[engine] + other.busy_ns[engine] for engine in profiler.ENGINES}
        first = ModelFigures(target=first.target, busy_ns=busy, **values)
    return first


_SUMS = (
    *("time_ns", "overlapped_ns", "hbm_bytes", "hbm_bound_ns", "pe_bound_ns"),
    *("issued_flops", "dma_bytes", "descriptors"),
)


class _Stop(Exception):
    """Ends an operator where it would launch."""


def launch_of(operator: Callable, *args, lnc: int) -> Launch:
    """The very launch that an operator makes: it runs up to the call of the simulator, on CPU tensors.

    Args:
        operator: from ``torch.ops.trn_kernels``; floats of its arguments may be unset.
        lnc: physical cores.
    """
    launches: list[Launch] = []

    def simulate(kernel):
        def run(*args, **kwargs):
            launches.append(Launch(kernel, args, kwargs))
            raise _Stop

        return run

    emulator.install()
    nki = importlib.import_module("nki")
    with _set(os.environ, "TRN_KERNELS_BACKEND", "emulator"), _set(os.environ, "NEURON_LOGICAL_NC_CONFIG", str(lnc)):
        original, nki.simulate = nki.simulate, simulate
        try:
            operator(*args)
        except _Stop:
            return launches[0]
        finally:
            nki.simulate = original
    raise RuntimeError(f"{operator} launched no kernel")


@contextlib.contextmanager
def _set(mapping, key, value):
    old = mapping.get(key)
    mapping[key] = value
    try:
        yield
    finally:
        if old is None:
            del mapping[key]
        else:
            mapping[key] = old


def device_call(kernel, arguments: dict, lnc: int, device: str) -> Callable[[], object]:
    """A kernel without an operator, as a Neuron device calls it.

    Args:
        kernel: under ``@nki.jit``, without its grid.
        arguments: by name; arrays go to the device, floats among them as zeros.
    """
    values = {}
    for name, value in arguments.items():
        if isinstance(value, np.ndarray):
            tensor = interop.to_torch(value)
            value = (tensor.zero_() if tensor.is_floating_point() else tensor).to(device)
        values[name] = value
    return lambda: neuron.wrap_nki(kernel)[lnc](**values)


class Model:
    """The emulator's cost model, shape-only."""

    name = "model"

    def __init__(self):
        if emulator.real_nki():
            raise RuntimeError("backend model: kernels of this process use AWS's nki, which the model cannot run")
        self._done: dict[Case, list[ModelFigures]] = {}

    def can(self, case: Case) -> bool:
        return case.runs_on(self.name)

    def measure(self, case: Case) -> ModelFigures:
        return sum_figures(self._launches(case))

    def _launches(self, case: Case) -> list[ModelFigures]:
        if case.parts:
            return [figures for part in case.parts for figures in self._launches(part)]
        if case not in self._done:
            # The kernels of others print.
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                self._done[case] = [
                    model_figures(emulator.profile(kernel, shape_only=True)(*args, **kwargs))
                    for kernel, args, kwargs in case.launches()
                ]
        return self._done[case]


# -- wall time ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WallFigures:
    """Wall times of a call in nanoseconds. Made by ``time_calls`` only.

    Attributes:
        device: type of the device that the results were on.
        first_ns: the first call, which traces, compiles (unless the compiled kernel is cached) and loads.
        compile_ns: by how much the first call was longer than the second.
        runs_ns: synchronised calls after the warm-up.
        queued_ns: per call, of as many calls with one synchronisation at the end, which hides the host's part.
    """

    device: str
    first_ns: float
    compile_ns: float
    runs_ns: tuple[float, ...]
    queued_ns: float

    @property
    def backend(self) -> str:
        return _DEVICES[self.device]

    @property
    def target(self) -> str:
        return self.device if self.device == "cpu" else arch.target().name

    @property
    def time_ns(self) -> float:
        return statistics.median(self.runs_ns)


def time_calls(call: Callable[[], object], synchronize: Callable[[], None], warmup: int, runs: int) -> WallFigures:
    """Time ``call``; where it ran is read from its results.

    Raises:
        RuntimeError: results on several devices, or on one that is no backend.
    """
    device = None

    def once() -> float:
        nonlocal device
        start = time.perf_counter_ns()
        result = call()
        synchronize()
        elapsed = time.perf_counter_ns() - start
        places = {tensor.device.type for tensor in _tensors(result)} | ({device} if device else set())
        if len(places) != 1 or not places <= _DEVICES.keys():
            raise RuntimeError(f"results are on {', '.join(sorted(places)) or 'no device'}; one of {list(_DEVICES)}")
        (device,) = places
        return elapsed

    first, second = once(), once()
    for _ in range(warmup):
        once()
    each = tuple(once() for _ in range(runs))
    start = time.perf_counter_ns()
    for _ in range(runs):
        call()
    synchronize()
    queued = (time.perf_counter_ns() - start) / runs
    return WallFigures(device, first, max(0.0, first - second), each, queued)


def _tensors(result) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for item in result:
            yield from _tensors(item)


class CPU:
    """PyTorch on this machine's CPU; for comparisons between its rows only. No kernel of ours runs here."""

    name = "cpu"

    def can(self, case: Case) -> bool:
        return case.runs_on(self.name)

    def measure(self, case: Case) -> WallFigures:
        return time_calls(case.call("cpu"), lambda: None, warmup=1, runs=5)


class Trn2:
    """The Neuron device of this machine.

    Raises:
        RuntimeError: what is missing.
    """

    name = "trn2"

    def __init__(self, warmup: int = 5, runs: int = 20):
        missing = missing_for_trn2()
        if missing:
            raise RuntimeError(f"backend trn2: {missing}")
        self.warmup, self.runs, self.lnc = warmup, runs, neuron.logical_neuron_cores()

    def can(self, case: Case) -> bool:
        """The size of a logical core is the machine's: the runtime is started with it."""
        return case.runs_on(self.name) and case.lnc == self.lnc

    def measure(self, case: Case) -> WallFigures:
        before = neuron.launches()
        figures = time_calls(case.call("neuron"), torch.get_device_module("neuron").synchronize, self.warmup, self.runs)
        if figures.backend != self.name:
            raise RuntimeError(f"{case.op} by {case.implementation}: results are on {figures.device}, not on neuron")
        after = neuron.launches()
        for op in case.counts:
            if after.get((op, "neuron"), 0) == before.get((op, "neuron"), 0):
                raise RuntimeError(f"{case.op} by {case.implementation}: {op} did not run on the device")
        return figures


def missing_for_trn2() -> str | None:
    """What a measurement on a device lacks here, None if nothing."""
    if neuron.torch_neuronx() is None:
        return "torch_neuronx is not installed, or was not loaded with torch"
    if not emulator.real_nki():
        return "AWS's nki is not installed"
    device = getattr(torch, "neuron", None)
    if device is None or device.device_count() == 0:
        return "torch_neuronx sees no Neuron device"
    return None


def make_backends(wanted: Iterable[str]) -> list[Model | CPU | Trn2]:
    """The backends of these names; ``auto`` is all that can run here.

    Raises:
        RuntimeError: one that is asked for by name and cannot run; the text says what is missing.
    """
    names = list(dict.fromkeys(wanted))
    if "auto" in names:
        names = [*([] if emulator.real_nki() else ["model"]), "cpu", *([] if missing_for_trn2() else ["trn2"])]
    return [{"model": Model, "cpu": CPU, "trn2": Trn2}[name]() for name in names]
