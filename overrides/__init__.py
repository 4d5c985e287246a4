"""torchtitan overrides that put our kernels into torchtitan's models.

Activate all of them, or one by its factory, optionally with keywords:

    --override.imports trn_kernels.overrides
    --override.imports trn_kernels.overrides.nki_rope
    --override.imports 'trn_kernels.overrides.nki_rope={"kernel": "rope_hf"}'

The last two need torchtitan 0.3; the first also works on its builds of June and July 2026. In a Python
script, import this package before the trainer is built.
"""

from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.rope import CosSinRoPE

from trn_kernels.overrides.compat import register
from trn_kernels.overrides.grouped_experts import NKIGroupedExperts, nki_grouped_experts
from trn_kernels.overrides.rope import NKIRoPE, nki_rope

__all__ = ["OVERRIDES", "NKIGroupedExperts", "NKIRoPE", "nki_grouped_experts", "nki_rope"]

OVERRIDES = [(CosSinRoPE.Config, nki_rope), (GroupedExperts.Config, nki_grouped_experts)]
"""(config class, factory) of each override. No class may contain another one in torchtitan's config tree."""

register(OVERRIDES)
