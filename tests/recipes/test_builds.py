"""Older builds of torchtitan, by stand-ins of what they have otherwise: its main branch of June and July 2026.

Overrides with names and experts before their split are in tests/overrides. What was run with the builds themselves is
in the README.
"""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from torchtitan.models.common.attention import ScaledDotProductAttention

from trn_kernels.recipes import plan, qwen3


@pytest.fixture(autouse=True)
def assets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_arguments_have_a_default(tmp_path):
    """`parse_args` took them from `sys.argv` by its default; None was an error."""
    code = """
import sys
from types import ModuleType
from trn_kernels.recipes import train

class ConfigManager:
    def parse_args(self, args=sys.argv[1:]):
        from trn_kernels.recipes.qwen3 import native_qwen3_debug
        config = native_qwen3_debug()
        print("parsed", len(args), *args)
        return config

stand_in = ModuleType("torchtitan.train")
stand_in.ConfigManager, stand_in.main = ConfigManager, lambda: stand_in.ConfigManager().parse_args()
import torchtitan
sys.modules["torchtitan.train"] = torchtitan.train = stand_in
train.main()
"""
    command = [sys.executable, "-c", code, "--config", "x"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "parsed 2 --config x\n" in done.stdout, done.stderr


@pytest.mark.parametrize("loss", [SimpleNamespace(num_chunks=8), SimpleNamespace(global_vocab_size=None)])
def test_losses_that_wrap_no_other(monkeypatch, loss):
    """Until July chunks were a loss of their own, which looked at the logits for the size of the vocabulary."""
    original = qwen3.qwen3_32b

    def qwen3_32b():
        config = original()
        config.loss = loss
        return config

    monkeypatch.setattr(qwen3, "qwen3_32b", qwen3_32b)
    assert qwen3.native_qwen3_debug().loss is loss
    assert vars(loss) in ({"num_chunks": 8}, {"global_vocab_size": 2048})


def test_checkpointing_by_mode(monkeypatch):
    """Until 15 June."""
    original = qwen3.qwen3_32b

    def qwen3_32b():
        config = original()
        config.activation_checkpoint = SimpleNamespace(mode="full")
        return config

    monkeypatch.setattr(qwen3, "qwen3_32b", qwen3_32b)
    assert qwen3.native_qwen3_debug().activation_checkpoint.mode == "none"


def test_attention_by_name(monkeypatch):
    """Where the model takes "sdpa" by name, nothing is swapped."""
    asked = []

    def model_registry(flavor, attn_backend):
        asked.append((flavor, attn_backend))
        spec = original(flavor)
        for layer in spec.model.layers:
            layer.attention.inner_attention = by_name
        return spec

    original, by_name = qwen3.model_registry, ScaledDotProductAttention.Config()
    monkeypatch.setattr(qwen3, "model_registry", model_registry)
    layers = qwen3.native_qwen3_debug().model_spec.model.layers
    assert asked == [("debugmodel", "sdpa")]
    assert all(layer.attention.inner_attention is by_name for layer in layers)


def test_experts_before_their_split():
    """Until 16 July one config held the experts and the dispatcher of tokens."""

    def moe():
        sizes = {"num_experts": 64, "top_k": 8}
        dispatcher = SimpleNamespace(**sizes)
        router = SimpleNamespace(**sizes, gate=SimpleNamespace(out_features=64))
        experts = SimpleNamespace(num_experts=64, hidden_dim=32, token_dispatcher=dispatcher)
        return SimpleNamespace(num_experts=64, router=router, experts=experts)

    model = SimpleNamespace(layers=[SimpleNamespace(moe=moe()) for _ in range(3)])
    qwen3._reduce(model, "old", 2, 16, 4)
    assert len(model.layers) == 2
    for layer in model.layers:
        experts, router = layer.moe.experts, layer.moe.router
        dispatcher = experts.token_dispatcher
        counts = (layer.moe.num_experts, experts.num_experts, dispatcher.num_experts, router.num_experts)
        assert counts == (16,) * 4
        assert (router.gate.out_features, router.top_k, dispatcher.top_k) == (16, 4, 4)
        assert qwen3._inner_experts(layer.moe) is experts


def test_transformers_backend_without_the_mesh_to_replace(monkeypatch):
    from trn_kernels.recipes import v5

    monkeypatch.delattr(v5.titan, "resolve_fsdp_mesh")
    monkeypatch.setattr(v5.titan, "parallelize_hf_transformers", lambda model, **kwargs: (model, kwargs))
    dims = SimpleNamespace(world_size=2)
    assert v5.parallelize("model", parallel_dims=dims, training=1) == ("model", {"parallel_dims": dims, "training": 1})
    assert not hasattr(v5.titan, "resolve_fsdp_mesh")


def test_transformers_backend_that_does_not_import(monkeypatch):
    monkeypatch.setitem(sys.modules, "trn_kernels.recipes.v5", None)
    message = (
        "v5_ recipes need torchtitan's transformers_modeling_backend as of 20 July 2026 or later; .*ImportError|Module"
    )
    with pytest.raises(RuntimeError, match=message):
        qwen3.v5_qwen3_debug()


def test_plan_says_what_it_needs():
    config = qwen3.native_qwen3_debug()
    old = SimpleNamespace(parallelism=replace(config.parallelism), training=SimpleNamespace(enable_cpu_offload=False))
    with pytest.raises(RuntimeError, match="plan needs torchtitan 0.3; this build is an older one"):
        plan.plan(old, 1)
