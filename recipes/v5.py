"""Transformers' own Qwen3 in torchtitan's trainer: the model of torchtitan's transformers_modeling_backend.

torchtitan 0.3 builds that model on the meta device, where Transformers 5 leaves the frequencies of RoPE uninitialised;
its attention is FlexAttention, which no CPU and no Neuron device trains through; and its config tree has no node for
our kernels. `TransformersQwen3` is the same model without these three.

Attention is scaled_dot_product_attention, which knows no document borders: packed documents attend to the ones before
them in their sequence, although RoPE restarts at 0 for each. As in the native recipes.
"""

from dataclasses import dataclass, field
from types import MethodType

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.config import derive
from torchtitan.experiments.transformers_modeling_backend import TitanModelConfig, model_registry
from torchtitan.experiments.transformers_modeling_backend import parallelize as titan
from torchtitan.experiments.transformers_modeling_backend.config_registry import transformers_modeling_backend_full
from torchtitan.experiments.transformers_modeling_backend.configs import TransformersBackendConfig
from torchtitan.experiments.transformers_modeling_backend.model import HFTransformerModel
from torchtitan.tools.logging import logger
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from trn_kernels.overrides.transformers import use_nki_kernels
from trn_kernels.recipes.checkpoints import HFCheckpointManager, loaded_from, read_config
from trn_kernels.recipes.parallelism import shards_typed_parameters

# A name that Transformers has no mask for: the attention function gets none, and is causal by itself.
_ATTENTION = "trn_kernels_sdpa"
_SINGLE = ("tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree")


class TransformersQwen3(HFTransformerModel):
    """torchtitan's wrapper of a Transformers model, with RoPE, with SDPA, and with our kernels in it."""

    @dataclass(kw_only=True, slots=True)
    class Config(HFTransformerModel.Config):
        nki_kernels: bool = field(init=False, default=True)
        """As in `V5Config`, which sets it."""

        def __init__(self, model_config: TitanModelConfig):
            HFTransformerModel.Config.__init__(self, model_config)
            self.nki_kernels = True

        def _configure_hf_attention(self) -> None:
            AttentionInterface.register(_ATTENTION, _causal_sdpa)
            self._titan_injected_model_args["attn_implementation"] = _ATTENTION
            self.attn_implementation = self._attn_implementation = _ATTENTION

        def update_from_config(self, *, config=None, **kwargs):
            for axis in _SINGLE:
                if getattr(config.parallelism, axis) != 1:
                    raise ValueError(
                        f"parallelism.{axis} is {getattr(config.parallelism, axis)}; the Transformers path takes 1: "
                        "it shards over data only"
                    )
            HFTransformerModel.Config.update_from_config(self, config=config, **kwargs)
            self.nki_kernels = config.nki_kernels
            folder = loaded_from(config)
            if folder is not None:
                match_model_config(self, folder, config.training.seq_len)
            logger.info(f"[Recipe] {self.num_hidden_layers} layers, from {config.hf_model}")
            return self

    def __init__(self, config: Config):
        # torchtitan replaces these for every model of the process; loaded by Transformers, others would lose RoPE.
        originals = {name: vars(PreTrainedModel)[name] for name in ("_init_weights", "_initialize_weights")}
        super().__init__(config)
        for name, original in originals.items():
            setattr(self.model, name, MethodType(vars(PreTrainedModel)[name], self.model))
            setattr(PreTrainedModel, name, original)
        if config.nki_kernels:
            # Before torchtitan wraps the forwards of these modules.
            for name, operator in use_nki_kernels(self.model).modules.items():
                logger.info(f"[Override] trn_kernels.overrides.transformers: {name} Transformers -> {operator}")

    def get_attention_masks(self, positions: torch.Tensor) -> None:
        """None: attention is causal."""
        return None

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        super().init_states(buffer_device=buffer_device)
        wrong = restore_rope(self.model)
        if wrong:
            logger.info(f"[RoPE] frequencies were not initialised by torchtitan, set now: {', '.join(wrong)}")


def parallelize(model: nn.Module, *, parallel_dims, **kwargs) -> nn.Module:
    """torchtitan's parallelisation, by FSDP over plain parameters where torch cannot annotate them (before 2.14)."""
    resolve = getattr(titan, "resolve_fsdp_mesh", None)  # builds without it shard over such a mesh anyway

    def mesh_of_data_only(dims):
        axes = ["dp_replicate", "dp_shard"] if dims.dp_replicate_enabled else ["dp_shard"]
        return dims.get_mesh(axes), None

    if resolve is not None and parallel_dims.world_size > 1 and not shards_typed_parameters():
        titan.resolve_fsdp_mesh = mesh_of_data_only
    try:
        return titan.parallelize_hf_transformers(model, parallel_dims=parallel_dims, **kwargs)
    finally:
        if resolve is not None:
            titan.resolve_fsdp_mesh = resolve


def _causal_sdpa(module: nn.Module, query, key, value, attention_mask, **kwargs):
    """Transformers' scaled_dot_product_attention, causal whatever mask there is."""
    return sdpa_attention_forward(module, query, key, value, None, **kwargs | {"is_causal": True})


def restore_rope(model: nn.Module) -> list[str]:
    """Set the frequencies of every RoPE of a Transformers model that differ from those of its config.

    Building on the meta device loses them: they are computed when a module is made and are in no checkpoint. Where
    torchtitan or Transformers restores them itself, nothing is done.

    Returns:
        Names of the buffers that were wrong.
    """
    wrong = []
    for name, module in model.named_modules():
        if not hasattr(module, "original_inv_freq"):
            continue
        compute = getattr(module, "compute_default_rope_parameters", None)
        if module.rope_type != "default":
            compute = ROPE_INIT_FUNCTIONS[module.rope_type]
        expected, module.attention_scaling = compute(module.config)
        for buffer in ("inv_freq", "original_inv_freq"):
            value = getattr(module, buffer)
            value = value.to_local() if isinstance(value, DTensor) else value
            right = expected.to(value)
            if not torch.equal(value, right):
                value.copy_(right)
                wrong.append(f"{name}.{buffer}")
    return wrong


def match_model_config(model, folder: str, seq_len: int) -> None:
    """Refuse a checkpoint of another architecture than the model that was built from `hf_model`.

    Args:
        model: the model's config, with Transformers' names.
        folder: of the checkpoint.
        seq_len: of the training, must not exceed the checkpoint's positions.

    Raises:
        ValueError: a field of config.json that differs, with both values.
    """
    from transformers import AutoConfig

    read_config(folder)  # names the file if it is missing or broken
    found = AutoConfig.from_pretrained(folder)
    fields = (
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "tie_word_embeddings",
        "rms_norm_eps",
        "hidden_act",
        "attention_bias",
        "use_sliding_window",
        "rope_parameters",
    )
    for name in fields:
        theirs, ours = getattr(found, name, None), getattr(model, name, None)
        if theirs != ours:
            raise ValueError(f"{name} is {theirs!r} in {folder}/config.json, but {ours!r} in the model of hf_model")
    if seq_len > found.max_position_embeddings:
        raise ValueError(
            f"max_position_embeddings is {found.max_position_embeddings} in {folder}/config.json, but "
            f"training.seq_len is {seq_len}"
        )


@dataclass(kw_only=True, slots=True)
class V5Config(TransformersBackendConfig):
    nki_kernels: bool = True
    """Run RoPE in our kernel."""


def v5_qwen3_config(hf_model: str, hf_assets_path: str, *, nki_kernels: bool = True) -> V5Config:
    """torchtitan's transformers_modeling_backend_full() around `TransformersQwen3`: 10 steps, sharded over all.

    Args:
        hf_model: name on the Hub, or a folder with its config.json; the model is built from it.
        hf_assets_path: folder of the tokenizer and, for fine-tuning, of the weights.
        nki_kernels: run RoPE in our kernel.
    """
    config = derive(transformers_modeling_backend_full(), V5Config, nki_kernels=nki_kernels)
    config.hf_model = hf_model
    config.hf_assets_path = hf_assets_path
    config.model_spec = model_registry("full")
    config.model_spec.model = TransformersQwen3.Config(TitanModelConfig())
    config.model_spec.parallelize_fn = parallelize
    config.dataloader.dataset = "c4_test"
    config.training.steps = 10
    config.training.local_batch_size = 1
    config.parallelism.data_parallel_shard_degree = -1
    config.checkpoint.last_save_model_only = True
    config.checkpoint = derive(config.checkpoint, HFCheckpointManager.Config, export_dtype="bfloat16")
    return config
