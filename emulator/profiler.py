"""``profile(kernel[lnc])(*arrays)``: what a kernel costs by the model of ``emulator.cost``.

The kernel runs as in ``simulate``, or shape-only: integers, registers and the trip counts of device loops still flow,
so that work that depends on routing is counted truly, but nothing is computed in floating point.

Each instruction is then placed in time: an engine works in program order, the DMA engines on whatever is ready,
and an instruction starts when what it reads is written and what it writes is no longer read. A tensor that is
allocated in the body of a device loop is one buffer for all iterations. Semaphores, instruction fetch, the warm-up
of the tensor engine and the queues of single DMA engines are not modelled.
"""

from __future__ import annotations

import functools
import heapq
import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from . import arch, dtypes, plots
from . import cost as model
from .cost import Cost
from .errors import NKIError
from .lifetimes import Lifetimes
from .machine import simulate
from .tensor import MemoryRegion, Tensor

ENGINES = ("dma", "tensor", "vector", "scalar", "gpsimd")
DMA_LATENCY_NS = 2000.0
"""From the trigger of a DMA to the first use of its data, beyond the time that its bytes take (NKI performance
guide: about 1.3 us from semaphore to start, 0.6 us for a descriptor)."""


@dataclass
class Event:
    """One instruction of one core. ``start`` in nanoseconds is where the model places it."""

    name: str
    cost: Cost
    reads: list[tuple[object, object]]
    writes: list[tuple[object, object]]
    """(buffer, view of it) that it reads and writes."""
    start: float = 0.0


@dataclass
class CoreReport:
    """One physical core. Times in nanoseconds, memory in bytes per partition."""

    events: list[Event] = field(default_factory=list, repr=False)
    sbuf: int = 0
    psum: int = 0
    live: dict[str, list[str]] = field(default_factory=dict, repr=False)
    """What was live at the high-water mark of ``sbuf`` and of ``psum``."""
    scheduled_ns: float = 0.0

    def busy_ns(self) -> dict[str, float]:
        """How long each engine works."""
        busy = dict.fromkeys(ENGINES, 0.0)
        for event in self.events:
            if event.cost.engine in busy:
                busy[event.cost.engine] += event.cost.ns
        return busy

    def dma_latency_ns(self) -> float:
        """The latencies of all DMAs, one after the other."""
        return DMA_LATENCY_NS * sum(event.cost.engine == "dma" for event in self.events)

    def total(self, what: str) -> int:
        """Sum over all instructions of ``read``, ``written``, ``flops``, ``issued`` or ``elements``."""
        return sum(getattr(event.cost, what) for event in self.events)

    def descriptors(self) -> dict[int, int]:
        """DMA descriptors by size in bytes."""
        sizes: Counter[int] = Counter()
        for event in self.events:
            sizes.update(event.cost.descriptors)
        return dict(sorted(sizes.items()))


@dataclass
class Report:
    """What a launch costs by the model. Cores run at the same time, so times are those of the slowest.

    Attributes:
        kernel: its name.
        target: the hardware, for example "trn2".
        cores: one report per physical core.
        results: what the kernel returned (arrays with unset floats in a shape-only run).
    """

    kernel: str
    target: str
    cores: list[CoreReport]
    results: object = field(default=None, repr=False)

    backend = "model"

    @property
    def hbm_bytes(self) -> int:
        """Bytes from and to HBM, of all cores."""
        return sum(core.total("read") + core.total("written") for core in self.cores)

    @property
    def hbm_bound_ns(self) -> float:
        """Bytes over bandwidth."""
        return max((c.total("read") + c.total("written")) / model.HBM_GB_PER_S for c in self.cores)

    @property
    def pe_bound_ns(self) -> float:
        """The matmuls' own operations over the peak of the tensor engine for bf16, twice that with double_row."""
        flops = (sum(event.cost.flops / event.cost.rows for event in core.events) for core in self.cores)
        return max(flops) / (model.PE_TFLOPS * 1000)

    @property
    def overlapped_ns(self) -> float:
        """Time if engines overlap perfectly: the busiest one."""
        return max(max(core.busy_ns().values()) for core in self.cores)

    @property
    def scheduled_ns(self) -> float:
        """Time with the dependencies between instructions, see the module."""
        return max(core.scheduled_ns for core in self.cores)

    @property
    def serial_ns(self) -> float:
        """Time if nothing overlaps: every DMA also waits for its latency."""
        return max(sum(core.busy_ns().values()) + core.dma_latency_ns() for core in self.cores)

    @property
    def limiting_engine(self) -> str:
        busy = max((core.busy_ns() for core in self.cores), key=lambda b: max(b.values()))
        return max(busy, key=busy.get)

    def to_dict(self) -> dict:
        """Every figure, for JSON."""
        return {
            "kernel": self.kernel,
            "backend": self.backend,
            "target": self.target,
            "hbm_bytes": self.hbm_bytes,
            "hbm_bound_ns": self.hbm_bound_ns,
            "pe_bound_ns": self.pe_bound_ns,
            "overlapped_ns": self.overlapped_ns,
            "scheduled_ns": self.scheduled_ns,
            "serial_ns": self.serial_ns,
            "limiting_engine": self.limiting_engine,
            "cores": [
                {
                    "busy_ns": core.busy_ns(),
                    **{what: core.total(what) for what in ("read", "written", "flops", "issued", "elements")},
                    "descriptors": core.descriptors(),
                    "instructions": dict(Counter(event.name for event in core.events)),
                    "sbuf_bytes": core.sbuf,
                    "psum_bytes": core.psum,
                    "scheduled_ns": core.scheduled_ns,
                }
                for core in self.cores
            ],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        lines = [
            f"{self.kernel} on {len(self.cores)} core(s) of {self.target}, by the model (not measured)",
            f"  bounds     HBM {self.hbm_bound_ns / 1e3:.1f} us, tensor engine {self.pe_bound_ns / 1e3:.1f} us",
            f"  time       {self.overlapped_ns / 1e3:.1f} us if engines overlap perfectly ({self.limiting_engine}), "
            f"{self.scheduled_ns / 1e3:.1f} us with dependencies, {self.serial_ns / 1e3:.1f} us without overlap",
        ]
        for index, core in enumerate(self.cores):
            busy = ", ".join(f"{name} {ns / 1e3:.1f}" for name, ns in core.busy_ns().items() if ns)
            sizes = core.descriptors()
            count = sum(sizes.values())
            mean = sum(size * n for size, n in sizes.items()) / count if count else 0
            lines += [
                f"  core {index}     busy us: {busy}",
                f"             HBM read {core.total('read'):,} B, written {core.total('written'):,} B; "
                f"{count:,} descriptors of {mean:,.0f} B on average",
                f"             SBUF {core.sbuf:,} B and PSUM {core.psum:,} B at most, a mean per partition; "
                f"{len(core.events):,} instructions",
            ]
            if core.total("flops"):
                share = core.total("flops") / core.total("issued")
                lines.append(
                    f"             matmul {core.total('flops') / 1e9:.2f} GFLOP, {share:.0%} of what was issued"
                )
        return "\n".join(lines)

    def save_trace(self, path: str | Path) -> None:
        """A trace for Perfetto or chrome://tracing: a process per core, a thread per engine."""
        events = [
            {
                "name": event.name,
                "ph": "X",
                "ts": event.start / 1e3,
                "dur": event.cost.ns / 1e3,
                "pid": f"core {index} (model)",
                "tid": event.cost.engine,
            }
            for index, core in enumerate(self.cores)
            for event in core.events
            if event.cost.engine in ENGINES
        ]
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))

    def save_roofline(self, path: str | Path) -> None:
        """Draw the kernel under the ceilings of the machine (``plots.roofline``); needs matplotlib."""
        plots.roofline({self.kernel: self}, path)


def profile(kernel, shape_only: bool = False):
    """``profile(kernel[lnc])(*arrays)`` runs a kernel as ``simulate`` does and returns its ``Report``.

    Args:
        kernel: under ``@nki.jit``, with ``[lnc]`` for two cores.
        shape_only: compute nothing in floating point; seconds instead of minutes at real model sizes. Floats of the
            arguments are not read (``numpy.empty`` will do), integers are. A register that would be loaded with an
            integer made of floats is an error.
    """
    simulation = simulate(kernel)

    @functools.wraps(simulation.kernel.func)
    def run(*args, **kwargs) -> Report:
        recorders = [Recorder(shape_only) for _ in range(simulation.kernel.lnc or 1)]
        results = simulation.run(args, kwargs, recorders)
        return Report(simulation.kernel.func.__name__, arch.target().name, [r.report for r in recorders], results)

    return run


class Recorder:
    """Collects the instructions of one core; ``machine.Core`` and ``table`` call it."""

    def __init__(self, shape_only: bool):
        self.shape_only = shape_only
        self.report = CoreReport()

    def issue(self, name: str, reads: list[Tensor], writes: list[Tensor], args, kwargs) -> bool:
        """Record an instruction; False where its semantics need not run, which is in a shape-only run."""
        at = len(self.report.events)
        read, written = [[_access(t, at) for t in tensors] for tensors in (reads, writes)]
        if name == "core_barrier":  # what follows on this tensor waits for the meeting
            written = read
        cost = model.cost_of(name)(*args, **kwargs)
        if cost.engine in ("vector", "scalar", "gpsimd"):
            cost.elements = max((t.size for t in (*reads, *writes)), default=0)
        self.report.events.append(Event(name, cost, read, written))
        if not self.shape_only:
            return True
        guessed = any(t.storage.guessed or dtypes.is_float(t.storage.dtype) for t in reads)
        if guessed and name == "register_load":
            raise NKIError(
                "shape-only",
                f"{reads[0]!r} was made of floats, which a shape-only run does not compute, and it would decide what "
                "runs: profile this kernel with shape_only=False",
            )
        for t in writes:
            if guessed or t.size * dtypes.itemsize(t.dtype) == t.storage.raw.size:
                t.storage.guessed = guessed
        return not (writes and dtypes.is_float(writes[0].dtype))

    def finish(self, lifetimes: Lifetimes) -> None:
        """The kernel has run."""
        for region in (MemoryRegion.sbuf, MemoryRegion.psum):
            size, live = lifetimes.high_water(region)
            setattr(self.report, region.value, size)
            self.report.live[region.value] = [buffer.label for buffer in live]
        _schedule(self.report)


def _access(t: Tensor, at: int) -> tuple[object, object]:
    """The buffer and the view of it that instruction ``at`` reads or writes."""
    storage = t.storage
    # Parts of a tensor in HBM that are written are never told apart: each write is its own view.
    view = (t.offset, t.shape, t.strides) if storage.region.on_chip else at
    return storage if storage.slot is None else storage.slot, view


class _Epoch:
    """What happened to a buffer since it was last written anew.

    Writes that follow each other without a read between fill different parts and may overtake each other, unless
    they write the same view. A write after a read waits for all that was read.
    """

    def __init__(self):
        self.writes: dict[int, object] = {}
        self.reads: list[int] = []

    def overwritten(self, view) -> list[int]:
        return self.reads or [i for i, written in self.writes.items() if written == view]

    def write(self, i: int, view) -> None:
        if self.reads:
            self.writes, self.reads = {}, []
        self.writes[i] = view


def _schedule(report: CoreReport) -> None:
    """Place every event: engines in program order, DMA whatever is ready, none before its operands."""
    events = report.events
    waits, waiters = [0] * len(events), defaultdict(list)
    queues: dict[str, list[int]] = defaultdict(list)
    buffers: dict[object, _Epoch] = defaultdict(_Epoch)
    for i, event in enumerate(events):
        before = set()
        for key, _ in event.reads:
            before.update(buffers[key].writes)
        for key, view in event.writes:
            before.update(buffers[key].overwritten(view))
        before.discard(i)
        for key, _ in event.reads:
            buffers[key].reads.append(i)
        for key, view in event.writes:
            buffers[key].write(i, view)
        waits[i] = len(before)
        for j in before:
            waiters[j].append(i)
        if event.cost.engine not in ("dma", "none"):
            queues[event.cost.engine].append(i)

    ready_at = [0.0] * len(events)
    free = dict.fromkeys((*ENGINES, "none"), 0.0)
    heads = dict.fromkeys(queues, 0)
    ready_dma: list[tuple[int, float]] = []
    finished: list[tuple[float, int]] = []

    def start(i: int, engine: str) -> None:
        event = events[i]
        event.start = max(ready_at[i], free[engine] if engine != "none" else 0.0)
        end = event.start + event.cost.ns
        if engine != "none":
            free[engine] = end
        heapq.heappush(finished, (end + (DMA_LATENCY_NS if engine == "dma" else 0.0), i))

    def offer(i: int) -> None:
        engine = events[i].cost.engine
        if engine == "dma":
            heapq.heappush(ready_dma, (i, ready_at[i]))
        elif engine == "none":
            start(i, "none")

    for i, count in enumerate(waits):
        if count == 0:
            offer(i)
    now = 0.0
    while True:
        for engine, queue in queues.items():
            while heads[engine] < len(queue) and waits[queue[heads[engine]]] == 0:
                start(queue[heads[engine]], engine)
                heads[engine] += 1
        # One DMA at a time holds the bandwidth; the next is chosen when it is free.
        if ready_dma and (free["dma"] <= now or not finished):
            start(heapq.heappop(ready_dma)[0], "dma")
            continue
        if not finished:
            break
        if ready_dma and free["dma"] < finished[0][0]:
            now = free["dma"]
            continue
        now, done = heapq.heappop(finished)
        for i in waiters[done]:
            waits[i] -= 1
            ready_at[i] = max(ready_at[i], now)
            if waits[i] == 0:
                offer(i)
    report.scheduled_ns = max((e.start + e.cost.ns for e in events), default=0.0)
