"""The rope operators against torchtitan's CosSinRoPE, PyTorch's autograd and ``opcheck``."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.library import opcheck
from torchtitan.models.common.rope import CosSinRoPE

from trn_kernels.ops import neuron, rope, rope_hf
from trn_kernels.ops.rope import rope_hf_reference, rope_reference


@pytest.fixture(params=["1", "2"], ids=["lnc1", "lnc2"])
def lnc(request, monkeypatch):
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", request.param)
    return int(request.param)


def make(shape, heads, dtype=torch.float32, rows=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    batch, seq, head_dim = shape
    query, key = (torch.randn(batch, seq, n, head_dim, generator=generator, dtype=torch.float32) for n in heads)
    table = torch.randn(rows or seq + 7, 2 * head_dim, generator=generator)
    return query.to(dtype), key.to(dtype), table


def packed_positions(batch, seq):
    """Two documents per row, of a different length in every row; positions restart at 0."""
    rows = []
    for b in range(batch):
        first = (seq * (b + 1)) // (batch + 2)
        rows.append(torch.cat([torch.arange(first), torch.arange(seq - first)]))
    return torch.stack(rows)


def gradients(function, query, key, *args):
    query, key = (x.detach().clone().requires_grad_() for x in (query, key))
    outputs = function(query, key, *args)
    generator = torch.Generator().manual_seed(9)
    upstream = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in outputs]
    return (*outputs, *torch.autograd.grad(outputs, (query, key), upstream))


# 1: nothing to split; 64, 100: part of a tile; 129: a tile and a row; 423: odd; 1024: several tiles per core.
@pytest.mark.parametrize("seq", [1, 64, 100, 129, 256, 423, 1024])
@pytest.mark.parametrize("heads", [(32, 8), (5, 1), (7, 7)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 92, 128])
def test_bit_for_bit_torchtitan(seq, heads, head_dim, lnc):
    torch.manual_seed(0)
    module = CosSinRoPE.Config(dim=head_dim, max_seq_len=max(seq, 8), theta=1e6).build()
    # The large product of heads once; a batch above 1 everywhere.
    batch = 2 if seq < 1024 or heads == (5, 1) else 1
    for dtype in (torch.float32, torch.bfloat16):
        query, key, _ = make((batch, seq, head_dim), heads, dtype)
        shuffled = torch.randint(seq, (batch, seq), generator=torch.Generator().manual_seed(1))
        for positions in (None, packed_positions(batch, seq), shuffled.to(torch.int32)):
            stock = None if positions is None else positions.long()
            want = gradients(module, query, key, stock)
            got = gradients(rope, query, key, module.cache, positions)
            for a, b in zip(got, want, strict=True):
                assert a.is_contiguous() and a.dtype == dtype
                assert torch.equal(a, b)


def test_views_give_the_bits_of_their_contiguous_twin(lnc):
    query, key, table = make((3, 130, 64), (4, 4))
    qkv = torch.randn(3, 130, 12, 64)
    heads_first = torch.randn(3, 4, 130, 64)
    views = {
        "transposed": heads_first.transpose(1, 2),
        "part of a fused projection": qkv[:, :, 8:],
        "offset": torch.randn(4, 130, 4, 64)[1:],
        "expanded": torch.randn(1, 130, 4, 64).expand(3, -1, -1, -1),
    }
    for name, view in views.items():
        before = view.clone()
        for a, b in zip(gradients(rope, view, key, table), gradients(rope, view.contiguous(), key, table), strict=True):
            assert torch.equal(a, b), name
        assert torch.equal(view, before), name


def test_an_expanded_gradient(lnc):
    query, key, table = make((2, 70, 64), (3, 1))
    query.requires_grad_()
    rope(query, key, table)[0].sum().backward()  # the gradient of sum has strides 0
    want = rope_reference(torch.ones(2, 70, 3, 64), key, table, None, False, True)[0]
    assert torch.equal(query.grad, want)


def test_tables_per_batch_broadcast_as_documented():
    query, key, table = make((3, 128, 64), (4, 2))
    per_batch = torch.randn(3, 140, 128)
    for cache in (table, table[None], table[None].expand(3, -1, -1)):
        assert torch.equal(rope(query, key, cache)[0], rope_reference(query, key, table)[0])
    positions = torch.randint(140, (3, 128))
    for index in (None, positions, positions[:1], positions[:1].expand(3, -1)):
        got, want = (f(query, key, per_batch, index) for f in (rope, rope_reference))
        for b in range(3):
            alone = rope(
                query[b : b + 1], key[b : b + 1], per_batch[b], None if index is None else index[b % len(index)][None]
            )
            assert torch.equal(got[0][b], want[0][b]) and torch.equal(got[0][b], alone[0][0])


def test_an_empty_batch_with_a_table_per_batch():
    query, key, table = make((2, 16, 64), (4, 2))
    for cache in (table.expand(0, -1, -1), table[None]):
        assert rope(query[:0], key[:0], cache)[0].shape == (0, 16, 4, 64)


def test_the_second_document_equals_the_first():
    query, key, table = make((1, 192, 64), (2, 1))
    query[:, 96:], key[:, 96:] = query[:, :96], key[:, :96]
    for dtype in (torch.int64, torch.int32):
        q, k = rope(query, key, table, torch.arange(96, dtype=dtype).repeat(2)[None])
        assert torch.equal(q[:, 96:], q[:, :96]) and torch.equal(k[:, 96:], k[:, :96])


def test_backward_undoes_forward_for_a_true_table():
    module = CosSinRoPE.Config(dim=64, max_seq_len=128).build()
    query, key, _ = make((1, 128, 64), (2, 1))
    rotated = torch.ops.trn_kernels.rope(query, key, module.cache)
    torch.testing.assert_close(rotated[0].norm(dim=-1), query.norm(dim=-1))
    back = torch.ops.trn_kernels.rope_backward(*rotated, module.cache)
    torch.testing.assert_close(back[0], query)


def test_the_error_is_one_rounding():
    query, key, _ = make((1, 256, 128), (4, 1), torch.bfloat16)
    module = CosSinRoPE.Config(dim=128, max_seq_len=256, theta=1e6).build()
    cos, sin = module.cache.double()[None, :, None].chunk(2, dim=-1)
    first, second = query.double().chunk(2, dim=-1)
    truth = query.double() * cos + torch.cat((-second, first), dim=-1) * sin

    def error(y):
        return (y.double() - truth).square().mean().sqrt()

    rounding = error(truth.bfloat16())
    assert error(rope(query, key, module.cache)[0]) <= 1.001 * rounding
    # A table in bf16 costs accuracy, which is why float32 is recommended.
    assert error(rope(query, key, module.cache.bfloat16())[0]) > 1.1 * rounding


def test_only_what_needs_a_gradient_gets_one():
    query, key, table = make((1, 10, 64), (2, 1))
    key.requires_grad_()
    table.requires_grad_()
    rope(query, key, table)[1].sum().backward()
    assert query.grad is None and table.grad is None and key.grad is not None


def test_gradient_of_the_gradient():
    query, key, table = make((1, 10, 64), (2, 1))
    query.requires_grad_()
    weight = torch.randn(1, 10, 2, 64, requires_grad=True)
    (grad,) = torch.autograd.grad(rope(query, key, table)[0], query, weight, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), weight)
    ones = rope_reference(torch.ones_like(query), key, table)[0]
    assert torch.equal(second, ones)


# -- rope_hf --------------------------------------------------------------------------------------------


def test_rope_hf_equals_rope(lnc):
    query, key, table = make((2, 256, 64), (4, 2), torch.bfloat16)
    for a, b in zip(gradients(rope_hf, query, key, table), gradients(rope, query, key, table), strict=True):
        assert torch.equal(a, b) and a.is_contiguous()
    per_batch = torch.randn(2, 256, 128)
    assert torch.equal(rope_hf(query, key, per_batch)[0], rope(query, key, per_batch)[0])


def test_rope_hf_says_which_length_it_needs(lnc):
    query, key, table = make((1, 64, 64), (1, 1))
    neuron.reset_launches()
    with pytest.raises(ValueError, match=rf"length is 64; .* multiple of {128 * lnc} \(128 \* LNC, LNC is {lnc}\)"):
        rope_hf(query, key, table)
    assert neuron.launches() == {}


# -- PyTorch's contract for operators -------------------------------------------------------------------

LAYOUTS = {
    "contiguous": lambda: torch.randn(2, 128, 3, 8),
    "transposed": lambda: torch.randn(2, 3, 128, 8).transpose(1, 2),
    "offset": lambda: torch.randn(3, 128, 3, 8)[1:],
    "expanded": lambda: torch.randn(1, 128, 1, 8).expand(2, -1, 3, -1),
    "empty batch": lambda: torch.randn(0, 128, 3, 8),
    "empty sequence": lambda: torch.randn(2, 0, 3, 8),
    "no heads": lambda: torch.randn(2, 128, 0, 8),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["rope", "rope_backward", "rope_hf", "rope_hf_backward"])
def test_opcheck(name, layout, monkeypatch):
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    torch.manual_seed(0)
    query = LAYOUTS[layout]().detach().requires_grad_()
    key = torch.randn(*query.shape[:2], 2, 8, requires_grad=True)
    table = torch.randn(130, 16)
    op = getattr(torch.ops.trn_kernels, name).default
    opcheck(op, (query, key, table))
    if "hf" not in name:
        for shape in (query.shape[:2], (1, query.shape[1])):
            opcheck(op, (query, key, table, torch.randint(130, shape)))


def test_one_of_two_without_heads():
    query, key, table = make((2, 50, 64), (3, 0))
    got = rope(query, key, table)
    assert torch.equal(got[0], rope_reference(query, key, table)[0]) and got[1].shape == (2, 50, 0, 64)
    got = rope(key, query, table)
    assert torch.equal(got[1], rope_reference(query, key, table)[0]) and got[0].shape == (2, 50, 0, 64)


def test_fakes_launch_nothing():
    neuron.reset_launches()
    with torch._subclasses.FakeTensorMode() as mode:
        query, key, table = (mode.from_tensor(x) for x in make((2, 256, 64), (4, 2)))
        for op in (rope, rope_hf):
            assert op(query, key, table)[0].stride() == query.stride()
    meta = [x.to("meta") for x in make((2, 256, 64), (4, 2))]
    assert rope(*meta)[1].shape == (2, 256, 2, 64)
    assert neuron.launches() == {}


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.out = torch.nn.Linear(32, 64), torch.nn.Linear(32, 32), torch.nn.Linear(64, 32)

    def forward(self, x, table, positions):
        query, key = rope(self.q(x).unflatten(-1, (4, 16)), self.k(x).unflatten(-1, (2, 16)), table, positions)
        scores = torch.einsum("bsnh,btnh->bnst", query, key.repeat_interleave(2, dim=2)).softmax(-1)
        return self.out(torch.einsum("bnst,btnh->bsnh", scores, query).flatten(2))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_once_with_the_eager_gradients(backend):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    block, eager = Block(), Block()
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    table, x = torch.randn(40, 32), torch.randn(2, 40, 32)
    for step in range(3):
        positions = torch.randint(40, (2, 40))
        neuron.reset_launches()
        compiled(x, table, positions).square().sum().backward()
        assert neuron.launches() == {("rope", "emulator"): 1, ("rope_backward", "emulator"): 1}, step
        eager(x, table, positions).square().sum().backward()
    assert counters["stats"]["unique_graphs"] == 1
    for a, b in zip(block.parameters(), eager.parameters(), strict=True):
        # inductor's own kernels around the operator round differently from eager's
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


def test_activation_checkpointing_recomputes_the_same():
    query, key, table = make((1, 100, 64), (2, 1))
    plain = gradients(rope, query, key, table)
    again = gradients(
        lambda *args: torch.utils.checkpoint.checkpoint(rope, *args, use_reentrant=False), query, key, table
    )
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(a, b)


# -- any input ------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_shape_equals_the_reference(data):
    draw = data.draw
    batch, seq = draw(st.integers(1, 3), "batch"), draw(st.integers(0, 300), "sequence")
    heads = (draw(st.integers(1, 9), "query heads"), draw(st.integers(1, 9), "key heads"))
    head_dim = 2 * draw(st.integers(1, 70), "head_dim / 2")
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), "dtype")
    query, key, table = make((batch, seq, head_dim), heads, dtype, seed=draw(st.integers(0, 99)))
    table = table.to(draw(st.sampled_from([torch.float32, dtype]), "table dtype"))
    positions = None
    if draw(st.booleans(), "positions"):
        rows = draw(st.sampled_from([1, batch]), "rows of positions")
        index_dtype = draw(st.sampled_from([torch.int32, torch.int64, torch.int16]), "dtype of positions")
        positions = torch.randint(len(table), (rows, seq)).to(index_dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEURON_LOGICAL_NC_CONFIG", draw(st.sampled_from(["1", "2"]), "LNC"))
        got = gradients(rope, query, key, table, positions)
    for a, b in zip(got, gradients(rope_reference, query, key, table, positions), strict=True):
        # Adding the two products is the only step; fp16 and bf16 gradients of the reference are as exact.
        assert torch.equal(a, b)


# -- bad input ------------------------------------------------------------------------------------------


def wrong(**changes):
    query, key, table = make((2, 16, 8), (3, 1))
    arguments = {"query": query, "key": key, "rope_cache": table, "positions": None, **changes}
    return arguments


POSITIONS = torch.zeros(2, 16, dtype=torch.int64)
BAD = {
    "odd head_dim": (
        wrong(query=torch.randn(2, 16, 3, 7), key=torch.randn(2, 16, 1, 7), rope_cache=torch.randn(20, 14)),
        ValueError,
        "head_dim is 7",
    ),
    "batch": (wrong(key=torch.randn(1, 16, 1, 8)), ValueError, r"query \(2, 16, 3, 8\) and key \(1, 16, 1, 8\)"),
    "sequence": (wrong(key=torch.randn(2, 17, 1, 8)), ValueError, "must agree in batch, sequence and head_dim"),
    "head_dim": (wrong(key=torch.randn(2, 16, 1, 6)), ValueError, "must agree in batch, sequence and head_dim"),
    "rank": (wrong(query=torch.randn(2, 16, 8)), ValueError, r"query has shape \(2, 16, 8\)"),
    "dtype": (wrong(key=torch.randn(2, 16, 1, 8).bfloat16()), TypeError, "key is torch.bfloat16, query is"),
    "device": (wrong(key=torch.randn(2, 16, 1, 8, device="meta")), ValueError, "key is on meta, query is on cpu"),
    "table device": (wrong(rope_cache=torch.randn(20, 16, device="meta")), ValueError, "rope_cache is on meta"),
    "short table": (wrong(rope_cache=torch.randn(15, 16)), ValueError, "15 rows, the sequence has 16"),
    "position": (
        wrong(positions=POSITIONS.clone().index_fill(1, torch.tensor(3), 23)),
        ValueError,
        "position 23 is outside the 23 rows",
    ),
    # As int32 this would be 5.
    "64 bit position": (wrong(positions=POSITIONS + (2**32 + 5)), ValueError, "position 4294967301 is outside"),
    "negative position": (wrong(positions=POSITIONS - 1), ValueError, "position -1 is outside"),
    "table width": (wrong(rope_cache=torch.randn(20, 8)), ValueError, r"\(20, 8\); for head_dim 8 .* \[rows, 16\]"),
    "table dtype": (wrong(rope_cache=torch.randn(20, 16).bfloat16()), TypeError, "rope_cache is torch.bfloat16"),
    "integer query": (wrong(query=torch.ones(2, 16, 3, 8, dtype=torch.int32)), TypeError, "query is torch.int32"),
    "complex query": (wrong(query=torch.ones(2, 16, 3, 8, dtype=torch.cfloat)), TypeError, "query is torch.complex64"),
    "fp64 query": (wrong(query=torch.ones(2, 16, 3, 8, dtype=torch.float64)), TypeError, "query is torch.float64"),
    "float positions": (wrong(positions=POSITIONS.float()), TypeError, "positions are torch.float32"),
    "bool positions": (wrong(positions=POSITIONS.bool()), TypeError, "positions are torch.bool"),
    "positions shape": (wrong(positions=POSITIONS[:, :5]), ValueError, r"positions have shape \(2, 5\).*\[2, 16\]"),
    "positions rank": (wrong(positions=POSITIONS[0]), ValueError, r"positions have shape \(16,\)"),
    "table batch": (wrong(rope_cache=torch.randn(3, 20, 16)), ValueError, "is for batch 3, query has 2"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_any_launch(case):
    arguments, error, message = BAD[case]
    neuron.reset_launches()
    with pytest.raises(error, match=message):
        rope(*arguments.values())
    if arguments["positions"] is None:
        with pytest.raises(error, match=message):
            rope_hf(*list(arguments.values())[:3])
    assert neuron.launches() == {}


def test_references_agree_with_each_other():
    query, key, table = make((2, 16, 8), (3, 1))
    swapped = (query.transpose(1, 2), key.transpose(1, 2))
    for backward in (False, True):
        want = rope_reference(query, key, table, None, False, backward)[0]
        assert torch.equal(rope_hf_reference(*swapped, table, backward)[0].transpose(1, 2), want)
