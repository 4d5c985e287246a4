"""The Qwen3 recipes: the published settings, and their check against the weights' own config.json."""

import json
import subprocess
import sys

import pytest
from torchtitan.config import CompileConfig, OverrideConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.rope import CosSinRoPE

from trn_kernels.recipes import qwen3

# What the file of Qwen3-4B-Instruct-2507 says, where we look.
HF_4B = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "max_position_embeddings": 262144,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
# Of Qwen3-30B-A3B.
HF_30B_A3B = {
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
PATH_30B_A3B = "assets/hf/Qwen3-30B-A3B"
PATH_4B = "assets/hf/Qwen3-4B-Instruct-2507"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder, config):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def ropes(config):
    return [layer.attention.rope for layer in config.model_spec.model.layers]


def test_4b_has_the_published_settings(folder):
    config = qwen3.native_qwen3_4b()
    model = config.model_spec.model
    assert (model.dim, len(model.layers), model.vocab_size, model.enable_weight_tying) == (2560, 36, 151936, True)
    assert config.loss.loss_fn.global_vocab_size == model.vocab_size
    assert config.hf_assets_path == PATH_4B
    assert config.dataloader.dataset == "c4_test"
    assert config.training.steps == 10
    assert (config.training.local_batch_size, config.training.global_batch_size) == (1, 64)
    assert config.parallelism.data_parallel_shard_degree == -1
    assert not config.checkpoint.enable
    assert config.checkpoint.export_dtype == "bfloat16"
    assert not config.override.imports
    for layer in model.layers:
        assert type(layer.attention.inner_attention) is ScaledDotProductAttention.Config
        assert type(layer.attention.rope) is CosSinRoPE.Config
        assert (layer.attention.rope.theta, layer.attention.rope.max_seq_len) == (5e6, 262144)


def test_debug_is_the_same_recipe_made_small(folder):
    config = qwen3.native_qwen3_debug()
    model = config.model_spec.model
    assert 4 <= len(model.layers) <= 8
    assert ropes(config)[0].dim == model.layers[0].attention.head_dim == 128
    assert config.loss.loss_fn.global_vocab_size == model.vocab_size == 2048
    assert (folder / config.hf_assets_path / "tokenizer.json").exists()
    assert (folder / config.dataloader.dataset_path / "train.jsonl").exists()
    large = qwen3.native_qwen3_4b()
    assert type(model) is type(large.model_spec.model)
    assert config.training.steps == large.training.steps
    assert config.parallelism == large.parallelism
    assert config.optimizer == large.optimizer
    assert config.checkpoint == large.checkpoint


def test_uses_sdpa_by_name_where_torchtitan_offers_it(monkeypatch):
    registry, asked = qwen3.model_registry, []

    def offers_sdpa(flavor, attn_backend="flex"):
        asked.append(attn_backend)
        return registry(flavor)

    monkeypatch.setattr(qwen3, "model_registry", offers_sdpa)
    qwen3.native_qwen3_4b()
    assert asked == ["sdpa"]


@pytest.mark.parametrize(
    "rope", [{"rope_theta": 7e6}, {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 7e6}}]
)
def test_rope_comes_from_config_json(folder, rope):
    write(folder / PATH_4B, HF_4B | rope | {"max_position_embeddings": 1000})
    for found in ropes(qwen3.native_qwen3_4b()):
        assert (found.theta, found.max_seq_len) == (7e6, 1000)


def test_transformers_own_file_is_understood(folder):
    from transformers import Qwen3Config

    fields = {k: v for k, v in HF_4B.items() if k not in ("model_type", "rope_theta", "rope_scaling")}
    rope = {"rope_type": "default", "rope_theta": 6e6}
    Qwen3Config(**fields, rope_parameters=rope).save_pretrained(folder / PATH_4B)
    assert ropes(qwen3.native_qwen3_4b())[0].theta == 6e6


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "qwen3_moe"),
        ("hidden_size", 2048),
        ("num_hidden_layers", 35),
        ("num_attention_heads", 16),
        ("num_key_value_heads", 4),
        ("head_dim", 64),
        ("intermediate_size", 9729),
        ("vocab_size", 151935),
        ("tie_word_embeddings", False),
        ("rms_norm_eps", 1e-5),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("use_sliding_window", True),
    ],
)
def test_mismatch_is_refused(folder, field, value):
    write(folder / PATH_4B, HF_4B | {field: value})
    native = HF_4B[field]
    with pytest.raises(ValueError, match=f"{field} is {value!r} in .*config.json, but {native!r} in the native"):
        qwen3.native_qwen3_4b()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type is 'yarn' .* 'default'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6}}, "rope_type is 'linear' .* 'default'"),
        ({"rope_theta": None}, "rope_theta is None in .* must be a positive number"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0 in .* must be a positive number"),
        ({"hidden_size": None}, "hidden_size is None in .* but 2560"),
    ],
)
def test_file_that_says_no_usable_rope_is_refused(folder, changes, message):
    write(folder / PATH_4B, HF_4B | changes)
    with pytest.raises(ValueError, match=message):
        qwen3.native_qwen3_4b()


def test_path_from_the_command_line_is_checked(folder):
    """--hf_assets_path comes after the config function, and before the trainer's call of update_from_config."""
    config = qwen3.native_qwen3_4b()
    config.hf_assets_path = str(write(folder / "other", HF_4B | {"rope_theta": 8e6}))
    config.model_spec.model.update_from_config(config=config)
    assert {rope.theta for rope in ropes(config)} == {8e6}
    assert {rope.max_seq_len for rope in ropes(config)} == {config.training.seq_len}
    config.hf_assets_path = str(write(folder / "other", HF_4B | {"num_hidden_layers": 28}))
    with pytest.raises(ValueError, match="num_hidden_layers is 28 .* but 36"):
        config.model_spec.model.update_from_config(config=config)


# -- mixture of experts -----------------------------------------------------------------------------------


def moe_sizes(config):
    """Every place that holds the number of experts, and every one that holds top-k, over all layers."""
    experts, chosen = set(), set()
    for layer in config.model_spec.model.layers:
        moe = layer.moe
        routed = moe.routed_experts
        experts |= {moe.num_experts, moe.router.num_experts, moe.router.gate.out_features}
        experts |= {routed.inner_experts.num_experts, routed.token_dispatcher.num_experts}
        chosen |= {moe.router.top_k, routed.token_dispatcher.top_k}
    return len(config.model_spec.model.layers), experts, chosen


def test_30b_a3b_has_the_published_settings(folder):
    config = qwen3.nki_qwen3_30b_a3b()
    model = config.model_spec.model
    assert moe_sizes(config) == (4, {64}, {4})
    assert (model.dim, model.vocab_size, model.enable_weight_tying) == (2048, 151936, False)
    assert config.loss.loss_fn.global_vocab_size == model.vocab_size
    for layer in model.layers:
        experts = layer.moe.routed_experts.inner_experts
        assert (experts.dim, experts.hidden_dim) == (2048, 768)
        assert (layer.moe.router.score_func, layer.moe.router.route_norm) == ("softmax", True)
        assert type(layer.attention.inner_attention) is ScaledDotProductAttention.Config
        assert (layer.attention.rope.theta, layer.attention.rope.max_seq_len) == (1e6, 40960)
    assert config.compile == CompileConfig(enable=False, backend="neuron")
    assert config.override == OverrideConfig(imports=["trn_kernels.overrides"])
    assert config.hf_assets_path == PATH_30B_A3B
    assert config.training.steps == 10
    parallelism = config.parallelism
    assert parallelism.data_parallel_shard_degree == -1
    degrees = ("data_parallel_replicate", "tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel")
    assert all(getattr(parallelism, f"{name}_degree") == 1 for name in degrees)


def test_nothing_is_reduced_unless_asked(folder):
    config = qwen3.qwen3_nki_moe_config("30B-A3B")
    assert moe_sizes(config) == (48, {128}, {8})
    assert config.model_spec.model.reduced == ()
    assert not config.compile.enable


@pytest.mark.parametrize(
    ("sizes", "expected", "fields"),
    [
        ({"n_layers": 3}, (3, {128}, {8}), ("num_hidden_layers",)),
        ({"num_experts": 8}, (48, {8}, {8}), ("num_experts",)),
        ({"top_k": 1}, (48, {128}, {1}), ("num_experts_per_tok",)),
        (
            {"n_layers": 48, "num_experts": 128, "top_k": 128},
            (48, {128}, {128}),
            ("num_hidden_layers", "num_experts", "num_experts_per_tok"),
        ),
    ],
)
def test_each_size_by_itself(folder, sizes, expected, fields):
    config = qwen3.qwen3_nki_moe_config("30B-A3B", **sizes)
    assert moe_sizes(config) == expected
    assert config.model_spec.model.reduced == fields


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"n_layers": 0}, "n_layers is 0; flavor 30B-A3B has 48"),
        ({"n_layers": 49}, "n_layers is 49; flavor 30B-A3B has 48"),
        ({"num_experts": 0}, "num_experts is 0 and top_k 8; .* has 128 experts"),
        ({"num_experts": 129}, "num_experts is 129 and top_k 8; .* has 128 experts"),
        ({"num_experts": 7}, "num_experts is 7 and top_k 8"),
        ({"top_k": 0}, "num_experts is 128 and top_k 0"),
        ({"num_experts": 4, "top_k": 5}, "num_experts is 4 and top_k 5"),
    ],
)
def test_impossible_sizes_are_refused(folder, sizes, message):
    with pytest.raises(ValueError, match=message):
        qwen3.qwen3_nki_moe_config("30B-A3B", **sizes)


def test_a_dense_flavor_is_refused(folder):
    with pytest.raises(ValueError, match="flavor '4B' of Qwen3 has no experts"):
        qwen3.qwen3_nki_moe_config("4B")


def test_moe_debug_is_the_same_recipe_made_small(folder):
    config, large = qwen3.nki_qwen3_moe_debug(), qwen3.nki_qwen3_30b_a3b()
    assert moe_sizes(config) == (4, {8}, {2})
    assert type(config.model_spec.model) is type(large.model_spec.model)
    for name in ("override", "parallelism", "checkpoint"):
        assert getattr(config, name) == getattr(large, name)
    assert config.training.steps == large.training.steps
    assert (folder / config.hf_assets_path / "tokenizer.json").exists()
    assert (folder / config.dataloader.dataset_path / "train.jsonl").exists()


def test_nki_configs_bring_their_overrides(folder):
    """In a script that does not import them, and whose first import is this package."""
    code = (
        "from trn_kernels.recipes.cpu import stub_triton; stub_triton()\n"
        "from trn_kernels.recipes.qwen3 import nki_qwen3_30b_a3b\n"
        "from torchtitan.config import apply_overrides\n"
        "config = nki_qwen3_30b_a3b(); print(len(apply_overrides(config.override, config)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, timeout=120)
    assert done.stdout.strip() == "8", done.stderr


@pytest.mark.parametrize("known", [False, True])
def test_gradient_clipping_is_compiled_where_torchtitan_can(folder, monkeypatch, known):
    """torchtitan 0.3.0 cannot; the other case sees the source of one that looks for the component."""
    if known:
        source = 'compiled = config.compile.enable and "grad_clip" in config.compile.components'
        monkeypatch.setattr(qwen3.inspect, "getsource", lambda module: source)

    def components(**fields):
        given = CompileConfig(**fields)
        before = [*given.components]
        config = qwen3.qwen3_nki_moe_config("30B-A3B", compile_config=given, n_layers=1)
        assert given.components == before  # the caller's own stays as it is
        assert (config.compile.enable, config.compile.backend) == (given.enable, given.backend)
        return config.compile.components

    more = ["grad_clip"] if known else []
    assert components(enable=True, backend="aot_eager") == ["model", "loss", *more]
    assert components(enable=True, components=["loss"]) == ["loss", *more]
    assert components(enable=True, components=["grad_clip"]) == ["grad_clip"]
    assert components(enable=False) == ["model", "loss"]


def test_moe_config_json_matches(folder):
    write(folder / PATH_30B_A3B, HF_30B_A3B | {"rope_theta": 3e6})
    for config in (qwen3.qwen3_nki_moe_config("30B-A3B"), qwen3.nki_qwen3_30b_a3b()):
        assert {rope.theta for rope in ropes(config)} == {3e6}


def test_transformers_own_moe_file_is_understood(folder):
    from transformers import Qwen3MoeConfig

    fields = {k: v for k, v in HF_30B_A3B.items() if k not in ("model_type", "rope_theta", "rope_scaling")}
    rope = {"rope_type": "default", "rope_theta": 6e6}
    Qwen3MoeConfig(**fields, rope_parameters=rope).save_pretrained(folder / PATH_30B_A3B)
    assert ropes(qwen3.qwen3_nki_moe_config("30B-A3B"))[0].theta == 6e6


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "qwen3"),
        ("hidden_size", 4096),
        ("num_hidden_layers", 94),
        ("moe_intermediate_size", 1536),
        ("num_experts", 64),
        ("num_experts_per_tok", 4),
        ("norm_topk_prob", False),
        ("decoder_sparse_step", 2),
        ("mlp_only_layers", [0]),
        ("tie_word_embeddings", True),
    ],
)
def test_moe_mismatch_is_refused(folder, field, value):
    write(folder / PATH_30B_A3B, HF_30B_A3B | {field: value})
    with pytest.raises(ValueError) as error:
        qwen3.qwen3_nki_moe_config("30B-A3B")
    assert f"{field} is {value!r} in " in str(error.value)
    assert f"but {HF_30B_A3B[field]!r} in the native model" in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"), [("num_hidden_layers", 94), ("num_experts", 64), ("num_experts_per_tok", 4)]
)
def test_a_reduced_field_is_not_compared_but_others_are(folder, field, value):
    sizes = {"num_hidden_layers": "n_layers", "num_experts": "num_experts", "num_experts_per_tok": "top_k"}
    write(folder / PATH_30B_A3B, HF_30B_A3B | {field: value})
    qwen3.qwen3_nki_moe_config("30B-A3B", **{sizes[field]: 8})
    other = next(argument for name, argument in sizes.items() if name != field)
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        qwen3.qwen3_nki_moe_config("30B-A3B", **{other: 8})
