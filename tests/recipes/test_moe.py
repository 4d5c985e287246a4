"""The mixture of experts under activation checkpointing, and its exports."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import load_file
from torchtitan.config import OverrideConfig, apply_overrides
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from trn_kernels.ops import neuron

LAYERS = 2
BIAS = ".moe.expert_bias_E"
HF_SIZES = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
EXPERTS = "trn_kernels.overrides.nki_grouped_experts"
ROPE = "trn_kernels.overrides.nki_rope"


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """The configs of the trainings; they make their assets in the current folder, a training's too."""
    import recorded

    monkeypatch.chdir(tmp_path)
    return recorded


def build(config, *overrides, checkpointing=None):
    """The model of a training config in this process, with seeded weights."""
    model_config = config.model_spec.model
    model_config.update_from_config(config=config)
    apply_overrides(OverrideConfig(imports=[*overrides]), config)
    model = model_config.build()
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights()
        for parameter in model.parameters():
            parameter *= 2  # so that attention and experts weigh in the result
    if checkpointing is not None:
        checkpointing.build().apply(model)
    return model.train()


def gradients(recorded, model):
    """Of one step on the batch of the recorded runs, by parameter."""
    loader = recorded.OneBatch(None, dp_rank=0, seq_len=64, local_batch_size=recorded.GLOBAL_BATCH)
    inputs, labels = next(iter(loader))
    logits = model(inputs["input"], positions=inputs["positions"])
    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    names = (name.replace("_checkpoint_wrapped_module.", "") for name, _ in model.named_parameters())
    return {name: parameter.grad for name, parameter in zip(names, model.parameters(), strict=True)}


def norms_of(tensors):
    return {name: tensor.double().norm().item() for name, tensor in tensors.items()}


def from_checkpoint(model, folder):
    """Flags of a run that starts with the weights of the model."""
    dcp.save(model.state_dict(), checkpoint_id=folder)
    return ["--checkpoint.enable", "--checkpoint.initial_load_path", str(folder)]


@pytest.mark.parametrize("checkpointing", [SelectiveAC.Config(), FullAC.Config()], ids=["selective", "full"])
def test_activation_checkpointing_changes_no_gradient(recorded, monkeypatch, checkpointing):
    # It would last for the whole process.
    monkeypatch.setattr("torchtitan.distributed.activation_checkpoint._disable_dynamo_lru_cache", lambda: None)
    plain = build(recorded.moe_one_step(), EXPERTS, ROPE)
    expected = gradients(recorded, plain)
    wrapped = build(recorded.moe_one_step(), EXPERTS, ROPE, checkpointing=checkpointing)
    assert [*wrapped.state_dict()] == [*plain.state_dict()]
    neuron.reset_launches()
    found = gradients(recorded, wrapped)
    # The forward runs again in the backward.
    assert neuron.launches()["grouped_experts", "emulator"] == 2 * LAYERS
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def test_exports(recorded, train, tmp_path):
    """Weights from a model with torchtitan's experts, through ours, come out unchanged in Hugging Face's form."""
    # The recipe compares its sizes with this file.
    Qwen3MoeConfig(**HF_SIZES).save_pretrained(recorded.debug_assets())
    stock = build(recorded.moe_one_step(), ROPE)
    weights = {name: value.clone() for name, value in stock.state_dict().items()}
    model = build(recorded.moe_one_step(), EXPERTS, ROPE)
    model.load_state_dict(weights)
    here = norms_of(gradients(recorded, model))
    assert all(here.values())
    load = from_checkpoint(stock, tmp_path / "stock")
    save = ["--checkpoint.last_save_model_only", "--checkpoint.export_dtype", "float32", "--checkpoint.last_save_in_hf"]
    for layout, processes in (("one_process", 1), ("sharded", 2)):
        batch = ["--training.local_batch_size", str(recorded.GLOBAL_BATCH // processes)]
        ((*_, norms),), log = train(layout, "moe_one_step", *load, *save, *batch, processes=processes)
        assert f"[Launches] grouped_experts_backward on emulator: {LAYERS}\n" in log
        assert norms == pytest.approx(here, rel=1e-5), layout
        check_hf_export(recorded, tmp_path / layout / "checkpoint" / "step-1", model, weights)


def test_more_ranks_than_experts(recorded, train, tmp_path):
    """FSDP then shards the experts' hidden dimension."""
    model = build(recorded.moe_one_expert(), EXPERTS, ROPE)
    flags = [*from_checkpoint(model, tmp_path / "start"), "--checkpoint.load_only"]
    ((*_, norms),), _ = train("run", "moe_one_expert", *flags)
    # A token has no choice: nothing depends on the router.
    assert norms == pytest.approx(norms_of(gradients(recorded, model)), rel=1e-5, abs=1e-9)


def check_hf_export(recorded, folder, model, weights):
    """The exported files hold the weights, and transformers computes the same with them."""
    spec = recorded.moe_one_step().model_spec
    exported = {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}
    restored = spec.state_dict_adapter(spec.model, None).from_hf(dict(exported))
    # transformers' Qwen3 has no bias in the choice of experts.
    assert restored.keys() == {name for name in weights if not name.endswith(BIAS)}
    for name, value in restored.items():
        assert torch.equal(value, weights[name]), name
    theirs, info = Qwen3MoeForCausalLM.from_pretrained(
        folder, config=Qwen3MoeConfig(**HF_SIZES), dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.randint(0, 2048, (2, 64), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)
