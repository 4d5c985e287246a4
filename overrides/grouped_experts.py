"""Experts of torchtitan's mixtures of experts (Qwen3-MoE, DeepSeek, ...) through our NKI kernels.

Scope: `GroupedExperts` itself, not its subclasses (gpt-oss, quantised experts). Parameters, their names and their
layouts are the stock module's, so checkpoints are those of the stock model in both directions.

    --override.imports trn_kernels.overrides.nki_grouped_experts
"""

from dataclasses import dataclass

import spmd_types as spmd
import torch
from spmd_types.runtime import get_local_type
from torch.distributed.tensor import DTensor
from torchtitan.config import derive
from torchtitan.models.common.moe import GroupedExperts

from trn_kernels import ops


class NKIGroupedExperts(GroupedExperts):
    """`GroupedExperts` computed by `trn_kernels.ops.grouped_experts`.

    The stock module multiplies in bfloat16 whatever it is given; this one multiplies in the dtype of its input, or
    in autocast's where that is on, and accumulates in float32.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Run each expert on its rows.

        Args:
            x_RD: `[R, D]`, rows sorted by expert; R may differ from step to step, and be 0.
            num_tokens_per_expert_E: `[E]` integers, rows of each local expert.

        Returns:
            `[R, D]` in the dtype of x_RD. Under tensor parallelism of the experts, this rank's part of the sum.
        """
        device = x_RD.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_RD.dtype
        # The expert region works on local tensors, and so do the gradients of its weights.
        weights = (_local(w).to(dtype) for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        counts = _varying(num_tokens_per_expert_E)
        return ops.grouped_experts(x_RD.to(dtype), *weights, counts).to(x_RD.dtype)

    def parallelize(self, parallel_dims) -> None:
        """As torchtitan's, which would fail in the first step where degree and experts do not fit."""
        if self.num_experts % parallel_dims.ep:
            raise ValueError(
                f"parallelism.expert_parallel_degree is {parallel_dims.ep}; it must divide the model's "
                f"{self.num_experts} experts"
            )
        super().parallelize(parallel_dims)

    # Until 16 July 2026 `forward` also dispatched the tokens, and called this for the experts.
    if hasattr(GroupedExperts, "_experts_forward"):
        _experts_forward = forward
        del forward


def nki_grouped_experts(cfg: GroupedExperts.Config) -> NKIGroupedExperts.Config:
    """Mixture-of-experts layers by NKI kernels, forward and backward."""
    return derive(cfg, NKIGroupedExperts.Config)


def _local(weight: torch.Tensor) -> torch.Tensor:
    # Sharded on experts (EP) or on the hidden dimension (TP), a weight gets its whole gradient from this rank's rows:
    # each rank of the axis has other weights. So gradients are laid out as the weights are.
    return weight.to_local(grad_placements=weight.placements) if isinstance(weight, DTensor) else weight


def _varying(counts: torch.Tensor) -> torch.Tensor:
    """The counts as torchtitan's SPMD type checker wants them, where it is on.

    To it they are parts of a sum over the ranks, which no other operand may be mixed with. Here each rank's counts
    only say where its own rows are.
    """
    if not spmd.is_type_checking():
        return counts
    counts = counts.clone()
    for axis, kind in list(get_local_type(counts).items()):
        if kind is spmd.P:
            spmd.mutate_type(counts, axis, src=spmd.P, dst=spmd.V)
    return counts
