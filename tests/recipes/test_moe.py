"""The mixture of experts in every layout, in checkpoints, and under activation checkpointing."""

import importlib.util
import sys
from pathlib import Path

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
    monkeypatch.chdir(tmp_path)  # its configs make their assets in the current folder
    spec = importlib.util.spec_from_file_location("recorded", Path(__file__).with_name("recorded.py"))
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "recorded", module)
    spec.loader.exec_module(module)
    return module


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


def test_layouts_and_checkpoints(recorded, train, tmp_path):
    """One step in every layout: the same gradients of every parameter, and the same checkpoints.

    The weights come from a model with torchtitan's experts and go back into one, through torchtitan's checkpoints.
    With our experts everything is float32, also where torchtitan's would multiply in bfloat16.
    """
    # The recipe compares its sizes with this file.
    Qwen3MoeConfig(**HF_SIZES).save_pretrained(recorded.debug_assets())
    stock = build(recorded.moe_one_step(), ROPE)
    weights = {name: value.clone() for name, value in stock.state_dict().items()}
    load = from_checkpoint(stock, tmp_path / "stock")
    save = ["--checkpoint.last_save_model_only", "--checkpoint.export_dtype", "float32"]
    layouts = {
        "one_process": "--training.local_batch_size 4 --checkpoint.last_save_in_hf",
        "sharded": "--checkpoint.last_save_in_hf",
        # Of torchtitan's backends only this one exchanges unequal numbers of rows through gloo.
        "expert_parallel": "--parallelism.expert_parallel_degree 2 --parallelism.spmd_backend partial_dtensor"
        " --compile.enable --compile.backend aot_eager",
        "tensor_parallel": "--training.local_batch_size 4 --parallelism.tensor_parallel_degree 2",
    }
    steps = {}
    for layout, flags in layouts.items():
        processes = 1 if layout == "one_process" else 2
        (steps[layout],), log = train(layout, "moe_one_step", *load, *save, *flags.split(), processes=processes)
        assert f"[Launches] grouped_experts_backward on emulator: {LAYERS}\n" in log

    model = build(recorded.moe_one_step(), EXPERTS, ROPE)
    model.load_state_dict(weights)
    here = norms_of(gradients(recorded, model))
    loss, _, total, norms = steps.pop("one_process")
    assert norms == pytest.approx(here, rel=1e-5)
    assert all(norms.values())
    for layout, step in steps.items():
        assert step[0] == pytest.approx(loss, rel=1e-6), layout
        assert step[2] == pytest.approx(total, rel=1e-4), layout  # torchtitan sums it in float32
        assert step[3] == pytest.approx(norms, rel=1e-5), layout

    biases = []
    for layout in ("expert_parallel", "tensor_parallel"):
        checkpoint = tmp_path / layout / "checkpoint" / "step-1"
        assert dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata.keys() == weights.keys()
        loaded = {name: torch.full_like(value, torch.nan) for name, value in weights.items()}
        dcp.load(loaded, checkpoint_id=checkpoint)
        stock.load_state_dict(loaded, strict=True)
        # The bias that balances the load moves with the counts of tokens, of all ranks.
        biases.append(torch.stack([loaded.pop(name) for name in weights if name.endswith(BIAS)]))
        for name, value in loaded.items():
            assert torch.equal(value, weights[name]), name
    assert len(biases[0]) == LAYERS
    assert biases[0].any()
    assert torch.equal(*biases)

    for layout in ("one_process", "sharded"):
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
