"""``nki.isa``: instructions, one file per kind (each registers itself in ``emulator.table``), and enums."""

from ..machine import core as _core
from ..registers import VirtualRegister
from .data_movement import dma_copy
from .elementwise import (
    activation,
    iota,
    memset,
    scalar_tensor_tensor,
    tensor_copy,
    tensor_reduce,
    tensor_scalar,
    tensor_tensor,
)
from .enums import dge_mode, engine, matmul_perf_mode, nc_version, oob_mode, reduce_cmd
from .registers import register_alloc, register_load, register_move, register_store
from .tensor_engine import nc_matmul, nc_transpose

tensor_engine, vector_engine, scalar_engine = engine.tensor, engine.vector, engine.scalar
gpsimd_engine, unknown_engine = engine.gpsimd, engine.unknown


def get_nc_version() -> nc_version:
    """Generation of the core that the kernel runs on."""
    return nc_version(_core().target.generation)


__all__ = [
    "VirtualRegister",
    "activation",
    "dge_mode",
    "dma_copy",
    "engine",
    "get_nc_version",
    "gpsimd_engine",
    "iota",
    "matmul_perf_mode",
    "memset",
    "nc_matmul",
    "nc_transpose",
    "nc_version",
    "oob_mode",
    "reduce_cmd",
    "register_alloc",
    "register_load",
    "register_move",
    "register_store",
    "scalar_engine",
    "scalar_tensor_tensor",
    "tensor_copy",
    "tensor_engine",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_tensor",
    "unknown_engine",
    "vector_engine",
]
