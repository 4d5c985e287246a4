"""What an instruction costs, by the formulas and clocks that AWS documents. A model, not a measurement.

Sources:
* cycles per instruction: the docstrings of ``nki.isa`` in Neuron SDK 2.26, the last that print them; N is the number
  of elements per partition, MIN_II = 64 cycles the shortest issue interval. They predate trn2's faster modes of the
  Vector engine, which are added from the ``trainium2_arch`` guide; where the two leave a choice the slower is taken.
* clocks and peaks: the ``trainium2_arch`` guide; HBM bandwidth of a chip (2.9 TB/s) shared by its 8 cores.
* DMA: a line through the two bandwidths that AWS measured on trn2, 259 GB/s with descriptors of 1 KiB and 354 GB/s
  with 4 KiB (nki-samples notes on DMA size): every descriptor costs a fixed time, every byte a rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

from . import dtypes
from .isa.enums import engine as Engine
from .isa.enums import matmul_perf_mode as PerfMode
from .tensor import MemoryRegion, Tensor

MIN_II = 64
GHZ = {"tensor": 2.4, "vector": 0.96, "scalar": 1.2, "gpsimd": 1.2}
"""Clocks of trn2's engines."""

HBM_GB_PER_S = 2900 / 8
"""Share of one physical core in the bandwidth of the chip's HBM, in bytes per nanosecond."""
PE_TFLOPS = 128 * 128 * 2 * GHZ["tensor"] / 1000
"""Peak of one core for bf16 and fp16; fp32 runs at a quarter."""
ELEMENTWISE_TOPS = 128 * (GHZ["vector"] + GHZ["scalar"] + GHZ["gpsimd"]) / 1000
"""Elements that the three other engines produce at one per cycle and partition, in 10^12 per second."""

_DMA_POINTS = ((1024, 259.0), (4096, 354.0))
_TIMES = [size / rate for size, rate in _DMA_POINTS]
DMA_NS_PER_BYTE = (_TIMES[1] - _TIMES[0]) / (_DMA_POINTS[1][0] - _DMA_POINTS[0][0])
DMA_NS_PER_DESCRIPTOR = _TIMES[0] - _DMA_POINTS[0][0] * DMA_NS_PER_BYTE


@dataclass
class Cost:
    """What one instruction takes.

    Attributes:
        engine: tensor, vector, scalar, gpsimd, dma, or none for what only a sequencer does.
        ns: how long it keeps that engine busy.
        read, written: bytes from and to HBM.
        descriptors: of a DMA, by their size in bytes.
        flops: multiplications and additions of a matmul, on the operands that it was given; a transpose has none.
        issued: what the tensor engine could have computed in that time in the operands' dtype.
        rows: of the contraction that a partition multiplies in a cycle, 2 with double_row, which doubles the peak.
        elements: that the Vector, Scalar or GpSimd engine produces, or reads if those are more (reductions).
    """

    engine: str
    ns: float
    read: int = 0
    written: int = 0
    descriptors: dict[int, int] = field(default_factory=dict)
    flops: int = 0
    issued: int = 0
    rows: int = 1
    elements: int = 0


def _busy(engine: str, cycles: float) -> Cost:
    return Cost(engine, max(MIN_II, cycles) / GHZ[engine])


def _name(engine, default: str) -> str:
    return default if engine is Engine.unknown else engine.name


def _16_bit(*tensors: Tensor) -> bool:
    return all(dtypes.is_float(t.dtype) and dtypes.itemsize(t.dtype) == 2 for t in tensors)


def _in_sbuf(*tensors: Tensor) -> bool:
    return all(t.buffer is MemoryRegion.sbuf for t in tensors)


def _dense(*tensors: Tensor) -> bool:
    return all(not t.shape[1:] or t.strides[-1] == 1 or t.shape[-1] == 1 for t in tensors)


def _copy_like(name: str, dst: Tensor, src: Tensor) -> Cost:
    """N cycles; the Vector engine is 4 x faster for 16-bit data in SBUF, 2 x if one side is PSUM or not dense."""
    n = dst.free_size
    if name == "vector" and _16_bit(dst, src):
        n /= 4 if _in_sbuf(dst, src) and _dense(dst, src) else 2
    return _busy(name, n)


def memset(dst, value, engine=Engine.unknown, name=None):
    n = dst.free_size
    return _busy(_name(engine, "vector"), n / 2 if value == 0 and _16_bit(dst) else n)


def tensor_copy(dst, src, engine=Engine.unknown, name=None):
    return _copy_like(_name(engine, "vector"), dst, src)


def tensor_tensor(dst, data1, data2, op, engine=Engine.unknown, name=None):
    """2 N; N where an input is in PSUM, or for 16-bit add, subtract and multiply in SBUF."""
    name = _name(engine, "gpsimd" if dst.dtype == data1.dtype == data2.dtype == "int32" else "vector")
    fast = not _in_sbuf(data1, data2) or (
        name == "vector" and _16_bit(dst, data1, data2) and op.name in ("add", "subtract", "multiply")
    )
    return _busy(name, dst.free_size * (1 if fast else 2))


def tensor_scalar(
    dst, data, op0, operand0, reverse0=False, op1=None, operand1=None, reverse1=False, engine=Engine.unknown, name=None
):
    return _copy_like(_name(engine, "vector"), dst, data)


def scalar_tensor_tensor(dst, data, op0, operand0, op1, operand1, reverse0=False, reverse1=False, name=None):
    fast = _16_bit(dst, data, operand1) and op0.name == "subtract" and op1.name == "multiply"
    return _busy("vector", dst.free_size * (1 if fast and dst.free_size % 2 == 0 else 2))


def activation(dst, op, data, *args, reduce_res=None, **kwargs):
    """N; reading the sums out is one more short instruction."""
    cost = _busy("scalar", dst.free_size)
    if reduce_res is not None:
        cost.ns += MIN_II / GHZ["scalar"]
    return cost


def activation_reduce(dst, op, data, reduce_op, reduce_res, *args, **kwargs):
    return activation(dst, op, data, reduce_res=reduce_res)


def tensor_scalar_reduce(dst, data, *args, **kwargs):
    return Cost("vector", (max(MIN_II, dst.free_size) + MIN_II) / GHZ["vector"])


def tensor_tensor_scan(dst, *args, **kwargs):
    return _busy("vector", 2 * dst.free_size)


def reciprocal(dst, data, name=None):
    return _busy("vector", 8 * dst.free_size)


def bn_stats(dst, data, name=None):
    return _busy("vector", data.free_size)


def bn_aggr(dst, data, name=None):
    return _busy("vector", 13 * data.free_size / 3)


def max8(dst, src, name=None):
    return _busy("vector", src.free_size)


def nc_find_index8(dst, data, vals, name=None):
    return _busy("vector", data.free_size)


def nc_match_replace8(dst, data, vals, imm, dst_idx=None, name=None):
    """The documents print min(MIN_II, N), which can only be a misprint for the maximum."""
    return _busy("vector", data.free_size)


def nc_stream_shuffle(dst, src, shuffle_mask, name=None):
    return _busy("vector", dst.free_size)


def tensor_copy_predicated(dst, src, predicate, *args, **kwargs):
    in_psum = any(isinstance(t, Tensor) and not _in_sbuf(t) for t in (src, predicate))
    return _busy("vector", dst.free_size * (1 if in_psum else 2))


def range_select(dst, *args, **kwargs):
    return _busy("vector", dst.free_size)


def affine_select(dst, *args, **kwargs):
    return _busy("gpsimd", 150 + dst.free_size)


def local_gather(dst, src_buffer, index, num_elem_per_idx=1, num_valid_indices=None, name=None):
    n, size = num_elem_per_idx, dtypes.itemsize(src_buffer.dtype)
    valid = num_valid_indices or index.free_size * 16
    width = ((28 + 4 * n) / (4 * n)) / min(4 / size, n)
    return _busy("gpsimd", 150 + valid * n / width)


def tensor_reduce(dst, op, data, axis, negate=False, keepdims=False, name=None):
    fast = _16_bit(dst, data) and op.name in ("add", "maximum")
    return _busy("vector", data.free_size / (2 if fast else 1))


def iota(dst, pattern, offset=0, channel_multiplier=0, name=None):
    return _busy("gpsimd", 150 + dst.free_size)


def nc_matmul(
    dst,
    stationary,
    moving,
    is_stationary_onezero=False,
    is_moving_onezero=False,
    is_transpose=False,
    accumulate=None,
    tile_position=(),
    tile_size=(),
    perf_mode=PerfMode.none,
    name=None,
):
    """The moving operand streams through at a column a cycle; fp32 takes four passes, or two if one side is 0 and 1.

    With double_row both operands hold two rows of the contraction in each partition, which one cycle multiplies.
    """
    rows = 2 if perf_mode in (PerfMode.double_row, PerfMode.double_row.value) else 1
    m, n = stationary.free_size // rows, moving.free_size // rows
    cycles = max(min(MIN_II, m), n)
    passes = 1
    if stationary.dtype == "float32":
        passes = 2 if is_stationary_onezero or is_moving_onezero else 4
    ns = cycles * passes / GHZ["tensor"]
    if is_transpose:
        return Cost("tensor", ns)
    flops = 2 * rows * stationary.shape[0] * m * n
    return Cost("tensor", ns, flops=flops, issued=2 * 128 * 128 * rows * cycles, rows=rows)


def nc_transpose(dst, data, engine=Engine.unknown, name=None):
    on_tensor = engine is Engine.tensor or (engine is Engine.unknown and dst.buffer is MemoryRegion.psum)
    if on_tensor:
        return Cost("tensor", max(data.shape[0], min(MIN_II, data.free_size)) / GHZ["tensor"])
    return _busy("vector", data.free_size)


def _run(t: Tensor) -> int:
    """Bytes that are contiguous at the inner end of a pattern; on chip a run does not cross partitions."""
    run = 1
    first = 1 if t.buffer.on_chip or (t.runtime is not None and t.runtime.per_partition) else 0
    for size, stride in zip(reversed(t.shape[first:]), reversed(t.strides[first:]), strict=True):
        if size > 1 and stride != run:
            break
        run *= size
    return run * dtypes.itemsize(t.dtype)


def _moved_rows(t: Tensor) -> float:
    """Which part of a gather or scatter moves: the rows whose index is there."""
    if t.runtime is None or not t.runtime.per_partition:
        return 1.0
    index = t.runtime.index.array().astype("int64")
    rows = prod(t.storage.shape) // max(1, t.runtime.scale)
    return float(((index >= 0) & (index < rows)).mean()) if index.size else 0.0


def dma_copy(dst, src, *args, **kwargs):
    moved = min(_moved_rows(dst), _moved_rows(src))
    elements = round(dst.size * moved)
    size = elements * max(dtypes.itemsize(t.dtype) for t in (dst, src))
    read, written = (0 if t.buffer.on_chip else elements * dtypes.itemsize(t.dtype) for t in (src, dst))
    run = max(1, min(_run(dst), _run(src)))
    count = -(-size // run)
    ns = max(count * DMA_NS_PER_DESCRIPTOR + size * DMA_NS_PER_BYTE, (read + written) / HBM_GB_PER_S)
    return Cost("dma", ns, read=read, written=written, descriptors={run: count} if count else {})


TRANSPOSE_SHARE = 0.9
"""Of the DMA bandwidth that is left when the DMA transposes from HBM to SBUF (NKI performance guide)."""


def dma_transpose(dst, src, *args, **kwargs):
    size = src.size * dtypes.itemsize(src.dtype)
    share = TRANSPOSE_SHARE if not src.buffer.on_chip else 0.5
    rate = _DMA_POINTS[-1][1] * share
    read = 0 if src.buffer.on_chip else size
    return Cost("dma", max(size / rate, read / HBM_GB_PER_S), read=read, descriptors={_run(src): -(-size // _run(src))})


def dma_compute(dst, srcs, *args, **kwargs):
    """Every source is read, the sum is written."""
    size = dst.size * dtypes.itemsize(dst.dtype)
    read = sum(t.size * dtypes.itemsize(t.dtype) for t in srcs if not t.buffer.on_chip)
    written = 0 if dst.buffer.on_chip else size
    run = max(1, min(_run(t) for t in (dst, *srcs)))
    count = -(-size * len(srcs) // run)
    ns = max(count * DMA_NS_PER_DESCRIPTOR + size * len(srcs) * DMA_NS_PER_BYTE, (read + written) / HBM_GB_PER_S)
    return Cost("dma", ns, read=read, written=written, descriptors={run: count})


def sendrecv(src, dst, *args, **kwargs):
    """The bytes of one direction; how long the cores wait for each other is not modelled."""
    size = src.size * dtypes.itemsize(src.dtype)
    run = max(1, min(_run(src), _run(dst)))
    count = -(-size // run)
    return Cost("dma", count * DMA_NS_PER_DESCRIPTOR + size * DMA_NS_PER_BYTE, descriptors={run: count})


def core_barrier(data, cores, *args, **kwargs):
    """How long the cores wait for each other is not modelled."""
    return Cost("none", 0.0)


def _sequencer(*args, **kwargs):
    return Cost("none", 0.0)


register_load = register_store = register_move = _sequencer


def cost_of(name: str) -> Callable[..., Cost]:
    """The cost function of an instruction; it takes the arguments of the instruction.

    Raises:
        NotImplementedError: the instruction has none; nothing is ever counted as free by omission.
    """
    function = globals().get(name)
    if function is None or name.startswith("_"):
        raise NotImplementedError(f"nisa.{name} has no cost in the model")
    return function
