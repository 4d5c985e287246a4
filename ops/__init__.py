"""PyTorch operators of the kernels, usable from any model: ``from trn_kernels.ops import rope``."""

from trn_kernels.ops.rope import rope, rope_hf

__all__ = ["rope", "rope_hf"]
