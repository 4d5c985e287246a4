"""Config functions of the trainings whose memory is planned and measured, without data or a tokenizer."""

from dataclasses import dataclass

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.trainer import Trainer

from trn_kernels.recipes.qwen3 import native_qwen3_debug, qwen3_nki_moe_config


class Tokens(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, seq_len, local_batch_size, **kwargs):
        self.tokens = torch.zeros(local_batch_size, seq_len, dtype=torch.int64)

    def __iter__(self):
        while True:
            positions = torch.arange(self.tokens.shape[1]).expand_as(self.tokens)
            yield {"input": self.tokens.clone(), "positions": positions}, self.tokens

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass


def dense() -> Trainer.Config:
    return _measured(native_qwen3_debug(), "float32")


def dense_selective() -> Trainer.Config:
    config = _measured(native_qwen3_debug(), "bfloat16")
    config.activation_checkpoint = SelectiveAC.Config()
    return config


def moe() -> Trainer.Config:
    config = qwen3_nki_moe_config("debugmodel_moe", n_layers=4, num_experts=16, top_k=2)
    config.hf_assets_path = native_qwen3_debug().hf_assets_path
    config.activation_checkpoint = None
    return _measured(config, "float32")


def _measured(config: Trainer.Config, dtype: str) -> Trainer.Config:
    config.dataloader = Tokens.Config()
    config.training.mixed_precision_param = dtype
    config.training.local_batch_size, config.training.seq_len = 2, 256
    config.metrics.log_freq = 1000
    return config
