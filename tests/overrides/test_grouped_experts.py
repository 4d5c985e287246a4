"""NKIGroupedExperts against torchtitan's GroupedExperts and against a float64 loop over the experts."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest
import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from spmd_types.checker import typecheck
from spmd_types.runtime import get_local_type
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.moe import GroupedExperts

from trn_kernels.ops import neuron
from trn_kernels.overrides import NKIGroupedExperts, grouped_experts

COUNTS = torch.tensor([70, 0, 129, 1])  # rows that fill no tile, none, more than a tile, one
R, E, D, H = 200, len(COUNTS), 48, 40
NAMES = ("w1_EFD", "w2_EDF", "w3_EFD")


def modules(dtype=torch.float32, num_experts=E):
    """Ours and the stock module with the same weights."""
    sizes = {"dim": D, "hidden_dim": H, "num_experts": num_experts}
    ours, stock = NKIGroupedExperts.Config(**sizes).build(), GroupedExperts.Config(**sizes).build()
    random = torch.Generator().manual_seed(1)
    for name in NAMES:
        weight = torch.randn(getattr(stock, name).shape, generator=random)
        getattr(stock, name).data = (weight / weight.shape[-1] ** 0.5).to(dtype)
    ours.to(dtype).load_state_dict(stock.state_dict())
    return ours, stock


def rows(count=R, dtype=torch.float32, seed=2):
    x = torch.randn(count, D, generator=torch.Generator().manual_seed(seed))
    return x.to(dtype).requires_grad_()


def results(module, x, counts=COUNTS, weights=None):
    """y, the gradient of x, those of the weights."""
    weights = [getattr(module, name) for name in NAMES] if weights is None else weights
    y = module(x, counts)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y.dtype)
    return [y, *torch.autograd.grad(y, (x, *weights), upstream)]


def truth(module, x, counts=COUNTS):
    x = x.detach().double().requires_grad_()
    w1, w2, w3 = weights = [getattr(module, name).detach().double().requires_grad_() for name in NAMES]

    def loop(x, counts):
        parts = x.split(counts.tolist())
        return torch.cat([(F.silu(p @ w1[e].T) * (p @ w3[e].T)) @ w2[e].T for e, p in enumerate(parts)])

    return results(loop, x, counts, weights)


def errors(found, right):
    with torch.no_grad():
        return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, right, strict=True)]


def test_float32_equals_the_loop():
    ours, _ = modules()
    x = rows()
    found, right = results(ours, x), truth(ours, x)
    assert all(y.dtype == torch.float32 for y in found)
    assert max(errors(found, right)) < 1e-6
    for gradient in found[2:]:
        assert not gradient[1].any()  # the expert without rows


def test_bfloat16_is_as_good_as_stock():
    ours, stock = modules(torch.bfloat16)
    x = rows(dtype=torch.bfloat16)
    found, expected, right = results(ours, x), results(stock, x), truth(ours, x)
    assert all(y.dtype == torch.bfloat16 for y in found)
    assert max(errors(found, [y.double() for y in expected])) < 1e-2
    for mine, theirs in zip(errors(found, right), errors(expected, right), strict=True):
        assert mine < 1.2 * theirs


def test_the_kernels_run():
    ours, _ = modules()
    neuron.reset_launches()
    results(ours, rows())
    assert neuron.launches() == {(op, "emulator"): 1 for op in ("grouped_experts", "grouped_experts_backward")}


@pytest.mark.parametrize("counts", [torch.zeros(E, dtype=torch.int64), torch.zeros(E, dtype=torch.int32)])
def test_no_rows(counts):
    ours, _ = modules()
    y, grad_x, *gradients = results(ours, rows(0), counts)
    assert y.shape == grad_x.shape == (0, D)
    for name, gradient in zip(NAMES, gradients, strict=True):
        assert torch.equal(gradient, torch.zeros_like(getattr(ours, name)))


def test_autocast_multiplies_in_its_dtype():
    ours, _ = modules()
    x = rows()
    with torch.autocast("cpu", torch.bfloat16):
        found = results(ours, x)
    assert all(y.dtype == torch.float32 for y in found)
    half, _ = modules(torch.bfloat16)
    for a, b in zip(found, results(half, rows(dtype=torch.bfloat16)), strict=True):
        assert torch.equal(a, b.float())


def test_checkpoints_are_those_of_stock():
    ours, stock = modules()
    assert [*ours.state_dict()] == [*stock.state_dict()] == [*NAMES]
    for source, target in ((ours, stock), (stock, ours)):
        for parameter in target.parameters():
            parameter.data.fill_(torch.nan)
        target.load_state_dict(source.state_dict(), strict=True)
        for name in NAMES:
            assert torch.equal(getattr(ours, name), getattr(stock, name))


# -- parts of the weights ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh():
    """Rank 0 of a mesh of two, without the other: nothing here may communicate."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield DeviceMesh("cpu", [0, 1], mesh_dim_names=("ranks",))
    dist.destroy_process_group()


def shard(module, mesh, dims, part):
    """Replace the weights by DTensors that are sharded on `dims`; the local part is number `part` of two."""
    for name, dim in zip(NAMES, dims, strict=True):
        local = getattr(module, name).detach().chunk(2, dim)[part].contiguous()
        setattr(module, name, torch.nn.Parameter(DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)))


def locally(found, dims):
    """The results, with the weights' gradients as local tensors; they must be laid out as the weights."""
    for gradient, dim in zip(found[2:], dims, strict=True):
        assert gradient.placements == (Shard(dim),)
    return [*found[:2], *(gradient.to_local() for gradient in found[2:])]


@pytest.mark.parametrize("part", [0, 1])
def test_expert_parallel_part(mesh, part):
    """A rank has half of the experts, and other rows and counts than before."""
    ours, _ = modules()
    whole = results(ours, rows())
    shard(ours, mesh, (0, 0, 0), part)
    x = rows().detach().split([70, 130])[part].clone().requires_grad_()
    found = locally(results(ours, x, COUNTS.chunk(2)[part]), (0, 0, 0))
    assert torch.equal(found[0], whole[0].split([70, 130])[part])
    half, _ = modules(num_experts=2)
    half.load_state_dict({name: weight.chunk(2)[part] for name, weight in modules()[0].state_dict().items()})
    assert max(errors(found, truth(half, x, COUNTS.chunk(2)[part]))) < 1e-6
    nothing = locally(results(ours, rows(0), torch.zeros(2, dtype=torch.int64)), (0, 0, 0))
    assert all(gradient.shape == (2, *gradient.shape[1:]) and not gradient.any() for gradient in nothing[2:])


def test_tensor_parallel_parts_add_up(mesh):
    """Each rank has a slice of the hidden dimension of every expert: y and the gradient of x are sums."""
    dims = (1, 2, 1)
    parts = []
    for part in range(2):
        ours, _ = modules()
        shard(ours, mesh, dims, part)
        parts.append(locally(results(ours, rows()), dims))
    right = truth(modules()[0], rows())
    sums = [a + b for a, b in zip(*(part[:2] for part in parts), strict=True)]
    gradients = [torch.cat(pair, dim) for *pair, dim in zip(parts[0][2:], parts[1][2:], dims, strict=True)]
    assert max(errors([*sums, *gradients], right)) < 1e-6


def test_type_checker_lets_the_counts_in(mesh):
    """torchtitan's `--debug.spmd_typechecking`, which needs torch 2.14 in training."""
    ours, _ = modules()
    x, counts = rows(), COUNTS.clone()
    with spmd.set_current_mesh(mesh), typecheck(local=True):
        spmd.assert_type(x, {"ranks": spmd.V})
        spmd.assert_type(counts, {"ranks": spmd.P})
        for weight in ours.parameters():
            spmd.assert_type(weight, {"ranks": spmd.R})
        y = ours(x, counts)
        assert [*get_local_type(y).values()] == [spmd.V]
        assert [*get_local_type(counts).values()] == [spmd.P]  # the caller's stay what they are
    assert torch.equal(y, ours(x, counts))


# -- compilers and other builds of torchtitan -------------------------------------------------------------


def test_one_graph_for_every_routing():
    ours, _ = modules()
    counters = torch._dynamo.utils.counters
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for counts in (COUNTS, COUNTS.flip(0), torch.tensor([200, 0, 0, 0])):
        x = rows()
        weights = [*ours.parameters()]
        for a, b in zip(results(compiled, x, counts, weights), results(ours, x, counts), strict=True):
            assert torch.equal(a, b)
    assert counters["stats"]["unique_graphs"] == 1


def test_builds_whose_module_also_dispatches(monkeypatch):
    """There `forward` is torchtitan's, and calls `_experts_forward` for the experts."""
    monkeypatch.setattr(GroupedExperts, "_experts_forward", GroupedExperts.forward, raising=False)
    spec = importlib.util.spec_from_file_location("older", grouped_experts.__file__)
    older = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "older", older)
    spec.loader.exec_module(older)
    assert older.NKIGroupedExperts.forward is GroupedExperts.forward
    module = older.NKIGroupedExperts.Config(dim=D, hidden_dim=H, num_experts=E).build()
    ours, _ = modules()
    module.load_state_dict(ours.state_dict())
    assert torch.equal(module._experts_forward(rows(), COUNTS), ours(rows(), COUNTS))


def test_experts_that_expert_parallelism_cannot_divide_are_refused():
    """Also in torchtitan's own recipes, before the first step."""
    ours, _ = modules(num_experts=6)
    dims = ParallelDims(
        dp_replicate=1, dp_shard=4, cp=1, tp=1, pp=1, ep=4, world_size=4, spmd_backend="partial_dtensor"
    )
    with pytest.raises(ValueError, match="expert_parallel_degree is 4; it must divide the model's 6 experts"):
        ours.parallelize(dims)


def test_every_unwrapping_says_where_gradients_go():
    """Without grad_placements DTensor assumes those of the values, which is silently wrong for partial sums."""
    unwrapped = 0
    for file in Path(grouped_experts.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("to_local", "full_tensor"):
                unwrapped += 1
                assert "grad_placements" in [keyword.arg for keyword in node.keywords], f"{file}:{node.lineno}"
    assert unwrapped >= 4
