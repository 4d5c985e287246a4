"""Qwen3 through torchtitan's native model: one recipe, in the size of Qwen3-4B-Instruct-2507 and in a tiny one.

Select a function by `--module trn_kernels.recipes.qwen3 --config NAME`. Each is a stock torchtitan run; the
kernels come in by `--override.imports trn_kernels.overrides` on the command line.

Attention is scaled_dot_product_attention, which knows no document borders: packed documents attend to the
ones before them in their sequence, although RoPE restarts at 0 for each.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan.config import derive
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.qwen3 import Qwen3Model, model_registry
from torchtitan.models.qwen3.config_registry import qwen3_32b
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from trn_kernels.recipes.assets import debug_assets

# Of Qwen3-4B-Instruct-2507. torchtitan's 4B flavor has those of the Qwen3-4B before it: 1e6 and 40960.
_THETA_2507, _MAX_POSITIONS_2507 = 5_000_000.0, 262_144


def native_qwen3_4b() -> Trainer.Config:
    """Qwen3-4B-Instruct-2507: 10 steps, global batch 64 in local batches of 1, sharded over all processes.

    Expects the model's tokenizer, and its `config.json` if it is to be checked, in
    `assets/hf/Qwen3-4B-Instruct-2507` (or `--hf_assets_path`). The data set `c4_test` is the sample in
    torchtitan's repository, `tests/assets/c4_test`; another folder of jsonl files goes into
    `--dataloader.dataset_path`.
    """
    config = _native_qwen3("4B", "assets/hf/Qwen3-4B-Instruct-2507", _THETA_2507, _MAX_POSITIONS_2507)
    config.training.local_batch_size = 1
    config.training.global_batch_size = 64
    return config


def native_qwen3_debug() -> Trainer.Config:
    """The same recipe with 4 layers of torchtitan's debug model, for two CPU cores.

    Makes its tokenizer and English text in `assets/debug` of the current folder, if they are not there yet.
    """
    assets = debug_assets()
    config = _native_qwen3("debugmodel", str(assets))
    config.model_spec.model.layers = config.model_spec.model.layers[:4]
    config.dataloader.dataset_path = str(assets / "text")
    config.metrics.log_freq = 1
    config.lr_scheduler.warmup_steps = 2
    config.training.seq_len = 256
    config.training.local_batch_size = 2
    config.activation_checkpoint = None
    return config


class Qwen3(Qwen3Model):
    """torchtitan's Qwen3 that takes RoPE's settings from the weights' `config.json` and refuses other sizes."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        def update_from_config(self, *, config, **kwargs) -> None:
            # Here the path is final: --hf_assets_path may have changed it.
            match_hf_config(self, config.hf_assets_path)
            Qwen3Model.Config.update_from_config(self, config=config, **kwargs)


def match_hf_config(model: Qwen3Model.Config, hf_assets_path: str) -> None:
    """Set RoPE theta and maximum positions of `model` from `config.json`; without that file do nothing.

    Args:
        model: changed in place.
        hf_assets_path: folder of the Hugging Face model.

    Raises:
        ValueError: a field of config.json that the native model does not match, with both values.
    """
    path = Path(hf_assets_path, "config.json")
    if not path.exists():
        return
    found = {"attention_bias": False, "use_sliding_window": False} | json.loads(path.read_text())
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    found["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    attention = model.layers[0].attention
    native = {
        "model_type": "qwen3",
        "hidden_size": model.dim,
        "num_hidden_layers": len(model.layers),
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads,
        "head_dim": attention.head_dim,
        "intermediate_size": model.layers[0].feed_forward.w1.out_features,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.enable_weight_tying,
        "rms_norm_eps": model.norm.eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "rope_type": "default",
    }
    for field, value in native.items():
        if found.get(field) != value:
            raise ValueError(f"{field} is {found.get(field)!r} in {path}, but {value!r} in the native model")
    taken = {
        "rope_theta": rope.get("rope_theta", found.get("rope_theta")),
        "max_position_embeddings": found.get("max_position_embeddings"),
    }
    for field, value in taken.items():
        if not isinstance(value, int | float) or value <= 0:
            raise ValueError(f"{field} is {value!r} in {path}, must be a positive number")
    _set_rope(model, *taken.values())


def _native_qwen3(
    flavor: str, hf_assets_path: str, theta: float | None = None, max_positions: int | None = None
) -> Trainer.Config:
    """torchtitan's qwen3_32b() around another flavor; theta and max_positions replace those of the flavor."""
    config = qwen3_32b()
    config.model_spec = _model_spec(flavor)
    model = config.model_spec.model
    if theta is not None:
        _set_rope(model, theta, max_positions)
    match_hf_config(model, hf_assets_path)
    config.loss.loss_fn.global_vocab_size = model.vocab_size
    config.hf_assets_path = hf_assets_path
    config.dataloader.dataset = "c4_test"
    config.training.steps = 10
    config.parallelism.data_parallel_shard_degree = -1
    config.checkpoint.export_dtype = "bfloat16"
    return config


def _model_spec(flavor: str) -> ModelSpec:
    try:
        spec = model_registry(flavor, attn_backend="sdpa")
    except ValueError:  # torchtitan 0.3.0 no longer offers it by name, but still has the module
        spec = model_registry(flavor)
        for layer in spec.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    spec.model = derive(spec.model, Qwen3.Config)
    return spec


def _set_rope(model: Qwen3Model.Config, theta: float, max_positions: int) -> None:
    for layer in model.layers:
        layer.attention.rope = replace(layer.attention.rope, theta=float(theta), max_seq_len=max_positions)
