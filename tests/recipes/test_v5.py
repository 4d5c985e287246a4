"""The Transformers recipes: published settings, RoPE after meta-device initialisation, what is refused."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from torchtitan.config.manager import ConfigManager
from torchtitan.experiments.transformers_modeling_backend.model import HFTransformerModel
from torchtitan.experiments.transformers_modeling_backend.trainer import HFTransformerTrainer
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

from trn_kernels.recipes import cpu, parallelism, qwen3, v5
from trn_kernels.recipes.assets import debug_model
from trn_kernels.recipes.checkpoints import loaded_from


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    root = tmp_path_factory.mktemp("v5")
    return debug_model(root / "model", assets=root / "assets")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def small(**changes):
    facts = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8}
    facts |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    return Qwen3Config(**facts | changes)


def built_on_meta(config):
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    return model.to_empty(device="cpu")


def test_4b_has_the_published_settings(folder):
    config = qwen3.v5_qwen3_4b()
    assert config.hf_model == "Qwen/Qwen3-4B-Instruct-2507"
    assert config.hf_assets_path == "assets/hf/Qwen3-4B-Instruct-2507"
    assert config.dataloader.dataset == "c4_test"
    assert (config.training.steps, config.training.local_batch_size) == (10, 1)
    assert config.parallelism.data_parallel_shard_degree == -1
    assert config.parallelism.spmd_backend == "spmd_types"
    assert config.checkpoint.export_dtype == "bfloat16"
    assert not config.checkpoint.enable
    assert type(config.model_spec.model) is v5.TransformersQwen3.Config
    assert config.nki_kernels
    assert not qwen3.v5_qwen3_4b(nki_kernels=False).nki_kernels


@pytest.mark.parametrize(("flags", "expected"), [([], True), (["--no-nki_kernels"], False)])
def test_kernels_are_a_flag(assets, flags, expected):
    arguments = ["--module", "trn_kernels.recipes.qwen3", "--config", "v5_qwen3_4b", "--hf_model", str(assets)]
    config = ConfigManager().parse_args([*arguments, *flags])
    config.model_spec.model.update_from_config(config=config)
    assert config.model_spec.model.nki_kernels is expected
    assert config._owner is HFTransformerTrainer


@pytest.mark.parametrize("name", ["v5_qwen3_4b_finetune", "native_qwen3_4b_finetune"])
def test_4b_finetune_has_the_published_settings(folder, name):
    config = getattr(qwen3, name)()
    checkpoint = config.checkpoint
    assert checkpoint.enable
    assert checkpoint.folder == "checkpoint_qwen3_4b_ft"
    assert checkpoint.initial_load_path == loaded_from(config) == str(folder / "assets/hf/Qwen3-4B-Instruct-2507")
    assert checkpoint.initial_load_in_hf and checkpoint.initial_load_model_only
    assert checkpoint.last_save_in_hf and checkpoint.last_save_model_only
    assert not list(folder.iterdir())


@pytest.mark.parametrize("name", ["v5_qwen3", "native_qwen3", "nki_qwen3_moe"])
def test_debug_finetune_is_the_same_made_small(folder, name):
    config = getattr(qwen3, f"{name}_debug_finetune")()
    weights = folder / config.hf_assets_path
    assert config.checkpoint.initial_load_path == str(weights)
    assert config.training.steps == 5
    files = sorted(path.name for path in weights.glob("*.safetensors*"))
    assert ("model.safetensors.index.json" in files) == (name == "nki_qwen3_moe")
    assert json.loads((weights / "config.json").read_text())["tie_word_embeddings"] == (name != "nki_qwen3_moe")
    large = getattr(qwen3, "v5_qwen3_4b_finetune" if name == "v5_qwen3" else "native_qwen3_4b_finetune")()
    differ = {"folder", "initial_load_path"}
    for field in set(type(large.checkpoint).__dataclass_fields__) - differ:
        assert getattr(config.checkpoint, field) == getattr(large.checkpoint, field), field
    if name != "v5_qwen3":
        assert config.model_spec.model.reduced == ()  # every size is checked


# -- RoPE -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["default", "yarn", "linear"])
def test_rope_is_restored_after_meta_initialisation(kind):
    rope = {"rope_type": kind, "rope_theta": 5e6} | ({} if kind == "default" else {"factor": 4.0})
    config = small(rope_parameters=rope)
    fresh = Qwen3ForCausalLM(config).model.rotary_emb
    model = built_on_meta(config)
    rotary = model.model.rotary_emb
    for buffer in (rotary.inv_freq, rotary.original_inv_freq):
        buffer.fill_(7.0)  # what uninitialised memory may hold
    assert v5.restore_rope(model) == ["model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"]
    assert torch.equal(rotary.inv_freq, fresh.inv_freq)
    assert torch.equal(rotary.original_inv_freq, fresh.inv_freq)
    assert rotary.attention_scaling == fresh.attention_scaling
    if kind == "default":
        assert rotary.inv_freq[0] == 1
        assert rotary.inv_freq[-1] == pytest.approx(5e6 ** -(6 / 8))


def test_fix_is_off_where_nothing_is_wrong():
    model = Qwen3ForCausalLM(small())
    versions = [buffer._version for buffer in model.buffers()]
    assert v5.restore_rope(model) == []
    assert [buffer._version for buffer in model.buffers()] == versions


def build(assets, monkeypatch, nki_kernels=True, **training):
    monkeypatch.setattr(cpu, "accelerator", lambda: None)
    config = v5.v5_qwen3_config(str(assets), str(assets), nki_kernels=nki_kernels)
    config.training.seq_len = 32
    model_config = config.model_spec.model
    model_config.update_from_config(config=config)
    with torch.device("meta"):
        model = model_config.build()
    return model.to_empty(device="cpu"), config


def test_torchtitan_loses_rope_and_this_model_has_it(assets, monkeypatch, caplog):
    """The guard of the fix. Where the first half fails, torchtitan restores RoPE by itself: then drop the fix."""
    expected = Qwen3ForCausalLM(AutoConfig.from_pretrained(assets)).model.rotary_emb.inv_freq
    model, _ = build(assets, monkeypatch)
    model.model.model.rotary_emb.inv_freq.zero_()
    with torch.no_grad():
        HFTransformerModel.init_states(model)
        stock = model.model.model.rotary_emb.inv_freq.clone()
        assert not torch.equal(stock, expected)
        with caplog.at_level("INFO"):
            model.init_states()
    assert torch.equal(model.model.model.rotary_emb.inv_freq, expected)
    assert "[RoPE] frequencies were not initialised by torchtitan, set now: model.rotary_emb.inv_freq" in caplog.text


@pytest.mark.parametrize("nki_kernels", [True, False])
def test_model_is_transformers_with_causal_attention(assets, monkeypatch, nki_kernels, caplog):
    with caplog.at_level("INFO"):
        model, config = build(assets, monkeypatch, nki_kernels)
    stock = Qwen3ForCausalLM.from_pretrained(assets, dtype=torch.float32)
    with torch.no_grad():
        model.init_states()
        model.model.load_state_dict(stock.state_dict())
    assert model.model.lm_head.weight is model.model.model.embed_tokens.weight
    tokens = torch.arange(64).view(2, 32)
    positions = torch.arange(16).repeat(2, 2)  # two documents in each row
    expected = stock(tokens, position_ids=positions, attention_mask=torch.ones_like(tokens)).logits
    torch.testing.assert_close(model(tokens, positions=positions), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(model(tokens), expected)
    lines = [line for line in caplog.messages if line.startswith("[Override]")]
    assert lines == [
        f"[Override] trn_kernels.overrides.transformers: model.layers.{i}.self_attn Transformers -> trn_kernels::rope"
        for i in range(4 if nki_kernels else 0)
    ]
    assert f"[Recipe] 4 layers, from {assets}" in caplog.messages


def test_config_survives_torchtitans_copies(assets, monkeypatch):
    _, config = build(assets, monkeypatch, nki_kernels=False)
    copy = config.model_spec.model._replace()
    assert type(copy) is v5.TransformersQwen3.Config
    assert not copy.nki_kernels
    assert copy.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    json.dumps(config.to_dict())


# -- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", ["tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree"])
def test_other_parallelism_is_refused(assets, axis):
    config = v5.v5_qwen3_config(str(assets), str(assets))
    setattr(config.parallelism, axis, 2)
    with pytest.raises(ValueError, match=f"parallelism.{axis} is 2; the Transformers path takes 1"):
        config.model_spec.model.update_from_config(config=config)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", 512, "hidden_size is 512 in .*config.json, but 256 in the model of hf_model"),
        ("num_hidden_layers", 3, "num_hidden_layers is 3 .* but 4"),
        ("num_attention_heads", 8, "num_attention_heads is 8 .* but 16"),
        ("num_key_value_heads", 4, "num_key_value_heads is 4 .* but 8"),
        ("tie_word_embeddings", False, "tie_word_embeddings is False .* but True"),
        ("attention_bias", True, "attention_bias is True .* but False"),
        (
            "rope_parameters",
            {"rope_type": "default", "rope_theta": 5e6},
            "rope_parameters is .*5000000.* but .*1000000",
        ),
        ("max_position_embeddings", 100, "max_position_embeddings is 100 .* but training.seq_len is 2048"),
    ],
)
def test_weights_of_another_model_are_refused(assets, tmp_path, field, value, message):
    """hf_model says what is built, initial_load_path what is loaded: they must be of one architecture."""
    other = tmp_path / "other"
    other.mkdir()
    facts = json.loads((assets / "config.json").read_text())
    if field == "num_hidden_layers":
        facts.pop("layer_types")
    (other / "config.json").write_text(json.dumps(facts | {field: value}))
    config = v5.v5_qwen3_config(str(assets), str(assets))
    config.checkpoint.enable = config.checkpoint.initial_load_in_hf = True
    config.checkpoint.initial_load_path = str(other)
    with pytest.raises(ValueError, match=message):
        config.model_spec.model.update_from_config(config=config)
    shutil.rmtree(other)
    with pytest.raises(ValueError, match="config.json cannot be read"):
        config.model_spec.model.update_from_config(config=config)


# -- FSDP before torch 2.14 -----------------------------------------------------------------------------


@pytest.mark.parametrize(("capable", "world_size"), [(False, 2), (True, 2), (False, 1)])
def test_mesh_of_plain_parameters(monkeypatch, capable, world_size):
    asked = []
    dims = SimpleNamespace(world_size=world_size, dp_replicate_enabled=False, get_mesh=lambda axes: asked.append(axes))
    original = v5.titan.resolve_fsdp_mesh
    seen = []

    def parallelize(model, *, parallel_dims, **kwargs):
        seen.append(v5.titan.resolve_fsdp_mesh)
        return model

    monkeypatch.setattr(v5.titan, "parallelize_hf_transformers", parallelize)
    monkeypatch.setattr(v5, "shards_typed_parameters", lambda: capable)
    assert v5.parallelize("model", parallel_dims=dims) == "model"
    assert v5.titan.resolve_fsdp_mesh is original
    replaced = not capable and world_size > 1
    assert (seen[0] is not original) == replaced
    if replaced:
        assert seen[0](dims) == (None, None)
        assert asked == [["dp_shard"]]


def test_cpu_keeps_the_backend_that_transformers_needs(assets, monkeypatch):
    monkeypatch.setattr(cpu, "accelerator", lambda: None)
    monkeypatch.setattr(parallelism, "shards_typed_parameters", lambda: False)
    config = v5.v5_qwen3_config(str(assets), str(assets))
    cpu.prepare_config(config)
    assert config.parallelism.spmd_backend == "spmd_types"
