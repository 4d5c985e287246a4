"""What orders the two cores of an LNC=2 launch: ``core_barrier`` and ``sendrecv``."""

from __future__ import annotations

from .. import dtypes
from ..cores import Meeting
from ..errors import NKIError
from ..machine import core
from ..table import instruction
from ..tensor import MemoryRegion, integer
from . import operands
from .enums import dma_engine as DmaEngine
from .enums import engine as Engine
from .operands import SBUF


def _check_core_barrier(data, cores, engine=Engine.gpsimd, name=None):
    operands.tensor(data, "data")
    if not isinstance(engine, Engine):
        raise NKIError("engine", f"engine is a nisa.engine, not {engine!r}")
    named = (cores,) if isinstance(cores, int) and not isinstance(cores, bool) else cores
    running = core().cores
    if not isinstance(named, (tuple, list)) or tuple(named) != tuple(range(running)):
        raise NKIError("barrier-cores", f"cores {cores!r}: this launch has the cores {tuple(range(running))}")
    if data.buffer is not MemoryRegion.shared_hbm and not (running == 1 or data.buffer is SBUF):
        # nki-library also names a tile in SBUF, to wait for what the core did to it.
        raise NKIError("buffer", f"data is in {data.buffer.value}; the cores meet over a tensor in shared HBM")


@instruction(_check_core_barrier)
def core_barrier(data, cores, engine=Engine.gpsimd, name=None):
    """Both cores wait here for each other. On one core nothing happens.

    Here it orders everything before it; on the device only what depends on ``data``.
    """
    if core().cores == 2:
        core().meet(Meeting("core_barrier"))


# Most bytes per partition of GpSimd's own DMA, by the bytes of an element.
_GPSIMD_BYTES = {4: 1024, 2: 512, 1: 256}


def _check_sendrecv(src, dst, send_to_rank, recv_from_rank, pipe_id, dma_engine=DmaEngine.dma, name=None):
    operands.written_once(operands.dma_tile(dst, "dst"))
    operands.dma_tile(src, "src")
    if core().cores != 2:
        raise NKIError("lnc", "sendrecv needs the two cores of an LNC=2 launch")
    for rank, what in ((send_to_rank, "send_to_rank"), (recv_from_rank, "recv_from_rank")):
        if integer(rank, what) != 1 - core().index:
            raise NKIError(
                "sendrecv-rank", f"{what} {rank} on core {core().index}: the other core is {1 - core().index}"
            )
    integer(pipe_id, "pipe_id")
    if src.dtype != dst.dtype:
        raise NKIError("dtype", f"sendrecv keeps the dtype: src is {src.dtype}, dst {dst.dtype}")
    operands.same_shape(dst, src=src)
    if src.shape != dst.shape:
        raise NKIError("elements-differ", f"src is {src.shape}, dst {dst.shape}: sendrecv keeps the shape")
    if not isinstance(dma_engine, DmaEngine):
        raise NKIError("engine", f"dma_engine is a nisa.dma_engine, not {dma_engine!r}")
    if dma_engine is DmaEngine.gpsimd_dma:
        size = dtypes.itemsize(src.dtype)
        if src.shape[0] % 16 or src.free_size * size > _GPSIMD_BYTES[size]:
            raise NKIError(
                "sendrecv-size",
                f"gpsimd_dma moves a multiple of 16 partitions and {_GPSIMD_BYTES[size]} bytes per partition of "
                f"{src.dtype}, src is {src.shape}",
            )


@instruction(_check_sendrecv)
def sendrecv(src, dst, send_to_rank, recv_from_rank, pipe_id, dma_engine=DmaEngine.dma, name=None):
    """The cores exchange tiles: each one's src goes to the other one's dst. Both wait for each other.

    src, dst in SBUF, of one shape and dtype, the same on both cores.
    """
    # The tiles of both cores have one size, so a core may send rows that it did not write and the other ignores.
    sent = (src.array().copy(), src.unwritten())
    values, unwritten = core().meet(Meeting(f"sendrecv over pipe {pipe_id} of {src.shape} {src.dtype}", sent)).sent
    operands.write(dst, values)
    dst.forget(unwritten)
