"""The cost model of the emulator next to what AWS measured on trn2, and the constants that it is made of.

    python -m trn_kernels.benchmarks.cost_model docs/cost-model.md

rewrites the page in the documentation, which a test compares with the model as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from trn_kernels import emulator
from trn_kernels.emulator import arch, cost, profiler

emulator.install()

import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

BF16 = ml_dtypes.bfloat16


class Comparison(NamedTuple):
    """One published measurement and the same thing by the model."""

    what: str
    unit: str
    measured: float
    model: float
    remark: str


def matmul(lhs_KM, rhs_KN, blocks):
    """lhs_KM^T rhs_KN for [K, M] and [K, N] @ HBM in bf16, multiples of 128, 128 and 512.

    Both stay in SBUF. ``blocks`` of 512 columns of the result are summed at a time in as many banks of PSUM, so that a
    stationary tile serves several moving ones.

    Pseudocode:
        load lhs, rhs by 128 rows
        for m in M / 128, for n in N / (512 blocks):
            for k in K / 128: for b in blocks: psum[b] += lhs[k, m]^T rhs[k, n + b]
            copy psum to SBUF on the Vector and the Scalar engine; store
    """
    (K, M), N = lhs_KM.shape, rhs_KN.shape[1]
    out_MN = nl.ndarray((M, N), dtype=lhs_KM.dtype, buffer=nl.shared_hbm)
    lhs, rhs = [], []
    for k in range(K // 128):
        for source, tiles in ((lhs_KM, lhs), (rhs_KN, rhs)):
            tile = nl.ndarray((128, source.shape[1]), dtype=source.dtype)
            nisa.dma_copy(dst=tile, src=source[k * 128 : (k + 1) * 128])
            tiles.append(tile)
    for m in range(M // 128):
        row = nl.ndarray((128, N), dtype=out_MN.dtype)
        for n in range(N // (512 * blocks)):
            sums = [nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum) for _ in range(blocks)]
            for k in range(K // 128):
                for b in range(blocks):
                    at = (n * blocks + b) * 512
                    nisa.nc_matmul(
                        dst=sums[b], stationary=lhs[k][:, m * 128 : (m + 1) * 128], moving=rhs[k][:, at : at + 512]
                    )
            for b in range(blocks):
                at = (n * blocks + b) * 512
                engine = nisa.vector_engine if b % 2 else nisa.scalar_engine
                nisa.tensor_copy(dst=row[:, at : at + 512], src=sums[b], engine=engine)
        nisa.dma_copy(dst=out_MN[m * 128 : (m + 1) * 128], src=row)
    return out_MN


def _profile(kernel, *args) -> emulator.Report:
    return emulator.profile(kernel, shape_only=True)(*args)


def _back_to_back() -> float:
    """TFLOPS of 2048 matmuls of 128 x 128 x 512."""

    def kernel():
        stationary, moving = (nl.ndarray((128, n), dtype=nl.bfloat16) for n in (128, 512))
        out = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum)
        for _ in range(2048):
            nisa.nc_matmul(dst=out, stationary=stationary, moving=moving)

    report = _profile(kernel)
    return report.cores[0].total("flops") / report.scheduled_ns / 1000


def _bandwidth(size: int) -> float:
    """GB/s of a copy on the chip with descriptors of ``size`` bytes."""

    def kernel():
        nisa.dma_copy(dst=nl.ndarray((128, size), nl.uint8), src=nl.ndarray((128, size), nl.uint8))

    return 128 * size / _profile(kernel).cores[0].events[0].cost.ns


def _matmul_2048() -> float:
    """Percent of the peak of the tensor engine."""
    report = _profile(matmul, np.empty((2048, 2048), BF16), np.empty((2048, 2048), BF16), 4)
    return 100 * report.pe_bound_ns / report.scheduled_ns


def _one_element() -> float:
    """Cycles of the Scalar engine for one element per partition."""

    def kernel():
        nisa.activation(nl.ndarray((128, 1), nl.float32), nl.exp, nl.ndarray((128, 1), nl.float32))

    return _profile(kernel).cores[0].events[0].cost.ns * cost.GHZ["scalar"]


def comparisons() -> Iterator[Comparison]:
    """Every row of the table of measurements."""
    fitted = "the model's line goes through it"
    yield Comparison(
        "2048 matmuls 128 x 128 x 512 bf16, back to back", "TFLOPS", 77.2, _back_to_back(), "the model issues no gaps"
    )
    yield Comparison("DMA with descriptors of 1 KiB", "GB/s", 259, _bandwidth(1024), fitted)
    yield Comparison("DMA with descriptors of 4 KiB", "GB/s", 354, _bandwidth(4096), fitted)
    yield Comparison(
        "matmul 2048 x 2048 x 2048 bf16, from HBM to HBM",
        "% of peak",
        89.5,
        _matmul_2048(),
        "another kernel than AWS's: `matmul` of this benchmark, whose first sums wait for all loads",
    )
    yield Comparison(
        "activation of one element per partition",
        "cycles",
        264,
        _one_element(),
        "what the engine is busy; the rest is latency, which another instruction can hide",
    )


def constants() -> Iterator[tuple[str, str, str]]:
    """(what, value, source) of every constant of the model."""
    chip, arch_guide, perf_guide = arch.TRN2, "`trainium2_arch` guide", "NKI performance guide"
    for engine, clock in cost.GHZ.items():
        yield f"clock, {engine} engine", f"{clock} GHz", arch_guide
    yield "peak, tensor engine, bf16", f"{cost.PE_TFLOPS:.1f} TFLOPS a core", "128 x 128 x 2 x clock; fp32 a quarter"
    yield "HBM", f"{cost.HBM_GB_PER_S} GB/s a core", f"{arch_guide}: 2.9 TB/s a chip of 8 cores"
    yield "shortest issue interval", f"{cost.MIN_II} cycles", "docstrings of `nki.isa` in Neuron SDK 2.26"
    yield "start of GpSimd", "150 cycles", "docstrings of `nki.isa` in Neuron SDK 2.26"
    yield (
        "cycles by elements",
        "`emulator/cost.py`",
        "docstrings of `nki.isa` in Neuron SDK 2.26; 16-bit modes: " + arch_guide,
    )
    yield "DMA, a descriptor", f"{cost.DMA_NS_PER_DESCRIPTOR:.2f} ns", "line through the two bandwidths below"
    yield "DMA, a byte", f"1 / {1 / cost.DMA_NS_PER_BYTE:.0f} GB/s", "the same; documents: 368 to 435 GB/s at most"
    yield (
        "DMA, to the first use",
        f"{profiler.DMA_LATENCY_NS:.0f} ns",
        f"{perf_guide}: 1.3 us to start, 0.6 us a descriptor",
    )
    yield "DMA that transposes", f"{cost.TRANSPOSE_SHARE:.0%} from HBM, 50% on the chip", perf_guide
    yield "SBUF, usable", f"{chip.sbuf_usable_bytes:,} B a partition", "no document; nki-library plans with it on trn2"
    yield "PSUM", f"{chip.psum_banks} banks of {chip.psum_bank_bytes} B a partition", arch_guide


HEADER = """# The cost model

What `trn_kernels.emulator.profile` reports is a model, not a measurement. It is as good as the constants below; nothing
in it was fitted to a device by this project. Made by `python -m trn_kernels.benchmarks.cost_model docs/cost-model.md`;
a test compares.

## Next to measurements

AWS's figures for one physical core of trn2 (its notes for profiling NKI kernels), and what the model says of the same
work, with dependencies between instructions (`scheduled_ns`).

| work | unit | measured (trn2, AWS) | model | model / measured | remark |
|---|---|---|---|---|---|
"""
CONSTANTS = """
## Constants

| what | value | source |
|---|---|---|
"""
OMITTED = """
## What the model leaves out

- Semaphores, instruction fetch, queues of single DMA engines, descriptor generation: a DMA holds the whole bandwidth
  while its bytes move, and its result can be used 2 us later.
- Registers: an address or a trip count in one is there at once, also if it was loaded from memory just before.
- Descriptors of `dma_transpose`: it has the documented share of the bandwidth, however its source is strided.
- The tensor engine's warm-up: the device starts at about half its rate, and falls back when it idles for some 3 us.
- The bus that Vector and GpSimd share, bank conflicts of PSUM, traffic of the other cores of the chip.
- Waiting of two cores for each other: each is placed alone; meetings cost nothing.
- What the compiler does: here the order of the program holds per engine.

So read times as a lower bound that is closer than the roofline, and compare kernels with each other rather than with a
clock. `overlapped_ns` (the busiest engine) is the bound of that order; `serial_ns` is what no overlap would cost.
"""


def main(path: str) -> None:
    rows = [
        f"| {c.what} | {c.unit} | {c.measured:g} | {c.model:.3g} | {c.model / c.measured:.2f} | {c.remark} |"
        for c in comparisons()
    ]
    facts = [f"| {what} | {value} | {source} |" for what, value, source in constants()]
    Path(path).write_text(HEADER + "\n".join(rows) + "\n" + CONSTANTS + "\n".join(facts) + "\n" + OMITTED)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m trn_kernels.benchmarks.cost_model FILE")
    main(sys.argv[1])
