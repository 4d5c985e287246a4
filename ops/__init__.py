"""PyTorch operators of the kernels, usable from any model: ``from trn_kernels.ops import rope``."""

from trn_kernels.ops.grouped_experts import grouped_experts
from trn_kernels.ops.rope import rope, rope_hf

__all__ = ["grouped_experts", "rope", "rope_hf"]
