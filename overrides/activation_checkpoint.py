"""Selective activation checkpointing that keeps the outputs of our operators.

torchtitan's policy keeps the outputs of a list of operators and computes all others again in the backward; ours are
not on it. This adds them, where they are asked for:

    --override.imports trn_kernels.overrides trn_kernels.overrides.nki_selective_ac activation-checkpoint:selective
    --override.imports trn_kernels.overrides 'trn_kernels.overrides.nki_selective_ac={"save": ["grouped_experts"]}'

Overrides are separated by spaces: torchtitan splits by commas only where no keywords follow.
"""

from dataclasses import dataclass

import torch
from torchtitan.config import derive
from torchtitan.distributed.activation_checkpoint import SelectiveAC

SAVED = ("rope", "rope_hf", "grouped_experts")


class NKISelectiveAC(SelectiveAC):
    """`SelectiveAC` that also keeps what our operators return, so that no kernel runs twice.

    Kept per layer: of `rope` the rotated query and key, of `grouped_experts` the output, its two hidden tensors
    `[rows, F]` and the routing tables.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        save: tuple[str, ...] = SAVED
        """Names of the operators, in the namespace `trn_kernels`."""

        def __post_init__(self):
            if isinstance(self.save, str):  # its letters would be taken for names
                raise ValueError(f"save is {self.save!r}, must be a list of some of {list(SAVED)}")
            unknown = [name for name in self.save if name not in SAVED]
            if unknown:
                raise ValueError(f"save has {unknown}, must be some of {list(SAVED)}")

    def get_save_ops(self) -> set:
        return super().get_save_ops() | {getattr(torch.ops.trn_kernels, name).default for name in self.config.save}


def nki_selective_ac(cfg: SelectiveAC.Config, *, save: tuple[str, ...] = SAVED) -> NKISelectiveAC.Config:
    """Selective activation checkpointing keeps the outputs of NKI kernels (save: names of operators)."""
    return derive(cfg, NKISelectiveAC.Config, save=save if isinstance(save, str) else tuple(save))
