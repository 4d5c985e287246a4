"""Config functions for the child processes of the training tests: debug recipes with their metrics written down.

torchtitan prints five digits of the loss; these runs are compared more closely.
"""

import hashlib
import json
import os
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import derive
from torchtitan.trainer import Trainer

from trn_kernels.ops.neuron import launches
from trn_kernels.recipes.assets import debug_assets
from trn_kernels.recipes.checkpoints import HFCheckpointManager
from trn_kernels.recipes.qwen3 import (
    native_qwen3_debug,
    nki_qwen3_30b_a3b,
    nki_qwen3_moe_debug,
    qwen3_nki_moe_config,
    v5_qwen3_debug,
)


def record(value) -> None:
    with open(os.environ["RECORD"], "a") as file:
        file.write(json.dumps(value) + "\n")


class RecordedMetrics(MetricsProcessor):
    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def log(self, step, global_avg_loss, global_max_loss, grad_norm, extra_metrics=None):
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
        record([global_avg_loss, global_max_loss, grad_norm, *self.more()])

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


class RecordedState(RecordedMetrics):
    """Records all that the tests of parallelism compare.

    Hashes are of whole tensors. Gradients are those that the optimizer got, that is after clipping.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RecordedMetrics.Config):
        pass

    def log(self, step, global_avg_loss, global_max_loss, grad_norm, extra_metrics=None):
        MetricsProcessor.log(self, step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
        gradients = {
            canonical_fqn(name): parameter.grad
            for part in self.model_parts
            for name, parameter in part.named_parameters()
        }
        record(
            {
                "step": step,
                "loss": global_avg_loss,
                "norm": grad_norm,
                "gradients": {name: [float(whole(g).double().norm()), hashed(g)] for name, g in gradients.items()},
                "weights": {name: hashed(t) for part in self.model_parts for name, t in part.state_dict().items()},
                "optimizer": {name: hashed(t) for name, t in self.optimizers.state_dict().items()},
                "launches": {" on ".join(key): count for key, count in launches().items()},
            }
        )


class RecordedCheckpoints(HFCheckpointManager):
    """Also writes the hashes of what it has loaded."""

    @dataclass(kw_only=True, slots=True)
    class Config(HFCheckpointManager.Config):
        pass

    def load(self, step=-1):
        loaded = super().load(step)
        kinds = ("model", "optimizer") if loaded else ()
        states = {kind: self.states[kind].state_dict().items() for kind in kinds}
        record({"loaded": {kind: {name: hashed(t) for name, t in state} for kind, state in states.items()}})
        return loaded


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def hashed(tensor) -> str:
    """Of the values of the whole tensor. Every rank must get here."""
    if not isinstance(tensor, torch.Tensor):
        return repr(tensor)
    values = whole(tensor).detach().clone().contiguous()  # a copy: NumPy would lock the storage, which FSDP resizes
    return hashlib.sha1(values.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:12]


class RecordedShapes(HFCheckpointManager):
    """Writes the shape of this rank's part of each weight, and loads nothing."""

    @dataclass(kw_only=True, slots=True)
    class Config(HFCheckpointManager.Config):
        pass

    def load(self, step=-1):
        weights = self.states["model"].state_dict()
        parts = {name: w.to_local() if isinstance(w, DTensor) else w for name, w in weights.items()}
        record({"local": {name: part.shape for name, part in parts.items()}})


class Batches(OneBatch):
    """The global batch in local batches, which start again after each step; its rows have 0, 3, 61 and all labels."""

    @dataclass(kw_only=True, slots=True)
    class Config(OneBatch.Config):
        valid: tuple[int, ...] = (0, 3, 61, 64)

    def __init__(self, config, *, dp_rank, dp_world_size, seq_len, local_batch_size, **others):
        share = GLOBAL_BATCH // dp_world_size
        super().__init__(config, dp_rank=dp_rank, seq_len=seq_len, local_batch_size=share)
        self.valid = torch.tensor(config.valid)[dp_rank * share :][:share]
        self.size = local_batch_size

    def __iter__(self):
        for inputs, labels in super().__iter__():
            unused = torch.arange(labels.shape[1]) >= self.valid[:, None]
            labels = labels.masked_fill(unused, IGNORE_INDEX)
            for start in range(0, len(labels), self.size):
                some = slice(start, start + self.size)
                yield {name: values[some] for name, values in inputs.items()}, labels[some]


def dense() -> Trainer.Config:
    """One step of a small model in float32 that leaves the weights as they are and does not clip gradients."""
    return _one_step(native_qwen3_debug())


def untied() -> Trainer.Config:
    """The same with an output layer of its own, as a pipeline needs it."""
    config = dense()
    model = config.model_spec.model
    model.enable_weight_tying = False
    model.tok_embeddings.param_init = model.lm_head.param_init
    return config


def moe() -> Trainer.Config:
    """The same with a mixture of experts and all overrides."""
    return _one_step(nki_qwen3_moe_debug())


def few() -> Trainer.Config:
    """The same with two experts, so that there may be more ranks."""
    config = qwen3_nki_moe_config("debugmodel_moe", n_layers=2, num_experts=2, top_k=2)
    config.hf_assets_path = str(debug_assets())
    config.metrics.log_freq = 1
    config.activation_checkpoint = None
    return _one_step(config)


def moe_stock() -> Trainer.Config:
    """The same without overrides: torchtitan's experts, which multiply in bfloat16."""
    config = moe()
    config.override.imports = []
    return config


def dense_learning() -> Trainer.Config:
    config = dense()
    config.optimizer = default_adamw(lr=1e-3)
    return config


def moe_learning() -> Trainer.Config:
    config = moe()
    config.optimizer = default_adamw(lr=1e-3)
    return config


def transformers() -> Trainer.Config:
    """One step of Transformers' model, from random weights."""
    return _small_step(v5_qwen3_debug())


def large_moe() -> Trainer.Config:
    """The large recipe with short sequences and no step; the shapes of this rank's weights are recorded."""
    config = nki_qwen3_30b_a3b()
    config.hf_assets_path = str(debug_assets())
    config.dataloader = Batches.Config()
    config.training.steps = 0
    config.training.seq_len = 64
    config.training.local_batch_size = 2
    config.checkpoint = derive(config.checkpoint, RecordedShapes.Config, enable=True)
    return config


def _one_step(config: Trainer.Config) -> Trainer.Config:
    model = config.model_spec.model
    model.layers = model.layers[:2]
    for layer in model.layers:
        if layer.moe is not None:
            layer.moe.routed_experts.inner_experts.hidden_dim = 64
        else:
            mlp = layer.feed_forward
            mlp.w1.out_features = mlp.w3.out_features = mlp.w2.in_features = 64
    return _small_step(config)


def _small_step(config: Trainer.Config) -> Trainer.Config:
    config.dataloader = Batches.Config()
    config.optimizer = default_adamw(lr=0.0)
    config.training.steps = 1
    config.training.seq_len = 64
    config.training.max_norm = 1e9
    config.training.mixed_precision_param = "float32"
    config.checkpoint = derive(config.checkpoint, RecordedCheckpoints.Config)
    return _recorded(config, RecordedState)
