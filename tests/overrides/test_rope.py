"""NKIRoPE against torchtitan's CosSinRoPE, bit for bit."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.models.common.rope import CosSinRoPE

from trn_kernels.overrides import NKIRoPE

B, L, NQ, NK, H, ROWS = 2, 256, 4, 2, 64, 300  # L: a length that rope_hf takes for LNC 1 and 2


def modules(kernel="rope", rows=ROWS):
    facts = {"dim": H, "max_seq_len": rows, "theta": 5e6}
    return NKIRoPE.Config(kernel=kernel, **facts).build(), CosSinRoPE.Config(**facts).build()


def inputs(dtype=torch.float32, heads=(NQ, NK), seed=0):
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(B, L, n, H, generator=random).to(dtype).detach().requires_grad_() for n in heads]


def positions(kind):
    if kind == "none":
        return None
    documents = torch.cat([torch.arange(100), torch.arange(96), torch.arange(60)])
    if kind == "one row":
        return documents[None]
    if kind == "packed":
        return torch.stack([documents, documents.flip(0).argsort().argsort()])
    return torch.stack([torch.randperm(ROWS, generator=torch.Generator().manual_seed(i))[:L] for i in range(B)])


def outputs_and_grads(module, query, key, where):
    outputs = module(query, key, where)
    random = torch.Generator().manual_seed(9)
    grads = [torch.randn(y.shape, generator=random).to(y.dtype) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, (query, key), grads)]


@pytest.mark.parametrize("kernel", ["rope", "rope_hf"])
@pytest.mark.parametrize("kind", ["none", "one row", "packed", "shuffled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_stock(kernel, kind, dtype):
    ours, stock = modules(kernel)
    query, key = inputs(dtype)
    where = positions(kind)
    result = outputs_and_grads(ours, query, key, where)
    expected = outputs_and_grads(stock, query, key, where)
    for name, x, y in zip(("query", "key", "grad query", "grad key"), result, expected, strict=True):
        assert x.dtype == dtype
        assert torch.equal(x, y), f"{name}: {(x - y).abs().max()}"


def test_second_document_equals_the_first():
    """A test that fails if positions are dropped."""
    ours, _ = modules()
    query, key = (x.detach()[:, : L // 2].repeat(1, 2, 1, 1) for x in inputs())
    where = torch.arange(L // 2).repeat(B, 2)
    for y in ours(query, key, where):
        assert torch.equal(y[:, : L // 2], y[:, L // 2 :])
    for y in ours(query, key):
        assert not torch.equal(y[:, : L // 2], y[:, L // 2 :])


@pytest.mark.parametrize("kernel", ["rope", "rope_hf"])
@pytest.mark.parametrize("bad", [-1, ROWS])
def test_position_out_of_range_is_refused(kernel, bad):
    ours, _ = modules(kernel)
    where = positions("packed").clone()
    where[1, 7] = bad
    with pytest.raises(ValueError, match=f"position.*{bad}"):
        ours(*inputs(), where)


@pytest.mark.parametrize(
    "convert",
    [lambda m: m.to(torch.bfloat16), lambda m: m.half().float(), lambda m: m.double()],
    ids=["bfloat16", "half and back", "double"],
)
def test_table_stays_float32(convert):
    ours, stock = modules()
    parent = convert(torch.nn.Sequential(ours, torch.nn.Linear(2, 2)))
    assert parent[0].cache.dtype == torch.float32
    assert torch.equal(parent[0].cache, stock.cache)
    assert parent.to("meta", torch.bfloat16)[0].cache.dtype == torch.float32


def test_table_under_autocast_equals_float64_truth():
    with torch.autocast("cpu", torch.bfloat16):
        ours = NKIRoPE.Config(dim=128, max_seq_len=8192, theta=1e6).build()
    frequencies = 1e6 ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    angles = torch.outer(torch.arange(8192, dtype=torch.float64), frequencies).repeat(1, 2)
    truth = torch.cat((angles.cos(), angles.sin()), -1)
    # Float32 angles up to 8191 are off by 2^-12 at most.
    assert (ours.cache - truth).abs().max() < 1e-3


def test_meta_init():
    with torch.device("meta"):
        ours = NKIRoPE.Config(dim=H, max_seq_len=ROWS, theta=5e6).build()
    ours.to_empty(device="cpu")
    ours._init_self_buffers()
    assert torch.equal(ours.cache, modules()[1].cache)
    assert not ours.state_dict()


def test_compiles_to_one_graph():
    ours, stock = modules()
    query, key = inputs()
    where = positions("packed")
    torch.compiler.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    result = outputs_and_grads(compiled, query, key, where)
    assert all(map(torch.equal, result, outputs_and_grads(stock, query, key, where)))


@pytest.fixture(scope="module")
def mesh():
    """Rank 0 of a mesh of two, without the other: nothing here may communicate."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    dist.destroy_process_group()


@pytest.mark.parametrize("kernel", ["rope", "rope_hf"])
@pytest.mark.parametrize("placement", [Shard(2), Shard(0), Shard(1), Replicate()], ids=str)
def test_dtensor(mesh, kernel, placement):
    ours, stock = modules(kernel)
    ours.cache = DTensor.from_local(ours.cache, mesh, [Replicate()], run_check=False)
    query, key = inputs()
    where = positions("packed")
    wrapped = [DTensor.from_local(x, mesh, [placement], run_check=False) for x in (query, key)]
    outputs = ours(*wrapped, where)
    for y, x in zip(outputs, wrapped, strict=True):
        assert (y.placements, y.shape, y.device_mesh) == (x.placements, x.shape, mesh)
    result = outputs_and_grads(lambda *_: [y.to_local() for y in outputs], query, key, None)
    assert all(map(torch.equal, result, outputs_and_grads(stock, query, key, where)))


def test_dtensor_layouts_that_cannot_be_served(mesh):
    ours, _ = modules()

    def wrap(x, placement):
        return DTensor.from_local(x, mesh, [placement], run_check=False)

    query, key = inputs()
    for placement, where in ((Shard(1), None), (Shard(3), positions("packed")), (Partial(), None)):
        with pytest.raises(ValueError, match="replicated or sharded on one of dims"):
            ours(wrap(query, placement), wrap(key, placement), where)
    with pytest.raises(ValueError, match="same placements.*Shard.*Replicate"):
        ours(wrap(query, Shard(2)), wrap(key, Replicate()))
    with pytest.raises(ValueError, match="same placements.*plain"):
        ours(wrap(query, Shard(2)), key)
    ours.cache = wrap(ours.cache, Shard(0))
    with pytest.raises(ValueError, match="table must be replicated"):
        ours(wrap(query, Shard(2)), wrap(key, Shard(2)))
