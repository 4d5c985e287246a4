"""What torchtitan 0.3 lacks to train on a machine without an accelerator, one small function per gap.

`stub_triton` and `prepare` come before torchtitan's own imports, `prepare_config` between parsing and
building. With an accelerator (cuda, xpu or a PrivateUse1 backend such as neuron; mps counts as none) only
`stub_triton` has an effect, and only where Triton is not installed.
"""

import atexit
import importlib.util
import os
import resource
import sys
from types import ModuleType, SimpleNamespace

_TRITON_KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"


def accelerator() -> str | None:
    """Device type of the accelerator that torchtitan would train on, None if there is none."""
    from torch._utils import _get_available_device_type

    device = _get_available_device_type()
    return None if device == "mps" else device


def stub_triton() -> None:
    """torchtitan imports Triton with every model, for an expert-parallel backend; CPU builds of torch lack it."""
    if importlib.util.find_spec("triton") is None:
        sys.modules.setdefault(_TRITON_KERNELS, _MissingTriton(_TRITON_KERNELS))


class _MissingTriton(ModuleType):
    """Has any name one imports from it, as a function that says what is missing."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args, **kwargs):
            raise ImportError(f"{name} of the MinimalAsyncEP backend needs Triton, which is not installed")

        return missing


def prepare(always: bool = False) -> None:
    """Make torchtitan train on the CPU, where there is no accelerator. Must precede the trainer's import.

    Args:
        always: also where there is one.
    """
    if always or accelerator() is None:
        _use_cpu_device()
        _name_set_timeout()
        _exchange_unequal_lists()


def prepare_config(config, always: bool = False) -> None:
    """Make a parsed torchtitan `Trainer.Config` fit the CPU in place, where there is no accelerator (or `always`)."""
    if always or accelerator() is None:
        _shard_plain_parameters(config)
        _sum_gradients(config)


def leave() -> None:
    """End a process that has done its work, where there is no accelerator.

    Native threads of torch that are left over then abort the interpreter's shutdown, once in some hundred runs
    ("terminate called without an active exception"), and torchrun takes the whole training for failed.
    """
    if accelerator() is None:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _use_cpu_device() -> None:
    # Without an accelerator torchtitan assumes cuda. Its other modules copy these two names when imported.
    import torchtitan.tools.utils as utils

    if "torchtitan.distributed" in sys.modules:
        raise RuntimeError("recipes.cpu.prepare() must run before torchtitan's trainer is imported")
    utils.device_type, utils.device_module = "cpu", _cpu_device()


def _cpu_device() -> SimpleNamespace:
    # torch.cpu lacks half of the functions that torchtitan calls on its device module.
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    unit = 1 if sys.platform == "darwin" else 1024

    def memory_stats(device=None):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak}

    def nothing(device=None):
        pass

    return SimpleNamespace(
        current_device=lambda: 0,
        device_count=lambda: 1,
        empty_cache=nothing,
        get_device_name=lambda device=None: "cpu",
        get_device_properties=lambda device=None: SimpleNamespace(name="cpu", total_memory=memory),
        memory_stats=memory_stats,
        reset_peak_memory_stats=nothing,
        set_device=nothing,
        synchronize=nothing,
    )


def _name_set_timeout() -> None:
    # torchtitan shortens the timeouts after step 1 under the public name, which came with torch 2.14.
    import torch.distributed as dist

    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = dist.distributed_c10d._set_pg_timeout


def _exchange_unequal_lists() -> None:
    # Expert parallelism of torchtitan's default backend exchanges lists of tensors of unequal sizes. Gloo can do that
    # with one tensor only.
    import torch
    import torch.distributed as dist

    exchange = dist.all_to_all

    def all_to_all(output_tensor_list, input_tensor_list, group=None, async_op=False):
        sizes = {tensor.shape for tensor in (*output_tensor_list, *input_tensor_list)}
        if async_op or len(sizes) == 1 or dist.get_backend(group) != "gloo":
            return exchange(output_tensor_list, input_tensor_list, group, async_op)
        splits = [[tensor.numel() for tensor in tensors] for tensors in (output_tensor_list, input_tensor_list)]
        received = output_tensor_list[0].new_empty(sum(splits[0]))
        sent = torch.cat([tensor.flatten() for tensor in input_tensor_list])
        dist.all_to_all_single(received, sent, *splits, group=group)
        for target, values in zip(output_tensor_list, received.split(splits[0]), strict=True):
            target.copy_(values.view(target.shape))

    dist.all_to_all = all_to_all


def _shard_plain_parameters(config) -> None:
    # For configs of torchtitan's own, whose default needs torch 2.14; our recipes have chosen. What the command line
    # asks for stays, and is refused. Transformers' models take no other backend than the default; recipes/v5.py gives
    # them a mesh that any torch can shard over.
    asked = any("parallelism.spmd_backend" in word.replace("-", "_") for word in sys.argv)
    if asked or config.model_spec.name == "transformers_modeling_backend":
        return
    from trn_kernels.recipes.parallelism import fit_torch

    default = config.parallelism.spmd_backend
    fit_torch(config)
    if config.parallelism.spmd_backend != default:
        from torchtitan.tools.logging import logger

        logger.info(f"[CPU] parallelism.spmd_backend {default} -> {config.parallelism.spmd_backend}, for this torch")


def _sum_gradients(config) -> None:
    # FSDP folds torchtitan's gradient factor into its reduction, and gloo can only sum.
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule

    parallelize = config.model_spec.parallelize_fn

    def parallelize_and_sum(model, **kwargs):
        model = parallelize(model, **kwargs)
        if dist.get_backend() == "gloo":
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)
        return model

    config.model_spec.parallelize_fn = parallelize_and_sum
