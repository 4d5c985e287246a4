"""Hardware limits per target. The numbers are AWS's documentation of the NeuronCore generations.

Sources: NKI guides ``trainium2_arch``, ``nki-aps``, ``tiling-overview``, ``nki.language.tile_size``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from .errors import NKIError


@dataclass(frozen=True)
class Target:
    """Limits of one physical NeuronCore. Sizes in bytes are per partition."""

    name: str
    generation: int
    sbuf_bytes: int
    """SBUF of one partition, physical."""
    sbuf_reserved_bytes: int
    """Not usable by a kernel. No document prints it. On trn2 one kernel of nki-library leaves 16,912 free, another one
    16,648 and places tensors up to there, so that they must be usable."""
    partitions: int = 128
    psum_banks: int = 8
    psum_bank_bytes: int = 2048
    matmul_contraction: int = 128
    matmul_stationary: int = 128
    matmul_moving: int = 512
    """Elements of the moving free dimension, one PSUM bank of fp32."""
    vector_transpose: int = 32
    bn_stats: int = 512
    """Most elements per partition of one ``bn_stats``."""
    sbuf_elements: int = 65536
    """Most elements per partition that one instruction covers in SBUF."""
    psum_elements: int = 4096
    free_dims: int = 4
    """Most free dimensions of one access pattern."""
    max_stride: int = 32767
    """Largest step of a free dimension, in elements (int16)."""
    psum_alignment: int = 4
    """Bytes: where in a partition of PSUM the Tensor engine may start to write."""

    @property
    def sbuf_usable_bytes(self) -> int:
        return self.sbuf_bytes - self.sbuf_reserved_bytes

    @property
    def psum_bytes(self) -> int:
        return self.psum_banks * self.psum_bank_bytes


TRN2 = Target(name="trn2", generation=3, sbuf_bytes=224 * 1024, sbuf_reserved_bytes=16384 + 8 + 256)

_TARGETS = {"trn2": TRN2, "gen3": TRN2}


def target() -> Target:
    """The target named by ``NEURON_PLATFORM_TARGET_OVERRIDE`` (default trn2)."""
    name = os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE") or "trn2"
    if name not in _TARGETS:
        raise NKIError(
            "target",
            f"NEURON_PLATFORM_TARGET_OVERRIDE={name!r} is not a target of the emulator: {', '.join(_TARGETS)}",
        )
    return _TARGETS[name]
