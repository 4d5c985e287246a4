"""The Qwen3 recipes: the published settings, and their check against the weights' own config.json."""

import json

import pytest
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
