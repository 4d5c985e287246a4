"""Our torchtitan modules on a stand-in of a Neuron device that has values and counts what the host reads of them.

Run by test_host_reads.py in a process of its own, since a process has one such device. Prints JSON.
"""

import json
import os
import sys
from types import ModuleType

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

torch.utils.backend_registration._setup_privateuseone_for_python_backend("neuron")
DEVICE = torch.device("neuron:0")
aten = torch.ops.aten
# What gives the host a value, or a shape that depends on values.
READS = {aten._local_scalar_dense, aten.equal, aten.is_nonzero, aten.nonzero, aten.masked_select, aten.unique_dim}
READS |= {aten.repeat_interleave, aten._unique2, aten.bincount, aten.unique_consecutive}


class OnDevice(torch.Tensor):
    """A tensor of the device; its values are in a CPU tensor that only the device touches."""

    @staticmethod
    def __new__(cls, values, requires_grad=False):
        return torch.Tensor._make_wrapper_subclass(
            cls, values.size(), strides=values.stride(), dtype=values.dtype, device=DEVICE, requires_grad=requires_grad
        )

    def __init__(self, values, requires_grad=False):
        self.values = values

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return device(function, types, args, kwargs or {})


class Device(TorchDispatchMode):
    """Computes what has a tensor of the device in it, or is to be made there."""

    def __init__(self):
        super().__init__()
        self.reads, self.bodies, self.kernels = [], {}, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return self(function, types, args, kwargs or {})

    def __call__(self, function, types, args, kwargs):
        ours = any(isinstance(value, OnDevice) for value in torch.utils._pytree.tree_leaves((args, kwargs)))
        target = kwargs.get("device")
        target = None if target is None else torch.device(target).type
        if not ours and target != "neuron":
            return function(*args, **kwargs)
        if function in self.bodies:  # an operator of ours runs on the device as it is
            with self:
                return self.bodies[function](*args, **kwargs)
        masks = function.overloadpacket is aten.index and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        leaves = target == "cpu" or (function.overloadpacket is aten.copy_ and not isinstance(args[0], OnDevice))
        if ours and (function.overloadpacket in READS or masks or leaves):
            self.reads.append(str(function))
        if target == "neuron":
            kwargs = kwargs | {"device": "cpu"}
        args, kwargs = tree_map_only(OnDevice, lambda tensor: tensor.values, (args, kwargs))
        result = function(*args, **kwargs)
        return result if leaves else tree_map_only(torch.Tensor, OnDevice, result)


device = Device()


def stand_in() -> ModuleType:
    """torch_neuronx as far as our operators use it; kernels run in the emulator, on the device's values."""
    from trn_kernels import emulator
    from trn_kernels.emulator import interop

    class Caller:
        def __init__(self, kernel, grid=(1,)):
            self.kernel, self.grid = kernel, grid

        def __getitem__(self, grid):
            return Caller(self.kernel, grid)

        def __call__(self, *args):
            arrays = [interop.to_numpy(a.values) if isinstance(a, OnDevice) else a for a in args]
            device.kernels.append(self.kernel.__name__)
            result = emulator.simulate(self.kernel[self.grid[0]])(*arrays)
            many = isinstance(result, (tuple, list))
            result = [OnDevice(interop.to_torch(array).clone()) for array in (result if many else [result])]
            return tuple(result) if many else result[0]

    module, utils = ModuleType("torch_neuronx"), ModuleType("torch_neuronx.utils")
    module.nki_op = lambda name, fn, mutates_args=(): torch.library.custom_op(name, fn, mutates_args=mutates_args)
    module.wrap_nki = Caller
    utils.get_logical_neuron_cores = lambda: "2"
    sys.modules["torch_neuronx"], sys.modules["torch_neuronx.utils"] = module, utils
    return module


def moved(module: torch.nn.Module) -> torch.nn.Module:
    for name, buffer in module.named_buffers():
        setattr(module, name, OnDevice(buffer))
    for name, parameter in module.named_parameters():
        setattr(module, name, torch.nn.Parameter(OnDevice(parameter.detach())))
    return module


def both(build, inputs, indices):
    """Outputs and gradients on the CPU and on the device, and what the host read of the device."""
    results = []
    for on_device in (False, True):
        module = build()
        given = [value.clone() for value in inputs]
        places = [None if value is None else value.clone() for value in indices]
        if on_device:
            module = moved(module)
            given = [OnDevice(value) for value in given]
            places = [None if value is None else OnDevice(value) for value in places]
        given = [value.requires_grad_() for value in given]
        device.reads.clear()
        device.kernels.clear()
        outputs = module(*given, *places)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        total = [(output * output).sum() for output in outputs]
        gradients = torch.autograd.grad(total, [*given, *module.parameters()])
        results.append([t.values if isinstance(t, OnDevice) else t for t in (*outputs, *gradients)])
    equal = all(torch.equal(first, second) for first, second in zip(*results, strict=True))
    return {"equal": equal, "tensors": len(results[0]), "reads": list(device.reads), "kernels": list(device.kernels)}


def constant(data, *, device=None, make=torch.tensor, **kwargs):
    """torch.tensor, which a dispatch mode does not see: numbers of the host go to the device."""
    values = make(data, **kwargs)
    return values if device is None or torch.device(device).type != "neuron" else OnDevice(values)


def main() -> None:
    torch.tensor = constant
    from trn_kernels.recipes.cpu import stub_triton

    stub_triton()
    stand_in()
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    from trn_kernels.ops.grouped_experts import _grouped_experts_backward_op, _grouped_experts_op
    from trn_kernels.ops.rope import _rope_backward_op, _rope_hf_backward_op, _rope_hf_op, _rope_op
    from trn_kernels.overrides import NKIGroupedExperts, NKIRoPE
    from trn_kernels.overrides.transformers import _nki_experts

    operators = (_rope_op, _rope_backward_op, _rope_hf_op, _rope_hf_backward_op)
    for operator in (*operators, _grouped_experts_op, _grouped_experts_backward_op):
        device.bodies[operator._opoverload] = operator._init_fn

    def rope(kernel):
        return lambda: NKIRoPE.Config(dim=8, max_seq_len=300, kernel=kernel).build()

    def experts():
        module = NKIGroupedExperts.Config(dim=8, hidden_dim=12, num_experts=3).build()
        for seed, weight in enumerate(module.parameters()):
            weight.data = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
        return module

    class TransformersExperts(Qwen3MoeExperts):
        def forward(self, hidden_states, weights, index):
            return _nki_experts(self, hidden_states, index, weights)

    def transformers_experts():
        sizes = {"hidden_size": 8, "moe_intermediate_size": 12, "num_experts": 3, "num_experts_per_tok": 2}
        module = TransformersExperts(Qwen3MoeConfig(**sizes))
        for seed, weight in enumerate(module.parameters()):
            weight.data = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
        return module

    heads = [torch.randn(2, 256, n, 8, generator=torch.Generator().manual_seed(n)) for n in (4, 2)]
    positions = torch.arange(256).remainder(100).expand(2, -1)
    rows = torch.randn(140, 8, generator=torch.Generator().manual_seed(3))
    found = {}
    with device:
        for kernel in ("rope", "rope_hf"):
            for places in (None, positions):
                found[f"{kernel}, {'no ' * (places is None)}positions"] = both(rope(kernel), heads, [places])
        for counts in ([130, 0, 10], [0, 1, 2], [0, 0, 0]):
            found[f"experts {counts}"] = both(experts, [rows], [torch.tensor(counts)])
        chosen = torch.randint(0, 3, (140, 2), generator=torch.Generator().manual_seed(4))
        found["Transformers' experts"] = both(transformers_experts, [rows, rows[:, :2].softmax(1)], [chosen])
        device.reads.clear()
        x = OnDevice(torch.ones(1))
        for read in (x.item, x.tolist, x.cpu, lambda: int(x), lambda: bool(x), x.nonzero, lambda: torch.equal(x, x)):
            before = len(device.reads)
            try:
                read()
            except Exception as error:  # such a read is refused by the stand-in itself
                device.reads.append(repr(error))
            found[f"seen {len(found)}"] = len(device.reads) > before
    print(json.dumps(found), flush=True)
    # Autograd's thread of the device may abort the interpreter's shutdown: "terminate called without an active
    # exception", once in some hundred runs.
    os._exit(0)


if __name__ == "__main__":
    main()
