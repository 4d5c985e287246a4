"""The grouped-expert operators: accuracy against fp64, routing, PyTorch's contract, compile, bad input."""

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch.library import opcheck

from trn_kernels.ops import grouped_experts, neuron
from trn_kernels.ops.grouped_experts import (
    EXTRA_SLOTS,
    grouped_experts_reference,
    routing_tables,
    table_shapes,
)


def make(counts, dim, hidden, rest=0, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    counts = torch.as_tensor(counts)
    num_experts = len(counts)
    x = draw(int(counts.sum()) + rest, dim)
    weights = draw(num_experts, hidden, dim), draw(num_experts, dim, hidden), draw(num_experts, hidden, dim)
    scaled = (w / w.shape[-1] ** 0.5 for w in weights)
    return *(t.to(dtype) for t in (x, *scaled)), counts


def gradients(function, x, w1, w2, w3, counts, upstream=None):
    """y and the gradients of x, w1, w2, w3."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, w1, w2, w3)]
    y = function(*leaves, counts)
    if upstream is None:
        upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(y.dtype)
    return y, *torch.autograd.grad(y, leaves, upstream.to(y.dtype))


def routed(num_tokens, top_k, num_experts, seed=0, only=None):
    """Counts of a router that sends every token to ``top_k`` experts."""
    ids = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed)).topk(top_k).indices
    if only is not None:
        ids = torch.tensor(only).expand(num_tokens, -1)
    return torch.bincount(ids.flatten(), minlength=num_experts)


CASES = {
    "64 tokens, all on experts 0 and 1": (routed(64, 2, 8, only=[0, 1]), 64, 32),
    "512 tokens, all on expert 3": (routed(512, 1, 8, only=[3]), 64, 32),
    "no rows": (torch.zeros(4, dtype=torch.int64), 64, 32),
    "one expert": (routed(200, 1, 1), 64, 32),
    "seven experts": (routed(200, 2, 7), 64, 32),
    "one token": (routed(1, 2, 8), 64, 32),
    "T=131 K=3 E=7 D=97 F=47": (routed(131, 3, 7), 97, 47),
    "odd D and F, more than a block of 128": (routed(40, 2, 3), 257, 131),
    "D=12 F=20": (routed(50, 2, 3), 12, 20),
    "D=768 F=384": (routed(300, 2, 4), 768, 384),
    "D=2048 F=768 E=8": (routed(64, 2, 8), 2048, 768),
}
# The large one costs seconds: once per dtype.
RUNS = [(case, lnc) for case in CASES for lnc in ("1", "2") if (case, lnc) != ("D=2048 F=768 E=8", "1")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("case, lnc", RUNS)
def test_as_accurate_as_pytorch(case, dtype, lnc, monkeypatch):
    """The error against fp64 is at most 1.5 times that of the same loop in the same dtype."""
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", lnc)
    counts, dim, hidden = CASES[case]
    mine, reference, size = torch.zeros(5).double(), torch.zeros(5).double(), torch.zeros(5).double()
    # The rounding errors of one row are few: more draws of it.
    for seed in range(8 if counts.sum() < 10 else 1):
        args = make(counts, dim, hidden, dtype=dtype, seed=seed)
        upstream = torch.randn(args[0].shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        got = gradients(grouped_experts, *args, upstream)
        same_dtype = gradients(grouped_experts_reference, *args, upstream)
        truth = gradients(grouped_experts_reference, *(t.double() for t in args[:4]), args[4], upstream)
        for i, (ours, theirs, right) in enumerate(zip(got, same_dtype, truth, strict=True)):
            assert ours.dtype == dtype and ours.is_contiguous() and ours.shape == right.shape
            for total, value in ((mine, ours - right), (reference, theirs - right), (size, right)):
                total[i] += value.detach().double().square().sum()
        for gradient in got[2:]:
            unused = gradient[counts == 0]
            assert torch.equal(unused, torch.zeros_like(unused))
    assert (mine.sqrt() <= 1.5 * reference.sqrt() + 1e-7 * size.sqrt()).all()


def test_rows_of_no_expert_are_zero():
    args = make([3, 0, 140], 40, 24, rest=300)
    y, grad_x, *_ = gradients(grouped_experts, *args)
    assert not y[143:].any() and not grad_x[143:].any()
    for ours, theirs in zip(
        gradients(grouped_experts, *args), gradients(grouped_experts_reference, *args), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_views_give_the_bits_of_their_contiguous_twin():
    x, w1, w2, w3, counts = make([60, 0, 70], 32, 24)
    views = (
        torch.stack([x, x], dim=1)[:, 1],
        w1.transpose(1, 2).contiguous().transpose(1, 2),
        torch.cat([w2, w2])[3:],
        w1.expand(3, -1, -1),
    )
    strided = gradients(grouped_experts, *views, counts)
    plain = gradients(grouped_experts, *(v.contiguous() for v in views), counts)
    for a, b in zip(strided, plain, strict=True):
        assert torch.equal(a, b)


def test_an_expanded_gradient():
    args = make([60, 0, 70], 32, 24)
    ones = torch.ones_like(args[0])
    expanded = gradients(grouped_experts, *args, upstream=torch.ones(1, 1).expand_as(ones))
    for a, b in zip(expanded, gradients(grouped_experts, *args, upstream=ones), strict=True):
        assert torch.equal(a, b)
    # Without rows too, where torch's grouped matmul fails.
    x, w1, w2, w3, counts = make([0, 0, 0], 32, 24)
    w1.requires_grad_()
    grouped_experts(x, w1, w2, w3, counts).sum().backward()
    assert torch.equal(w1.grad, torch.zeros_like(w1))


def test_only_what_needs_a_gradient_is_computed():
    x, w1, w2, w3, counts = make([60, 70], 32, 24)
    full = gradients(grouped_experts, x, w1, w2, w3, counts)
    for which in range(4):
        leaves = [t.clone().requires_grad_(i == which) for i, t in enumerate((x, w1, w2, w3))]
        y = grouped_experts(*leaves, counts)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(9)))
        assert [t.grad is not None for t in leaves] == [i == which for i in range(4)]
        assert torch.equal(leaves[which].grad, full[1 + which])


def test_nothing_is_kept_without_gradients():
    x, w1, w2, w3, counts = make([60, 70], 32, 24)
    w1.requires_grad_()
    with torch.no_grad():
        y = grouped_experts(x, w1, w2, w3, counts)
    assert y.grad_fn is None
    _, h1, h3, *_ = torch.ops.trn_kernels.grouped_experts(x, w1.detach(), w2, w3, counts, False)
    assert h1.shape == h3.shape == (0, 24)
    unsaved = torch.ops.trn_kernels.grouped_experts(x, w1, w2, w3, counts, False)[0]
    with pytest.raises(RuntimeError, match="called with save=False"):
        unsaved.sum().backward()


# -- routing --------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    counts=st.lists(st.sampled_from([0, 0, 1, 5, 127, 128, 129, 300, 600]), min_size=1, max_size=9),
    rest=st.sampled_from([0, 0, 1, 200, 700]),
    lnc=st.sampled_from([1, 2]),
)
def test_tables_cover_every_row_once(counts, rest, lnc):
    num_rows = sum(counts) + rest
    rows, slots = routing_tables(torch.tensor(counts), num_rows, lnc)
    assert (tuple(rows.shape), tuple(slots.shape)) == table_shapes(num_rows, len(counts), lnc)
    # Device loops do not diverge: every core runs every slot equally often.
    assert torch.equal(slots[:, :, 2:], slots[:1, :, 2:].expand(lnc, -1, -1))
    starts = [sum(counts[:e]) for e in range(len(counts))]
    found, covered = {}, []
    for core in range(lnc):
        for load, expert, first, end, head, rest, quads, twos in slots[core, :-EXTRA_SLOTS].tolist():
            assert 0 <= load < len(counts) and first <= end <= head
            # The first two tiles, then the rest by fours, twos and one.
            begin = rows[core, head : head + 2]
            assert torch.equal(begin[: end - first], rows[core, first : min(end, first + 2)])
            assert (begin[end - first :] == -1).all()
            assert rest == min(first + 2, end) and rest <= quads <= twos <= end
            assert (quads - rest) % 4 == 0 and (twos - quads) % 2 == 0 and end - quads < 4 and end - twos < 2
            used = rows[core, first:end].flatten()
            used = used[used >= 0].tolist()
            covered += used
            if expert >= 0:
                assert load == expert and expert not in found
                found[expert] = used
            else:
                assert not used
        _, _, first, end, *_ = slots[core, -1].tolist()
        unrouted = rows[core, first:end].flatten()
        covered += unrouted[unrouted >= 0].tolist()
        for _, result, first, end, head, rest, _, last in slots[core, -3:-1].tolist():
            assert (result, first, end, rest, last) == (-1, 0, 0, 0, 0)
            assert (rows[core, head : head + 2] == -1).all()
    assert found == {e: list(range(starts[e], starts[e] + n)) for e, n in enumerate(counts)}
    assert sorted(covered) == list(range(num_rows))


@settings(max_examples=50, deadline=None)
@given(
    counts=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=5),
    num_rows=st.integers(1, 400),
    lnc=st.sampled_from([1, 2]),
)
def test_impossible_counts_never_point_outside(counts, num_rows, lnc):
    """What a device gets, where nobody reads the counts on the host."""
    rows, slots = routing_tables(torch.tensor(counts), num_rows, lnc)
    assert rows.min() >= -1 and rows.max() < num_rows
    assert slots[..., 2:].min() >= 0 and slots[..., 2:].max() <= rows.shape[1]
    assert slots[..., 0].max() < len(counts)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_counts_of_either_integer(dtype):
    x, w1, w2, w3, counts = make([60, 0, 70], 32, 24)
    assert torch.equal(grouped_experts(x, w1, w2, w3, counts.to(dtype)), grouped_experts(x, w1, w2, w3, counts))


# -- PyTorch's contract for operators -------------------------------------------------------------------


@pytest.mark.parametrize("counts, rest", [([5, 0, 130], 0), ([5, 0, 130], 40), ([0, 0, 0], 0)])
@pytest.mark.parametrize("lnc", ["1", "2"])
def test_opcheck(counts, rest, lnc, monkeypatch):
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", lnc)
    x, w1, w2, w3, counts = make(counts, 24, 16, rest)
    layouts = {
        "contiguous": (x, w1, w2, w3),
        "transposed": (x.T.contiguous().T, w1.mT.contiguous().mT, w2, w3),
        "offset": (torch.cat([x[:0], x]), torch.cat([w1, w1])[3:], w2, w3),
        "expanded": (x[:1].expand(len(x), -1), w1[:1].expand(3, -1, -1), w2, w3),
    }
    forward, backward = (
        torch.ops.trn_kernels.grouped_experts.default,
        torch.ops.trn_kernels.grouped_experts_backward.default,
    )
    for tensors in layouts.values():
        opcheck(forward, (*(t.detach().requires_grad_() for t in tensors), counts, True))
        _, *saved = forward(*tensors, counts, True)
        opcheck(forward, (*tensors, counts, False))
        for need in ([True] * 4, [False, True, False, True], [True, False, False, False]):
            opcheck(backward, (torch.randn_like(tensors[0]), *tensors, *saved, need))


def test_fakes_launch_nothing():
    neuron.reset_launches()
    x, w1, w2, w3, counts = make([60, 70], 32, 24)
    y = grouped_experts(*(t.to("meta").requires_grad_() for t in (x, w1, w2, w3)), counts.to("meta"))
    assert y.shape == x.shape and y.device.type == "meta"
    y.sum().backward()
    assert neuron.launches() == {}


class Block(torch.nn.Module):
    """A router and its experts."""

    def __init__(self, num_experts=5, dim=32, hidden=24, top_k=2):
        super().__init__()
        torch.manual_seed(0)
        self.gate = torch.nn.Linear(dim, num_experts, bias=False)
        self.w1, self.w3 = (torch.nn.Parameter(torch.randn(num_experts, hidden, dim) / 6) for _ in range(2))
        self.w2 = torch.nn.Parameter(torch.randn(num_experts, dim, hidden) / 5)
        self.top_k, self.num_experts = top_k, num_experts

    def forward(self, x):
        scores, ids = F.softmax(self.gate(x), dim=-1).topk(self.top_k)
        ids = ids.flatten()
        order = ids.argsort(stable=True)
        counts = F.one_hot(ids, self.num_experts).sum(0)
        y = grouped_experts(x[order // self.top_k], self.w1, self.w2, self.w3, counts)
        weighted = y * scores.flatten()[order, None]
        return x + torch.zeros_like(x).index_add(0, order // self.top_k, weighted)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_for_every_routing(backend):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    block, eager = Block(), Block()
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    for step in range(5):
        x = torch.randn(90, 32, generator=torch.Generator().manual_seed(step))
        if step == 4:
            x = x[:1].expand(90, -1).contiguous()  # all tokens on the same two experts
        neuron.reset_launches()
        compiled(x).square().sum().backward()
        assert neuron.launches() == {(op, "emulator"): 1 for op in ("grouped_experts", "grouped_experts_backward")}
        eager(x).square().sum().backward()
    assert counters["stats"]["unique_graphs"] == 1
    for a, b in zip(block.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


def test_a_number_of_rows_that_depends_on_data():
    """What expert parallelism hands to a compiled block."""

    def block(x, counts, *weights):
        num_rows = counts.sum().item()
        torch._check(num_rows >= 0)
        return grouped_experts(x[torch.arange(num_rows) % len(x)], *weights, counts)

    torch._dynamo.reset()
    x, *weights, _ = make([5, 4], 16, 8)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
        for counts in (torch.tensor([3, 2]), torch.tensor([9, 0]), torch.tensor([0, 0])):
            leaves = [[t.clone().requires_grad_() for t in (x, *weights)] for _ in range(2)]
            for function, (first, *others) in zip((compiled, block), leaves, strict=True):
                function(first, counts, *others).sum().backward()
            for a, b in zip(*leaves, strict=True):
                assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_activation_checkpointing_gives_the_same_gradients(kind):
    def save_ours(ctx, op, *args, **kwargs):
        policy = torch.utils.checkpoint.CheckpointPolicy
        ours = op is torch.ops.trn_kernels.grouped_experts.default
        return policy.MUST_SAVE if ours else policy.PREFER_RECOMPUTE

    block, plain = Block(), Block()
    x = torch.randn(90, 32, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    extra = {}
    if kind == "selective":
        extra["context_fn"] = lambda: torch.utils.checkpoint.create_selective_checkpoint_contexts(save_ours)
    neuron.reset_launches()
    torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, **extra).square().sum().backward()
    assert neuron.launches()["grouped_experts", "emulator"] == (2 if kind == "full" else 1)
    plain(y).square().sum().backward()
    assert torch.equal(x.grad, y.grad)
    for a, b in zip(block.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_backend_agrees(monkeypatch, dtype):
    args = make([60, 0, 70, 300], 32, 24, rest=40, dtype=dtype)
    kernel = gradients(grouped_experts, *args)
    monkeypatch.setenv("TRN_KERNELS_BACKEND", "reference")
    neuron.reset_launches()
    reference = gradients(grouped_experts, *args)
    assert set(neuron.launches()) == {("grouped_experts", "reference"), ("grouped_experts_backward", "reference")}
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    for a, b in zip(kernel, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.detach().abs().max()))


# -- any input ------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_shape_equals_the_loop(data):
    draw = data.draw
    counts = draw(st.lists(st.integers(0, 200), min_size=1, max_size=6), "counts")
    dim, hidden = draw(st.integers(1, 150), "D"), draw(st.integers(1, 150), "F")
    args = make(counts, dim, hidden, draw(st.sampled_from([0, 0, 3, 150]), "rest"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEURON_LOGICAL_NC_CONFIG", draw(st.sampled_from(["1", "2"]), "LNC"))
        got = gradients(grouped_experts, *args)
    for a, b in zip(got, gradients(grouped_experts_reference, *args), strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-3, atol=1e-4 * max(1.0, float(b.detach().abs().max()) if b.numel() else 1.0)
        )


# -- bad input ------------------------------------------------------------------------------------------


def wrong(**changes):
    names = ("x", "w1", "w2", "w3", "num_tokens_per_expert")
    return {**dict(zip(names, make([3, 4], 8, 6), strict=True)), **changes}


def meta(*shape):
    return torch.empty(shape, device="meta")


BAD = {
    "integer x": (wrong(x=torch.ones(7, 8, dtype=torch.int32)), TypeError, "x is torch.int32"),
    "fp64 x": (wrong(x=torch.ones(7, 8).double()), TypeError, "x is torch.float64"),
    "dtype": (wrong(w2=torch.ones(2, 8, 6).bfloat16()), TypeError, "w2 is torch.bfloat16, x is torch.float32"),
    "device": (wrong(w3=meta(2, 6, 8)), ValueError, "w3 is on meta, x is on cpu"),
    "rank of x": (wrong(x=torch.ones(7, 1, 8)), ValueError, r"x has shape \(7, 1, 8\)"),
    "rank of w1": (wrong(w1=torch.ones(6, 8)), ValueError, r"w1 has shape \(6, 8\)"),
    "D": (wrong(x=torch.ones(7, 9)), ValueError, r"x has shape \(7, 9\); with w1 \(2, 6, 8\) it must be \(7, 8\)"),
    "F": (wrong(w3=torch.ones(2, 5, 8)), ValueError, r"w3 has shape \(2, 5, 8\).* it must be \(2, 6, 8\)"),
    "E": (wrong(w2=torch.ones(3, 8, 6)), ValueError, r"w2 has shape \(3, 8, 6\).* it must be \(2, 8, 6\)"),
    "no experts": (wrong(w1=torch.ones(0, 6, 8)), ValueError, "E, F and D must be at least 1"),
    "float counts": (wrong(num_tokens_per_expert=torch.tensor([3.0, 4.0])), TypeError, "is torch.float32; it must be"),
    "counts of another E": (wrong(num_tokens_per_expert=torch.tensor([7])), ValueError, r"has shape \(1,\); w1 has 2"),
    "negative count": (wrong(num_tokens_per_expert=torch.tensor([8, -1])), ValueError, "a negative count, -1"),
    "too many rows": (wrong(num_tokens_per_expert=torch.tensor([4, 4])), ValueError, "adds up to 8, x has 7 rows"),
    # Added up in int32 they are 0.
    "counts that wrap": (
        wrong(num_tokens_per_expert=torch.tensor([2**31 - 1, 2**31 - 1], dtype=torch.int32)),
        ValueError,
        "adds up to 4294967294",
    ),
    "counts that wrap in 64 bits": (
        wrong(num_tokens_per_expert=torch.tensor([2**62, 2**62])),
        ValueError,
        "adds up to 9223372036854775808",
    ),
    "a D that does not fit SBUF": (
        {
            "x": meta(4, 8577),
            "w1": meta(1, 6, 8577),
            "w2": meta(1, 8577, 6),
            "w3": meta(1, 6, 8577),
            "num_tokens_per_expert": torch.zeros(1, dtype=torch.int64, device="meta"),
        },
        ValueError,
        "D 8577 of torch.float32 must be at most 8576",
    ),
    # Widths of Mixtral with many experts: 3.7e9 elements, which no offset of 31 bits reaches.
    "weights beyond 31 bits": (
        {
            "x": meta(8, 4096),
            "w1": meta(64, 14336, 4096),
            "w2": meta(64, 4096, 14336),
            "w3": meta(64, 14336, 4096),
            "num_tokens_per_expert": torch.zeros(64, dtype=torch.int64, device="meta"),
        },
        ValueError,
        "w1 has 3758096384 elements; an offset in it must fit 31 bits",
    ),
    "rows beyond 31 bits": (
        {
            "x": meta(1_079_839, 2048),
            "w1": meta(2, 6, 2048),
            "w2": meta(2, 2048, 6),
            "w3": meta(2, 6, 2048),
            "num_tokens_per_expert": torch.zeros(2, dtype=torch.int64, device="meta"),
        },
        ValueError,
        "x has 2211510272 elements",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_any_launch(case):
    arguments, error, message = BAD[case]
    neuron.reset_launches()
    with pytest.raises(error, match=message):
        grouped_experts(*arguments.values())
    assert neuron.launches() == {}
