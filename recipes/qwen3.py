"""Qwen3 three ways: Transformers' model, torchtitan's native one, and a mixture of experts with our kernels in it.

Select a function by `--module trn_kernels.recipes.qwen3 --config NAME`. Those named `native_` are stock torchtitan
runs, where the kernels come in by `--override.imports trn_kernels.overrides` on the command line; those named
`nki_` have that in their config; those named `v5_` train Transformers' own model with our RoPE in it, see
`recipes/v5.py`. A name that ends in `_finetune` starts from published weights and ends with an export of the same
form, see `recipes/checkpoints.py`.

Attention is scaled_dot_product_attention, which knows no document borders: packed documents attend to the
ones before them in their sequence, although RoPE restarts at 0 for each.
"""

import importlib
import inspect
from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan.components.optimizer import default_adamw
from torchtitan.config import CompileConfig, OverrideConfig, derive
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.qwen3 import Qwen3Model, model_registry
from torchtitan.models.qwen3.config_registry import qwen3_32b
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

# Registers what the configs named `nki_` ask for: torchtitan itself only imports `trn_kernels`, which may be loaded.
import trn_kernels.overrides.registry  # noqa: F401
from trn_kernels.recipes.assets import debug_assets, debug_model
from trn_kernels.recipes.checkpoints import HFCheckpointManager, finetune, loaded_from, read_config
from trn_kernels.recipes.parallelism import check_parallelism, fit_torch

# Of Qwen3-4B-Instruct-2507. torchtitan's 4B flavor has those of the Qwen3-4B before it: 1e6 and 40960.
_THETA_2507, _MAX_POSITIONS_2507 = 5_000_000.0, 262_144

_MODEL_4B, _ASSETS_4B = "Qwen/Qwen3-4B-Instruct-2507", "assets/hf/Qwen3-4B-Instruct-2507"


def v5_qwen3_4b(nki_kernels: bool = True) -> Trainer.Config:
    """Transformers' Qwen3-4B-Instruct-2507 from random weights: 10 steps, local batch 1, sharded over all processes.

    The model is built from the Hub's `config.json` (or that of a folder given by `--hf_model`); the tokenizer is
    expected in `assets/hf/Qwen3-4B-Instruct-2507` (or `--hf_assets_path`); for the data set see `native_qwen3_4b`.

    Args:
        nki_kernels: run RoPE in our kernel.
    """
    return _v5_qwen3_config()(_MODEL_4B, _ASSETS_4B, nki_kernels=nki_kernels)


def _v5_qwen3_config():
    # torchtitan's transformers backend is an experiment: imported only by who uses it.
    try:
        from trn_kernels.recipes.v5 import v5_qwen3_config
    except (ImportError, TypeError, AttributeError) as error:
        raise RuntimeError(
            "v5_ recipes need torchtitan's transformers_modeling_backend as of 20 July 2026 or later; the installed "
            f"one does not import with the installed Transformers ({type(error).__name__}: {error}). "
            "Recipes named native_ and nki_ do without it"
        ) from error
    return v5_qwen3_config


def v5_qwen3_4b_finetune(nki_kernels: bool = True) -> Trainer.Config:
    """The same from the released weights in `assets/hf/Qwen3-4B-Instruct-2507`, to an export in bfloat16."""
    return finetune(v5_qwen3_4b(nki_kernels), "checkpoint_qwen3_4b_ft", _ASSETS_4B)


def v5_qwen3_debug(nki_kernels: bool = True) -> Trainer.Config:
    """The same recipe around a tiny Qwen3, made in `assets/debug_qwen3` of the current folder, for two CPU cores."""
    folder = str(debug_model())
    config = _for_two_cores(_v5_qwen3_config()(folder, folder, nki_kernels=nki_kernels))
    config.hf_assets_path = folder
    config.debug.print_config = False
    return config


def v5_qwen3_debug_finetune(nki_kernels: bool = True) -> Trainer.Config:
    """The same from the tiny weights, 5 steps, to an export."""
    config = v5_qwen3_debug(nki_kernels)
    return _finetune_debug(config, "checkpoint_qwen3_debug_ft", config.hf_assets_path)


def native_qwen3_4b() -> Trainer.Config:
    """Qwen3-4B-Instruct-2507: 10 steps, global batch 64 in local batches of 1, sharded over all processes.

    Expects the model's tokenizer, and its `config.json` if it is to be checked, in
    `assets/hf/Qwen3-4B-Instruct-2507` (or `--hf_assets_path`). The data set `c4_test` is the sample in
    torchtitan's repository, `tests/assets/c4_test`; another folder of jsonl files goes into
    `--dataloader.dataset_path`.
    """
    config = _native_qwen3("4B", _ASSETS_4B, _THETA_2507, _MAX_POSITIONS_2507)
    config.training.local_batch_size = 1
    config.training.global_batch_size = 64
    return config


def native_qwen3_4b_finetune() -> Trainer.Config:
    """The same from the released weights in `assets/hf/Qwen3-4B-Instruct-2507`, to an export in bfloat16."""
    return finetune(native_qwen3_4b(), "checkpoint_qwen3_4b_ft", _ASSETS_4B)


def native_qwen3_debug() -> Trainer.Config:
    """The same recipe with 4 layers of torchtitan's debug model, for two CPU cores.

    Makes its tokenizer and English text in `assets/debug` of the current folder, if they are not there yet.
    """
    return _for_two_cores(_native_qwen3("debugmodel", "assets/debug", reduced=(4, None, None)))


def native_qwen3_debug_finetune() -> Trainer.Config:
    """The same from a tiny Qwen3, made in `assets/debug_qwen3` of the current folder, 5 steps, to an export."""
    return _finetune_debug(native_qwen3_debug(), "checkpoint_native_qwen3_debug_ft", debug_model())


def nki_qwen3_30b_a3b() -> Trainer.Config:
    """Qwen3-30B-A3B reduced to 4 layers and 64 experts, 4 of them per token; sharded over all processes, eager.

    Expects the model's tokenizer in `assets/hf/Qwen3-30B-A3B` (or `--hf_assets_path`); for the data set see
    `native_qwen3_4b`. `--parallelism.expert_parallel_degree N` spreads the experts over N ranks; N divides 64.
    """
    eager = CompileConfig(enable=False, backend="neuron")
    return qwen3_nki_moe_config("30B-A3B", compile_config=eager, n_layers=4, num_experts=64, top_k=4)


def nki_qwen3_30b_a3b_full() -> Trainer.Config:
    """All 48 layers and 128 experts of Qwen3-30B-A3B, 8 of them per token; for its memory see docs/scale-out.md."""
    return qwen3_nki_moe_config("30B-A3B", compile_config=CompileConfig(enable=False, backend="neuron"))


def nki_qwen3_moe_debug() -> Trainer.Config:
    """The same recipe with 4 layers of torchtitan's debug model, 8 experts, 2 per token, for two CPU cores."""
    config = _for_two_cores(qwen3_nki_moe_config("debugmodel_moe", n_layers=4, num_experts=8, top_k=2))
    # As torchtitan trains this model. At the large model's rate gradients jump, where rounding decides.
    config.optimizer = default_adamw(lr=3e-4)
    return config


def nki_qwen3_moe_debug_finetune() -> Trainer.Config:
    """The same from a tiny Qwen3-MoE, made in `assets/debug_qwen3_moe` of the current folder, 5 steps, to an export."""
    weights = debug_model("assets/debug_qwen3_moe", moe=True, tied=False, shards=3)
    return _finetune_debug(nki_qwen3_moe_debug(), "checkpoint_qwen3_moe_debug_ft", weights)


def qwen3_nki_moe_config(
    flavor: str,
    *,
    compile_config: CompileConfig | None = None,
    n_layers: int | None = None,
    num_experts: int | None = None,
    top_k: int | None = None,
) -> Trainer.Config:
    """A Qwen3 mixture of experts with our RoPE and experts: `--override.imports trn_kernels.overrides` built in.

    As in torchtitan's own recipes, a bias in the choice of experts balances their load. Hugging Face's Qwen3 has
    none, so exports lose it. A run that starts from its weights is without; for others set
    `load_balance_coeff = None` in each `layer.moe`.

    Args:
        flavor: a MoE flavor of torchtitan's Qwen3, such as "30B-A3B".
        compile_config: for `torch.compile`; gradient clipping is added to the compiled components where torchtitan
            can compile it. None leaves torchtitan's default, off.
        n_layers, num_experts, top_k: make the model smaller; None keeps the flavor's.

    Raises:
        ValueError: a flavor without experts, or a size that it cannot be reduced to.
    """
    config = _native_qwen3(flavor, f"assets/hf/Qwen3-{flavor}", reduced=(n_layers, num_experts, top_k))
    if config.model_spec.model.layers[0].moe is None:
        raise ValueError(f"flavor {flavor!r} of Qwen3 has no experts")
    if compile_config is not None:
        components = compile_config.components
        if compile_config.enable and "grad_clip" not in components and _can_compile_grad_clip():
            components = [*components, "grad_clip"]
        config.compile = replace(compile_config, components=list(components))
    config.override = OverrideConfig(imports=["trn_kernels.overrides"])
    return config


def _can_compile_grad_clip() -> bool:
    """Does this torchtitan know the component? The builds that do look for its name where they clip."""
    modules = ("torchtitan.trainer", "torchtitan.distributed.utils", "torchtitan.config.configs")
    return any('"grad_clip"' in inspect.getsource(importlib.import_module(module)) for module in modules)


class Qwen3(Qwen3Model):
    """torchtitan's Qwen3 that takes RoPE's settings from the weights' `config.json` and refuses other sizes."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        reduced: tuple[str, ...] = ()
        """Fields of `config.json` in which this model is smaller on purpose."""

        def update_from_config(self, *, config, **kwargs) -> None:
            # Here the flags are final: --hf_assets_path and others may have changed what the recipe says.
            check_parallelism(config)
            match_hf_config(self, config.hf_assets_path)
            weights = loaded_from(config)
            if weights is not None:
                read_config(weights)  # must be there, whereas a training from random weights needs none
                match_hf_config(self, weights)
                _keep_published_routing(self)
            logger.info(f"[Recipe] {len(self.layers)} layers, native")
            Qwen3Model.Config.update_from_config(self, config=config, **kwargs)


def _keep_published_routing(model: Qwen3Model.Config) -> None:
    """Switch off the bias that balances the load of experts: published models have none, an export would drop it."""
    balanced = [layer.moe for layer in model.layers if layer.moe is not None and layer.moe.load_balance_coeff]
    for moe in balanced:
        moe.load_balance_coeff = None
    if balanced:
        logger.info(f"[Recipe] load balancing by expert bias is off in {len(balanced)} layers: exports cannot hold it")


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
    found = {"attention_bias": False, "use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": []}
    found |= read_config(hf_assets_path)
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    found["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    attention, moe = model.layers[0].attention, model.layers[0].moe
    native = {
        "model_type": "qwen3" if moe is None else "qwen3_moe",
        "hidden_size": model.dim,
        "num_hidden_layers": len(model.layers),
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads,
        "head_dim": attention.head_dim,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.enable_weight_tying,
        "rms_norm_eps": model.norm.eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "rope_type": "default",
    }
    if moe is None:
        native["intermediate_size"] = model.layers[0].feed_forward.w1.out_features
    else:
        native |= {
            "moe_intermediate_size": _inner_experts(moe).hidden_dim,
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.router.top_k,
            "norm_topk_prob": moe.router.route_norm,
            # Every layer is a mixture.
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    for field, value in native.items():
        if field not in model.reduced and found.get(field) != value:
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
    flavor: str,
    hf_assets_path: str,
    theta: float | None = None,
    max_positions: int | None = None,
    reduced: tuple[int | None, int | None, int | None] = (None, None, None),
) -> Trainer.Config:
    """torchtitan's qwen3_32b() around another flavor; theta and max_positions replace those of the flavor."""
    config = qwen3_32b()
    config.model_spec = _model_spec(flavor)
    model = config.model_spec.model
    if theta is not None:
        _set_rope(model, theta, max_positions)
    _reduce(model, flavor, *reduced)
    match_hf_config(model, hf_assets_path)
    loss = getattr(config.loss, "loss_fn", config.loss)
    if hasattr(loss, "global_vocab_size"):  # older builds look at the logits
        loss.global_vocab_size = model.vocab_size
    config.hf_assets_path = hf_assets_path
    config.dataloader.dataset = "c4_test"
    config.training.steps = 10
    config.parallelism.data_parallel_shard_degree = -1
    fit_torch(config)
    if hasattr(config.training, "disable_cuda_graphs"):
        # Neuron has none, and torchtitan refuses them with expert and with pipeline parallelism.
        config.training.disable_cuda_graphs = True
    config.checkpoint = derive(config.checkpoint, HFCheckpointManager.Config, export_dtype="bfloat16")
    return config


def _for_two_cores(config: Trainer.Config) -> Trainer.Config:
    """Debug assets (made in `assets/debug` of the current folder if they are not there), short sequences."""
    assets = debug_assets()
    config.hf_assets_path = str(assets)
    config.dataloader.dataset_path = str(assets / "text")
    config.metrics.log_freq = 1
    config.lr_scheduler.warmup_steps = 2
    config.training.seq_len = 256
    config.training.local_batch_size = 2
    _keep_activations(config)
    return config


def _keep_activations(config: Trainer.Config) -> None:
    if hasattr(config.activation_checkpoint, "mode"):  # before 15 June 2026, one class for every policy
        config.activation_checkpoint.mode = "none"
    else:
        config.activation_checkpoint = None


def _finetune_debug(config: Trainer.Config, folder: str, weights: str | Path) -> Trainer.Config:
    """Fine-tune a tiny model of which every size is checked, with the tokenizer beside its weights."""
    if isinstance(config.model_spec.model, Qwen3.Config):
        config.model_spec.model.reduced = ()
    config.hf_assets_path = str(weights)
    config.training.steps = 5
    return finetune(config, folder, weights)


def _reduce(model: Qwen3.Config, flavor: str, n_layers: int | None, num_experts: int | None, top_k: int | None) -> None:
    """Make a model config smaller in place, and remember in which fields of config.json."""
    if n_layers is not None:
        if not 1 <= n_layers <= len(model.layers):
            raise ValueError(f"n_layers is {n_layers}; flavor {flavor} has {len(model.layers)}")
        model.layers = model.layers[:n_layers]
    for moe in (layer.moe for layer in model.layers if layer.moe is not None):
        experts = moe.num_experts if num_experts is None else num_experts
        chosen = moe.router.top_k if top_k is None else top_k
        if not 1 <= chosen <= experts <= moe.num_experts:
            raise ValueError(
                f"num_experts is {experts} and top_k {chosen}; flavor {flavor} has {moe.num_experts} experts, "
                "of which a token takes at most all"
            )
        router, dispatcher = moe.router, _dispatcher(moe)
        moe.num_experts = router.num_experts = router.gate.out_features = experts
        _inner_experts(moe).num_experts = dispatcher.num_experts = experts
        router.top_k = dispatcher.top_k = chosen
    sizes = {"num_hidden_layers": n_layers, "num_experts": num_experts, "num_experts_per_tok": top_k}
    model.reduced = tuple(field for field, size in sizes.items() if size is not None)


def _inner_experts(moe):
    """Config of the experts of a MoE config; before 16 July 2026 torchtitan had no `routed_experts` between."""
    return moe.routed_experts.inner_experts if hasattr(moe, "routed_experts") else moe.experts


def _dispatcher(moe):
    """Config of the token dispatcher of a MoE config, wherever this torchtitan keeps it."""
    return moe.routed_experts.token_dispatcher if hasattr(moe, "routed_experts") else moe.experts.token_dispatcher


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
