"""The debug recipes with nothing left to chance, for golden losses: a refactor that changes a loss is seen.

    torchrun --nproc_per_node=1 -m trn_kernels.recipes.train --module trn_kernels.recipes.golden \\
        --config native_qwen3_debug --override.imports trn_kernels.overrides.nki_rope 2>&1 | tee run.log
    python -m trn_kernels.recipes.verify losses run.log tests/recipes/golden/native_qwen3_debug.json

Fixed tokens instead of text (the debug text is another one in each version of Python), float32, a fixed seed, 5 steps.
The golden files hold for one process on a CPU: with more processes, and on a device, weights start from other numbers.
After a change that is meant to change losses, `verify losses run.log --write FILE` makes a new file.
"""

from dataclasses import dataclass

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.trainer import Trainer

from trn_kernels.recipes import qwen3


class FixedTokens(BaseDataLoader):
    """Batches of a sequence that a model can learn, another one for every sample; two documents in each."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        vocab_size: int = 2048

    def __init__(
        self, config: Config, *, dp_rank: int, dp_world_size: int, seq_len: int, local_batch_size: int, **kwargs
    ):
        self.config, self.length, self.samples = config, seq_len, local_batch_size
        self.next, self.rank, self.ranks = 0, dp_rank, dp_world_size

    def __iter__(self):
        place = torch.arange(self.length + 1)
        positions = (place[:-1] % (self.length // 2)).expand(self.samples, -1)
        while True:
            first = (self.next * self.ranks + self.rank) * self.samples
            sample = first + torch.arange(self.samples)[:, None]
            tokens = (7 * place * place + 31 * sample * place + 97 * sample) % 211 % self.config.vocab_size
            self.next += 1
            yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:]

    def state_dict(self) -> dict:
        return {"next": self.next}

    def load_state_dict(self, state_dict: dict) -> None:
        self.next = state_dict["next"]


def native_qwen3_debug() -> Trainer.Config:
    """`qwen3.native_qwen3_debug`, reproducible."""
    return _reproducible(qwen3.native_qwen3_debug())


def nki_qwen3_moe_debug() -> Trainer.Config:
    """`qwen3.nki_qwen3_moe_debug`, reproducible."""
    return _reproducible(qwen3.nki_qwen3_moe_debug())


def v5_qwen3_debug() -> Trainer.Config:
    """`qwen3.v5_qwen3_debug`, reproducible."""
    return _reproducible(qwen3.v5_qwen3_debug())


def _reproducible(config: Trainer.Config) -> Trainer.Config:
    config.dataloader = FixedTokens.Config()
    config.debug.seed = 42
    config.debug.deterministic = True
    config.metrics.log_freq = 1
    config.training.mixed_precision_param = "float32"
    config.training.steps, config.training.seq_len = 5, 128
    return config
