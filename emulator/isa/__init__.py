"""``nki.isa``: instructions, one file per kind (each registers itself in ``emulator.table``), and enums."""

from ..machine import core as _core
from ..registers import VirtualRegister
from .between_cores import core_barrier, sendrecv
from .data_movement import dma_compute, dma_copy, dma_transpose
from .elementwise import (
    activation,
    activation_reduce,
    bn_aggr,
    bn_stats,
    memset,
    reciprocal,
    scalar_tensor_tensor,
    tensor_copy,
    tensor_partition_reduce,
    tensor_reduce,
    tensor_scalar,
    tensor_scalar_reduce,
    tensor_tensor,
    tensor_tensor_scan,
)
from .enums import dge_mode, dma_engine, engine, matmul_perf_mode, nc_version, oob_mode, reduce_cmd
from .gather import local_gather, nc_n_gather, nc_stream_shuffle
from .refused import *  # noqa: F403  each name raises
from .registers import register_alloc, register_load, register_move, register_store
from .selection import (
    affine_select,
    iota,
    max8,
    nc_find_index8,
    nc_match_replace8,
    nonzero_with_count,
    range_select,
    select_reduce,
    tensor_copy_predicated,
)
from .tensor_engine import nc_matmul, nc_transpose

tensor_engine, vector_engine, scalar_engine = engine.tensor, engine.vector, engine.scalar
gpsimd_engine, unknown_engine = engine.gpsimd, engine.unknown


def get_nc_version() -> nc_version:
    """Generation of the core that the kernel runs on."""
    return nc_version(_core().target.generation)


__all__ = [
    "VirtualRegister",
    "activation",
    "activation_reduce",
    "affine_select",
    "bn_aggr",
    "bn_stats",
    "core_barrier",
    "dge_mode",
    "dma_compute",
    "dma_copy",
    "dma_engine",
    "dma_transpose",
    "engine",
    "get_nc_version",
    "gpsimd_engine",
    "iota",
    "local_gather",
    "matmul_perf_mode",
    "max8",
    "memset",
    "nc_find_index8",
    "nc_match_replace8",
    "nc_matmul",
    "nc_n_gather",
    "nc_stream_shuffle",
    "nc_transpose",
    "nc_version",
    "nonzero_with_count",
    "oob_mode",
    "range_select",
    "reciprocal",
    "reduce_cmd",
    "register_alloc",
    "register_load",
    "register_move",
    "register_store",
    "scalar_engine",
    "scalar_tensor_tensor",
    "select_reduce",
    "sendrecv",
    "tensor_copy",
    "tensor_copy_predicated",
    "tensor_engine",
    "tensor_partition_reduce",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_scalar_reduce",
    "tensor_tensor",
    "tensor_tensor_scan",
    "unknown_engine",
    "vector_engine",
]
