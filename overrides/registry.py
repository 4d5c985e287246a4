"""The overrides of torchtitan's modules. Importing this registers them; `trn_kernels.overrides` does when asked."""

from torchtitan.config import Configurable
from torchtitan.distributed import activation_checkpoint
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.rope import CosSinRoPE

from trn_kernels.overrides.compat import register
from trn_kernels.overrides.grouped_experts import NKIGroupedExperts, nki_grouped_experts
from trn_kernels.overrides.rope import NKIRoPE, nki_rope

__all__ = [
    "OPT_IN",
    "OVERRIDES",
    "NKIGroupedExperts",
    "NKIRoPE",
    "check_named",
    "nki_grouped_experts",
    "nki_rope",
]

OVERRIDES = [(CosSinRoPE.Config, nki_rope), (GroupedExperts.Config, nki_grouped_experts)]
"""(config class, factory) of each override. No class may contain another one in torchtitan's config tree."""

OPT_IN = []
"""More of them, which `trn_kernels.overrides` does not include."""

if hasattr(activation_checkpoint, "SelectiveAC"):  # not in torchtitan's first builds with overrides
    from trn_kernels.overrides.activation_checkpoint import NKISelectiveAC, nki_selective_ac

    __all__ += ["NKISelectiveAC", "nki_selective_ac"]
    OPT_IN.append((activation_checkpoint.SelectiveAC.Config, nki_selective_ac))

register(OVERRIDES, OPT_IN)


def check_named(imports: list, config: Configurable.Config) -> None:
    """Check that each of our overrides that is named alone has something to replace.

    torchtitan warns only where no override of the whole list does.

    Args:
        imports: of a parsed `override.imports`.
        config: the `Trainer.Config`, before overrides are applied to it.

    Raises:
        ValueError: names the override and the type of config that is not there.
    """
    targets = {f"{factory.__module__}.{factory.__name__}": target for target, factory in (*OVERRIDES, *OPT_IN)}
    for entry in imports:
        name = entry if isinstance(entry, str) else entry[0]
        target = targets.get(name)
        if target is not None and not any(type(found[1]) is target for found in config.traverse(target)):
            raise ValueError(
                f"override.imports names {name}, which replaces {target.__qualname__}; the config has none"
            )
