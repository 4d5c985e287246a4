"""torchtitan overrides that put our kernels into torchtitan's models.

Activate all of them, or one by its factory, optionally with keywords:

    --override.imports trn_kernels.overrides
    --override.imports trn_kernels.overrides.nki_rope
    --override.imports 'trn_kernels.overrides.nki_rope={"kernel": "rope_hf"}'

`nki_selective_ac`, for activation checkpointing, is not part of all; it has to be named. Single factories need
torchtitan 0.3; the first form also works on its builds of June and July 2026. In a Python script, import torchtitan
and then this package before the trainer is built.

`trn_kernels.overrides.transformers` is for Transformers' own models, and needs no torchtitan.
"""

import sys

__all__ = [
    "OPT_IN",
    "OVERRIDES",
    "NKIGroupedExperts",
    "NKIRoPE",
    "NKISelectiveAC",
    "nki_grouped_experts",
    "nki_rope",
    "nki_selective_ac",
]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trn_kernels.overrides import registry

    return getattr(registry, name)


# Without torchtitan's models in the process there is nothing to replace, and they are not imported for it.
if "torchtitan.config.override" in sys.modules and "torchtitan.models.common" in sys.modules:
    from trn_kernels.overrides import registry  # noqa: F401
