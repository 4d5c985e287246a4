"""Config functions for the child processes of the training tests: debug recipes with their metrics written down.

torchtitan prints five digits of the loss; these runs are compared more closely.
"""

import json
import os
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import derive
from torchtitan.trainer import Trainer

from trn_kernels.recipes.assets import debug_assets
from trn_kernels.recipes.qwen3 import native_qwen3_debug, nki_qwen3_moe_debug, qwen3_nki_moe_config


class RecordedMetrics(MetricsProcessor):
    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def log(self, step, global_avg_loss, global_max_loss, grad_norm, extra_metrics=None):
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
        record = [global_avg_loss, global_max_loss, grad_norm, *self.more()]
        if os.environ["RANK"] == "0":
            with open(os.environ["RECORD"], "a") as file:
                file.write(json.dumps(record) + "\n")

    def more(self) -> list:
        return []


class RecordedGradients(RecordedMetrics):
    """Also writes the norm of each parameter's whole gradient. Every rank gets here, so they may communicate."""

    @dataclass(kw_only=True, slots=True)
    class Config(RecordedMetrics.Config):
        pass

    def more(self) -> list:
        norms = {}
        for name, parameter in self.model_parts[0].named_parameters():
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                gradient = gradient.full_tensor()
            norms[name] = gradient.double().norm().item()
        return [norms]


class OneBatch(BaseDataLoader):
    """The same global batch in every layout: each data-parallel rank takes its rows."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, dp_rank, seq_len, local_batch_size, **others):
        random = torch.Generator().manual_seed(7)
        rows = torch.randint(0, 2048, (GLOBAL_BATCH, seq_len + 1), generator=random)
        self.rows = rows[dp_rank * local_batch_size :][:local_batch_size]

    def __iter__(self):
        length = self.rows.shape[1] - 1
        positions = (torch.arange(length) % (length // 2)).expand(len(self.rows), -1)  # two documents
        while True:
            yield {"input": self.rows[:, :-1], "positions": positions}, self.rows[:, 1:]

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass


GLOBAL_BATCH = 4


def debug() -> Trainer.Config:
    return _recorded(native_qwen3_debug(), RecordedMetrics)


def moe_debug() -> Trainer.Config:
    return _recorded(nki_qwen3_moe_debug(), RecordedMetrics)


def moe_one_step(num_experts: int = 8, top_k: int = 2) -> Trainer.Config:
    """One step in float32 of a small model that leaves the weights as they are and does not clip gradients."""
    config = qwen3_nki_moe_config("debugmodel_moe", n_layers=2, num_experts=num_experts, top_k=top_k)
    for layer in config.model_spec.model.layers:
        layer.moe.routed_experts.inner_experts.hidden_dim = 64
    config.hf_assets_path = str(debug_assets())
    config.dataloader = OneBatch.Config()
    config.metrics.log_freq = 1
    config.optimizer = default_adamw(lr=0.0)
    config.activation_checkpoint = None
    config.training.steps = 1
    config.training.seq_len = 64
    config.training.local_batch_size = 2
    config.training.max_norm = 1e9
    config.training.mixed_precision_param = "float32"
    config.training.disable_cuda_graphs = True  # expert parallelism asks for it
    return _recorded(config, RecordedGradients)


def moe_one_expert() -> Trainer.Config:
    return moe_one_step(num_experts=1, top_k=1)


def _recorded(config: Trainer.Config, metrics: type[RecordedMetrics]) -> Trainer.Config:
    config.metrics = derive(config.metrics, metrics.Config)
    return config
