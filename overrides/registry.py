"""The overrides of torchtitan's modules. Importing this registers them; `trn_kernels.overrides` does when asked."""

from torchtitan.distributed import activation_checkpoint
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.rope import CosSinRoPE

from trn_kernels.overrides.compat import register
from trn_kernels.overrides.grouped_experts import NKIGroupedExperts, nki_grouped_experts
from trn_kernels.overrides.rope import NKIRoPE, nki_rope

__all__ = ["OPT_IN", "OVERRIDES", "NKIGroupedExperts", "NKIRoPE", "nki_grouped_experts", "nki_rope"]

OVERRIDES = [(CosSinRoPE.Config, nki_rope), (GroupedExperts.Config, nki_grouped_experts)]
"""(config class, factory) of each override. No class may contain another one in torchtitan's config tree."""

OPT_IN = []
"""More of them, which `trn_kernels.overrides` does not include."""

if hasattr(activation_checkpoint, "SelectiveAC"):  # not in torchtitan's first builds with overrides
    from trn_kernels.overrides.activation_checkpoint import NKISelectiveAC, nki_selective_ac

    __all__ += ["NKISelectiveAC", "nki_selective_ac"]
    OPT_IN.append((activation_checkpoint.SelectiveAC.Config, nki_selective_ac))

register(OVERRIDES, OPT_IN)
