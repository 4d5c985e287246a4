"""Our kernels in Transformers' Qwen3 and Qwen3-MoE against the same models without them."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe

import trn_kernels
from trn_kernels.ops.neuron import launches, reset_launches
from trn_kernels.overrides.transformers import EXPERTS, _apply_rope, use_nki_kernels

LAYERS, VOCAB, EXPERT_COUNT = 2, 97, 7
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": None,
}


def model(kind="dense", attention="sdpa", dtype=torch.float32, **changes):
    torch.manual_seed(0)
    if kind == "dense":
        built = Qwen3ForCausalLM(Qwen3Config(**SIZES | changes, tie_word_embeddings=True))
    else:
        moe = {"num_experts": EXPERT_COUNT, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
        built = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | moe | {"norm_topk_prob": True} | changes))
    built.set_attn_implementation(attention)
    return built.to(dtype)


def batch(rows=2, length=19):
    random = torch.Generator().manual_seed(1)
    return torch.randint(VOCAB, (rows, length), generator=random)


def step(network, **inputs):
    """Logits, loss and all gradients."""
    network.zero_grad()
    out = network(batch(), labels=batch(), **inputs)
    out.loss.backward()
    return {"logits": out.logits, "loss": out.loss} | {n: p.grad.clone() for n, p in network.named_parameters()}


def assert_same(ours, stock, **tolerance):
    for name, expected in stock.items():
        torch.testing.assert_close(ours[name], expected, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


def counted(function, *arguments, **keywords):
    reset_launches()
    return function(*arguments, **keywords), {op: count for (op, _), count in launches().items()}


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("rows", [1, 3])
def test_rope_equals_transformers_bit_for_bit(rows, unsqueeze_dim):
    """The function and its gradients, with a table per batch or one for all; asymmetric halves show a wrong sign."""
    random = torch.Generator().manual_seed(2)
    cos, sin = torch.randn(2, rows, 13, 16, generator=random)
    outputs = []
    for function in (_apply_rope, modeling_qwen3.apply_rotary_pos_emb):
        random.manual_seed(3)
        q, k = (torch.randn(3, 13, n, 16, generator=random).requires_grad_() for n in (6, 2))
        views = (q.transpose(1, 2), k.transpose(1, 2)) if unsqueeze_dim == 1 else (q, k)
        rotated = function(*views, cos, sin, unsqueeze_dim)
        grads = [torch.randn(x.shape, generator=random) for x in rotated]
        outputs.append([*rotated, *torch.autograd.grad(rotated, (q, k), grads)])
    assert all(map(torch.equal, *outputs))


def test_rope_promotes_like_transformers():
    q, k, cos, sin = (torch.randn(1, n, 4, 8) for n in (2, 1, 1, 1))
    for table in (torch.float32, torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            arguments = (q.to(dtype), k.to(dtype), cos[0].to(table), sin[0].to(table))
            ours, stock = _apply_rope(*arguments), modeling_qwen3.apply_rotary_pos_emb(*arguments)
            assert [x.dtype for x in ours] == [x.dtype for x in stock]
            torch.testing.assert_close(ours, stock, rtol=2**-6, atol=2**-6)
    with pytest.raises(ValueError, match="unsqueeze_dim is 3; it must be 1 .* or 2"):
        _apply_rope(q, k, cos[0], sin[0], unsqueeze_dim=3)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_dense_equals_stock(attention, checkpointing):
    network = model(attention=attention)
    network.train()
    if checkpointing:
        network.gradient_checkpointing_enable()
    stock = step(network)
    with use_nki_kernels(network):
        ours, ran = counted(step, network)
    assert torch.equal(ours["logits"], stock["logits"])
    # The rotated gradients are equal too; sums over them, such as that of q_norm, run in the order of their strides.
    assert_same(ours, stock, rtol=1e-4, atol=1e-8)
    assert ran == {"rope": LAYERS * (1 + checkpointing), "rope_backward": LAYERS}
    after, ran = counted(step, network)
    assert ran == {}
    assert_same(after, stock, rtol=0, atol=0)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_moe_equals_stock(checkpointing, implementation):
    network = model("moe")
    network.set_experts_implementation(implementation)
    network.train()
    if checkpointing:
        network.gradient_checkpointing_enable()
    stock = step(network)
    kernels = use_nki_kernels(network)
    ours, ran = counted(step, network)
    assert_same(ours, stock, rtol=1e-4, atol=2e-6)
    again = 1 + checkpointing
    assert ran == {
        "rope": LAYERS * again,
        "rope_backward": LAYERS,
        "grouped_experts": LAYERS * again,
        "grouped_experts_backward": LAYERS,
    }
    kernels.restore()
    after, ran = counted(step, network)
    assert ran == {}
    assert_same(after, stock, rtol=0, atol=0)


def test_bfloat16_is_as_close_to_the_truth_as_stock():
    """One rounding against several: not equal, so judged by the error of the stock model in the same dtype."""
    for kind in ("dense", "moe"):
        truth = model(kind)(batch()).logits.double()  # float32, of the same weights
        network = model(kind, dtype=torch.bfloat16)
        network.set_experts_implementation("eager")  # torch's grouped_mm takes no width of 20
        stock_error = (network(batch()).logits.double() - truth).abs().mean()
        with use_nki_kernels(network):
            error = (network(batch()).logits.double() - truth).abs().mean()
        assert error <= 1.1 * stock_error


def test_three_optimizer_steps_stay_finite_and_equal():
    """Gradients that are wrong only after an update, or only for experts that had no token."""
    results = []
    for switch in (False, True):
        network = model("moe", num_experts=16, num_experts_per_tok=2)
        if switch:
            use_nki_kernels(network)
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
        for _ in range(3):
            loss = step(network)["loss"]
            optimizer.step()
        results.append({"loss": loss} | dict(network.named_parameters()))
    assert all(torch.isfinite(x).all() for x in results[1].values())
    # Adam turns a gradient of either tiny sign into a whole step of 1e-3.
    torch.testing.assert_close(results[1]["loss"], results[0]["loss"], rtol=1e-5, atol=0)


def test_experts_without_tokens_get_zero_gradients():
    network = model("moe", num_experts=64, num_experts_per_tok=1)
    with use_nki_kernels(network):
        network(batch(1, 3)).logits.sum().backward()
    experts = network.model.layers[0].mlp.experts
    grads = experts.gate_up_proj.grad.flatten(1).abs().amax(1)
    assert 1 <= (grads > 0).sum() <= 3
    assert ((grads == 0) | torch.isfinite(grads)).all()


def test_gate_and_up_are_the_halves_that_transformers_means():
    """Gate rows are 1, up rows 2, down 3 + expert: swapped halves give another silu."""
    network = model("moe")
    experts = network.model.layers[0].mlp.experts
    width = experts.intermediate_dim
    with torch.no_grad():
        experts.gate_up_proj[:, :width], experts.gate_up_proj[:, width:] = 1.0, 2.0
        experts.down_proj.copy_((3.0 + torch.arange(EXPERT_COUNT))[:, None, None].expand_as(experts.down_proj))
        arguments = (torch.rand(5, 48) / 48, torch.randint(EXPERT_COUNT, (5, 3)), torch.rand(5, 3))
        stock = experts(*arguments)
        with use_nki_kernels(network):
            ours = experts(*arguments)
        experts.gate_up_proj.copy_(experts.gate_up_proj.roll(width, 1))
        swapped = experts(*arguments)
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-5)
    assert ((swapped - stock).abs() > 0.01 * stock.abs()).all()


def test_expert_parallel_marks_are_skipped():
    """Index E stands for an expert of another rank: its row counts nothing, and NaN in it does not spread."""
    network = model("moe")
    experts = network.model.layers[0].mlp.experts
    hidden, weights = torch.randn(4, 48), torch.rand(4, 2)
    index = torch.tensor([[0, EXPERT_COUNT], [EXPERT_COUNT, EXPERT_COUNT], [2, 1], [6, EXPERT_COUNT]])
    network.set_experts_implementation("eager")
    stock = experts(hidden, index, weights)
    with use_nki_kernels(network):
        ours = experts(hidden, index, weights)
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6)
    assert (ours[1] == 0).all()


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_generation_with_a_cache(kind):
    """A prefill, then one position at a time; a left-padded row has other positions than the full one."""
    network = model(kind)
    prompt = batch(2, 9)
    mask = torch.ones_like(prompt)
    mask[1, :4] = 0
    arguments = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    arguments |= {"output_logits": True, "return_dict_in_generate": True}
    stock = network.generate(prompt, **arguments)
    with use_nki_kernels(network):
        ours, ran = counted(network.generate, prompt, **arguments)
    assert ran["rope"] == LAYERS * 6
    assert torch.equal(ours.sequences, stock.sequences)
    tolerance = {"rtol": 0, "atol": 0} if kind == "dense" else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(stock.logits), **tolerance)


def test_packed_documents_keep_their_positions():
    network = model()
    positions = torch.cat([torch.arange(11), torch.arange(8)])[None].expand(2, -1)
    stock = network(batch(), position_ids=positions).logits
    with use_nki_kernels(network):
        ours = network(batch(), position_ids=positions).logits
        dropped = network(batch()).logits
    assert torch.equal(ours, stock)
    assert not torch.equal(ours, dropped)


def test_router_logits_and_auxiliary_loss_are_untouched():
    network = model("moe", router_aux_loss_coef=0.5)
    inputs = {"labels": batch(), "output_router_logits": True}
    stock = network(batch(), **inputs)
    with use_nki_kernels(network):
        ours = network(batch(), **inputs)
    assert len(ours.router_logits) == LAYERS
    torch.testing.assert_close(ours.router_logits, stock.router_logits)
    torch.testing.assert_close(ours.aux_loss, stock.aux_loss)
    torch.testing.assert_close(ours.loss, stock.loss)
    for logits in ours.router_logits:  # logits, not probabilities
        assert ((logits.sum(-1) - 1).abs() > 1e-3).any()


def test_only_the_given_model_changes():
    functions = [vars(module)["apply_rotary_pos_emb"] for module in (modeling_qwen3, modeling_qwen3_moe)]
    forwards = [modeling_qwen3.Qwen3Attention.forward, modeling_qwen3_moe.Qwen3MoeExperts.forward]
    for kind in ("dense", "moe"):
        config = model(kind).config
        network, other = type(model(kind))(config), type(model(kind))(config)  # two models, one config
        before = [(name, dict(vars(module))) for name, module in network.named_modules()]
        with use_nki_kernels(network) as kernels:
            _, ran = counted(other, batch())
            assert ran == {}
            _, ran = counted(network, batch())
            assert ran["rope"] == LAYERS
            attention = {f"model.layers.{i}.self_attn": "trn_kernels::rope" for i in range(LAYERS)}
            experts = {f"model.layers.{i}.mlp.experts": "trn_kernels::grouped_experts" for i in range(LAYERS)}
            assert kernels.modules == attention | (experts if kind == "moe" else {})
        after = [(name, dict(vars(module))) for name, module in network.named_modules()]
        for (name, old), (_, new) in zip(before, after, strict=True):
            assert old.keys() == new.keys(), name
            assert all(new[key] is old[key] for key in old if key in ("config", "forward")), name
        assert config._experts_implementation != EXPERTS
    assert functions == [vars(module)["apply_rotary_pos_emb"] for module in (modeling_qwen3, modeling_qwen3_moe)]
    assert forwards == [modeling_qwen3.Qwen3Attention.forward, modeling_qwen3_moe.Qwen3MoeExperts.forward]


def test_copies_and_state_dicts():
    network = model("moe")
    keys = list(network.state_dict())
    kernels = use_nki_kernels(network)
    assert list(network.state_dict()) == keys
    twin = copy.deepcopy(network)
    with torch.no_grad():
        twin.model.layers[0].self_attn.q_norm.weight.mul_(2)
    _, ran = counted(twin, batch())
    assert ran["grouped_experts"] == ran["rope"] == LAYERS
    assert not torch.equal(twin(batch()).logits, network(batch()).logits)  # its own weights, not the first one's
    kernels.restore()
    kernels.restore()
    assert use_nki_kernels(network).modules == kernels.modules


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_compiles_to_one_graph(kind):
    network = model(kind)
    use_nki_kernels(network)
    expected = network(batch(), use_cache=False).logits
    torch.compiler.reset()
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    logits, ran = counted(compiled, batch(), use_cache=False)
    assert ran["rope"] == LAYERS
    torch.testing.assert_close(logits.logits, expected)


def test_autocast():
    network = model("moe")
    with torch.autocast("cpu", torch.bfloat16):
        stock = network(batch()).logits
        with use_nki_kernels(network):
            ours, ran = counted(network, batch())
    assert ran == {"rope": LAYERS, "grouped_experts": LAYERS}
    assert ours.logits.dtype == stock.dtype
    assert (ours.logits - stock).abs().max() < 0.05 * stock.abs().max()


def test_what_cannot_be_switched_is_refused():
    mixtral = MixtralForCausalLM(MixtralConfig(**SIZES | {"head_dim": 8}, num_local_experts=2))
    with pytest.raises(ValueError, match="MixtralForCausalLM without attention of Qwen3"):
        use_nki_kernels(mixtral)
    network = model("moe")
    use_nki_kernels(network)
    with pytest.raises(ValueError, match="model.layers.0.self_attn .*switched twice"):
        use_nki_kernels(network)
    assert network.model.layers[0].mlp.experts.config._experts_implementation == EXPERTS
    gelu = model("moe", hidden_act="gelu")
    with pytest.raises(ValueError, match="hidden_act is 'gelu'; .* 'silu'"):
        use_nki_kernels(gelu)
    assert "forward" not in vars(gelu.model.layers[0].self_attn)  # nothing is left half switched
    biased = model("moe")
    biased.model.layers[1].mlp.experts.has_bias = True
    with pytest.raises(ValueError, match="Qwen3MoeExperts.has_bias is True; our experts need False"):
        use_nki_kernels(biased)


def test_another_way_of_applying_rope_is_refused(monkeypatch):
    def forward(self, hidden_states, **kwargs):
        return hidden_states, None

    monkeypatch.setattr(modeling_qwen3.Qwen3Attention, "forward", forward)
    with pytest.raises(RuntimeError, match="forward does not call apply_rotary_pos_emb"):
        use_nki_kernels(model())


def test_experts_by_transformers_own_argument():
    """Without use_nki_kernels: the experts alone, by name, for models whose experts are laid out like these."""
    network = model("moe")
    stock = network(batch()).logits
    network.set_experts_implementation(EXPERTS)
    ours, ran = counted(network, batch())
    assert ran == {"grouped_experts": LAYERS}
    torch.testing.assert_close(ours.logits, stock, rtol=1e-4, atol=1e-6)
    gelu = model("moe", hidden_act="gelu", experts_implementation=EXPERTS)
    with pytest.raises(ValueError, match="hidden_act is 'gelu'"):
        gelu(batch())


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_needs_no_torchtitan():
    code = (
        "import sys; sys.modules['torchtitan'] = None\nfrom trn_kernels.overrides.transformers import use_nki_kernels"
    )
    assert run(f"{code}; print(use_nki_kernels.__name__)") == ["use_nki_kernels"]


def test_torchtitan_may_come_later():
    """Its overrides are registered by the first name that is asked for."""
    cpu = Path(trn_kernels.__file__).parent / "recipes" / "cpu.py"
    lines = [
        "import runpy, sys, trn_kernels.overrides.transformers",
        "print('torchtitan' in sys.modules)",
        f"runpy.run_path({str(cpu)!r})['stub_triton']()",
        "from torchtitan.config.override import _REGISTRY",
        "print(len(_REGISTRY))",
        "from trn_kernels.overrides import nki_rope",
        "print(*sorted(_REGISTRY))",
    ]
    names = ["", ".nki_grouped_experts", ".nki_rope", ".nki_selective_ac"]
    assert run("\n".join(lines)) == ["False", "0", *(f"trn_kernels.overrides{name}" for name in names)]
