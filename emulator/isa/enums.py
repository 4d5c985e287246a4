"""Enumerations of ``nki.isa``."""

from __future__ import annotations

import enum


class engine(enum.IntEnum):
    """Engines, with the numbers of ``nki.isa.engine``."""

    unknown = 0
    tensor = 1
    scalar = 2
    gpsimd = 3
    dma = 4
    vector = 5
    sync = 6


class oob_mode(enum.Enum):
    """What a run-time index outside the tensor does: an error, or nothing (the element is skipped)."""

    error = "error"
    skip = "skip"


class dge_mode(enum.Enum):
    """Who builds DMA descriptors: nobody (static), GpSimd (the only one that gathers), the DGE hardware."""

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class reduce_cmd(enum.Enum):
    """What an instruction does with the engine's accumulation registers."""

    idle = "idle"
    reset = "reset"
    reduce = "reduce"
    reset_reduce = "reset_reduce"
    load_reduce = "load_reduce"


class dma_engine(enum.Enum):
    """Who moves the data of ``sendrecv``: the DMA engines, or those of GpSimd (low latency, small)."""

    dma = "dma"
    gpsimd_dma = "gpsimd_dma"


class matmul_perf_mode(enum.Enum):
    none = "none"
    double_row = "double_row"


class nc_version(enum.IntEnum):
    """Generation of a NeuronCore: trn1, trn2, trn3."""

    gen2 = 2
    gen3 = 3
    gen4 = 4
