"""The shims for machines without an accelerator: what they do there, and that they do nothing elsewhere."""

import dataclasses
import importlib.util
import sys

import pytest
import torch
import torch.distributed as dist
import torchtitan.tools.utils as titan_utils
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torchtitan.models.qwen3.config_registry import qwen3_debugmodel

from trn_kernels.recipes import cpu

KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"


def have_device(monkeypatch, device):
    monkeypatch.setattr(torch._utils, "_get_available_device_type", lambda: device)


@pytest.mark.parametrize(
    ("device", "accelerator"),
    [(None, None), ("mps", None), ("cuda", "cuda"), ("xpu", "xpu"), ("neuron", "neuron")],
)
def test_accelerator(monkeypatch, device, accelerator):
    have_device(monkeypatch, device)
    assert cpu.accelerator() == accelerator


@pytest.mark.parametrize("device", ["cuda", "xpu", "neuron"])
def test_nothing_changes_with_an_accelerator(monkeypatch, device):
    have_device(monkeypatch, device)
    monkeypatch.delattr(dist, "set_timeout", raising=False)
    before = titan_utils.device_type, titan_utils.device_module
    cpu.prepare()
    assert (titan_utils.device_type, titan_utils.device_module) == before
    assert not hasattr(dist, "set_timeout")
    config, stock = qwen3_debugmodel(), qwen3_debugmodel()
    cpu.prepare_config(config)
    assert config.parallelism == stock.parallelism
    assert config.model_spec.parallelize_fn is stock.model_spec.parallelize_fn
    assert dataclasses.replace(config, model_spec=None) == dataclasses.replace(stock, model_spec=None)


def test_prepare_refuses_to_come_too_late(monkeypatch):
    have_device(monkeypatch, None)
    assert "torchtitan.distributed" in sys.modules
    with pytest.raises(RuntimeError, match="before torchtitan's trainer is imported"):
        cpu.prepare()


@pytest.mark.parametrize("names", [("cuda", torch.cuda)])
def test_prepare_names_the_cpu(monkeypatch, names):
    have_device(monkeypatch, None)
    monkeypatch.delitem(sys.modules, "torchtitan.distributed")
    monkeypatch.setattr(dist, "all_to_all", dist.all_to_all)
    monkeypatch.setattr(titan_utils, "device_type", names[0])
    monkeypatch.setattr(titan_utils, "device_module", names[1])
    monkeypatch.setenv("LOCAL_RANK", "1")
    cpu.prepare()
    assert titan_utils.device_type == "cpu"
    assert titan_utils.get_local_device() == torch.device("cpu", 0)
    properties = titan_utils.device_module.get_device_properties(0)
    peak = titan_utils.device_module.memory_stats(0)["active_bytes.all.peak"]
    assert 2**26 < peak < properties.total_memory


def test_lists_of_unequal_tensors_are_exchanged(monkeypatch):
    calls = []

    def exchange_one(output, input, output_splits, input_splits, group=None):
        calls.append((output_splits, input_splits, group))
        # What two ranks with the same tensors would get from each other, seen from the first.
        first = input[: input_splits[0]]
        output.copy_(torch.cat([first, first]))

    monkeypatch.setattr(dist, "all_to_all", lambda *arguments: calls.append("torch's"))
    monkeypatch.setattr(dist, "all_to_all_single", exchange_one)
    backends = {"pairs": "gloo", "device": "nccl"}
    monkeypatch.setattr(dist, "get_backend", backends.get)
    cpu._exchange_unequal_lists()
    sent = [torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)]
    received = [torch.zeros(2, 3), torch.zeros(2, 3)]
    dist.all_to_all(received, sent, group="pairs")
    assert calls == [([6, 6], [6, 12], "pairs")]
    assert all(torch.equal(tensor, sent[0]) for tensor in received)
    calls.clear()
    dist.all_to_all(received, sent, group="device")
    dist.all_to_all(received, sent[:1] * 2, group="pairs")  # equal sizes
    assert calls == ["torch's"] * 2


def test_set_timeout_is_named_where_missing(monkeypatch):
    monkeypatch.delattr(dist, "set_timeout", raising=False)
    cpu._name_set_timeout()
    assert dist.set_timeout is dist.distributed_c10d._set_pg_timeout
    own = object()
    monkeypatch.setattr(dist, "set_timeout", own)
    cpu._name_set_timeout()
    assert dist.set_timeout is own


@pytest.mark.parametrize("words", [[], ["--parallelism.spmd_backend", "x"], ["--parallelism.spmd-backend=x"]])
@pytest.mark.parametrize(
    ("capable", "backend", "wanted"),
    [
        (False, "spmd_types", "partial_dtensor"),
        (True, "spmd_types", "spmd_types"),
        (False, "full_dtensor", "full_dtensor"),
    ],
)
def test_spmd_backend(monkeypatch, capable, backend, wanted, words):
    """A default gives way to what this torch can do. What was asked for stays: `check_parallelism`, which follows, may
    refuse it."""
    have_device(monkeypatch, None)
    monkeypatch.setattr(sys, "argv", ["train", *words])
    if capable:
        monkeypatch.setattr(FSDPParam, "_restore_spmd_types", None, raising=False)
    else:
        monkeypatch.delattr(FSDPParam, "_restore_spmd_types", raising=False)
    config = qwen3_debugmodel()
    config.parallelism.spmd_backend = backend
    cpu.prepare_config(config)
    assert config.parallelism.spmd_backend == (backend if words else wanted)


@pytest.mark.parametrize(("backend", "sums"), [("gloo", True), ("nccl", False)])
def test_fsdp_only_sums_over_gloo(monkeypatch, backend, sums):
    from torch.distributed.fsdp import FSDPModule

    class Sharded(FSDPModule, torch.nn.Module):
        def __new__(cls):
            return object.__new__(cls)

        def set_force_sum_reduction_for_comms(self, enable):
            self.sums = enable

    def parallelize(model, *, parallel_dims):
        assert parallel_dims == "dims"
        return model

    have_device(monkeypatch, None)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    config = qwen3_debugmodel()
    config.model_spec.parallelize_fn = parallelize
    cpu.prepare_config(config)
    model = torch.nn.Sequential(Sharded(), torch.nn.Linear(1, 1))
    assert config.model_spec.parallelize_fn(model, parallel_dims="dims") is model
    assert getattr(model[0], "sums", False) is sums


def test_triton_stub(monkeypatch):
    monkeypatch.delitem(sys.modules, KERNELS, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    cpu.stub_triton()
    assert KERNELS not in sys.modules
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    cpu.stub_triton()
    stub = sys.modules[KERNELS]
    with pytest.raises(ImportError, match="some_kernel .*needs Triton, which is not installed"):
        stub.some_kernel(1)
    cpu.stub_triton()
    assert sys.modules[KERNELS] is stub
    monkeypatch.delitem(sys.modules, KERNELS)
