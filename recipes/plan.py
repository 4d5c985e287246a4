"""Memory that one rank of a training needs, computed without the memory, the ranks or a device.

    python -m trn_kernels.recipes.plan --config native_qwen3_4b --ranks 64 --tp 4
    python -m trn_kernels.recipes.plan --config nki_qwen3_30b_a3b --ranks 64 --ep 8 --ac full
    python -m trn_kernels.recipes.plan table docs/scale-out.md  # writes the table there anew

The recipe's model, torchtitan's own parallelisation, loss and optimizer run two steps as rank 0 of N on tensors that
have shapes but no memory (PyTorch's fake tensors and fake process group). What they allocate and free is added up; the
largest sum of the second step, when the optimizer has its state, is the result. So it knows of every layout what
torchtitan knows of it: nothing of FSDP, tensor parallelism or activation checkpointing is repeated here.

The exit status is 0 if the training fits, 1 if it does not, and 2 if there is no plan: an error in what was asked, such
as a layout that the training would refuse too. What the installed torch cannot train is not planned either.

Not in it: what the runtime, its collectives and compiled programs take beside PyTorch's tensors, scratch memory inside
an operator, fragmentation, and what torch.compile saves (blocks are traced as in eager mode). Attention is that of a
CPU, fused; one that materialises its scores needs more. Under expert parallelism every rank is supposed to get as many
rows as it sends; routing that is out of balance needs more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import traceback
import weakref
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

HBM_TRN2 = 24 * 2**30
"""Bytes of HBM of one logical core of trn2 at LNC=2: 96 GiB a chip, in 4 stacks, one for each of its 4 logical cores
(AWS Neuron SDK: Trainium2 architecture, logical NeuronCore configuration)."""

PARTS = {
    "parameters": "this rank's shard",
    "buffers": "RoPE tables, balancing biases",
    "gradients": "this rank's shard",
    "optimizer": "its state",
    "fsdp": "parameters gathered from other ranks, gradients on their way to them",
    "activations": "kept by the forward for the backward",
    "loss": "logits, and all that the loss keeps",
    "backward": "recomputed activations, gradients of activations and whole parameters",
    "step": "clipping and the optimizer's step",
}
"""Part of the memory -> what is in it."""


@dataclass
class Plan:
    """Bytes that one rank needs, at the moment when it needs most."""

    model: str
    ranks: int
    degrees: dict[str, int]
    """Parallel degree by torchtitan's name of the mesh axis."""
    batch: str
    checkpointing: str
    total_parameters: int
    """Of the whole model, in elements."""
    moment: str
    """Part of the step in which the peak is."""
    parts: dict[str, int]
    """Bytes at the peak, by the names in `PARTS`."""

    @property
    def peak(self) -> int:
        """Bytes."""
        return sum(self.parts.values())

    def table(self, hbm: int = HBM_TRN2) -> str:
        """The parts as text, and whether they fit `hbm` bytes."""
        degrees = ", ".join(f"{axis} {degree}" for axis, degree in self.degrees.items() if degree > 1) or "no sharding"
        lines = [
            f"{self.model}, {self.total_parameters / 1e9:.3g} billion parameters",
            f"{self.ranks} rank{'s' * (self.ranks > 1)} ({degrees}), {self.batch}, "
            f"activation checkpointing {self.checkpointing}",
            "",
            *(f"{name:<12}{self.parts[name] / 2**30:9.3f} GiB  {what}" for name, what in PARTS.items()),
            f"{'peak':<12}{self.peak / 2**30:9.3f} GiB  in the {self.moment}",
            f"{'HBM':<12}{hbm / 2**30:9.3f} GiB  of one logical core" + (" (trn2, LNC=2)" if hbm == HBM_TRN2 else ""),
        ]
        left = (hbm - self.peak) / 2**30
        lines.append(f"fits, {left:.2f} GiB left for the runtime" if left >= 0 else f"does not fit by {-left:.2f} GiB")
        return "\n".join(lines)


class LiveBytes(TorchDispatchMode):
    """Adds up the storages that PyTorch's operators make and drop while it is on, and splits their largest sum.

    Args:
        state: function from (a tensor's storage key) sets by part: what are parameters, gradients and so on now.
    """

    def __init__(self, state):
        super().__init__()
        self._state = state
        self._live: dict[int, tuple[int, str]] = {}
        self._fsdp: set[int] = set()
        self._now = self._rising = 0
        self.phase = ""
        self.reset()

    def reset(self) -> None:
        """Forget the peak so far; what is alive stays."""
        self.peak, self.moment, self.parts = 0, "", {}
        self._rising, self._largest = False, None

    def add(self, tensor: Tensor) -> None:
        """Count the storage of a plain tensor, unless it is known."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live:
            self._live[key] = (0, self.phase)
            weakref.finalize(storage, self._drop, key)
            self._set(key, storage.nbytes())

    def split(self) -> None:
        """Split the peak by parts, if there is a new one."""
        if self._rising:
            self._keep()
        if self._largest is None:
            return
        parts, states = Counter(), self._state()
        for key, (size, phase) in self._largest.items():
            part = next((name for name, keys in states.items() if key in keys), None)
            parts[part or ("fsdp" if key in self._fsdp else phase)] += size
        self.parts, self._largest = dict(parts), None

    def _set(self, key: int, size: int) -> None:
        known, phase = self._live[key]
        if size < known and self._rising:
            self._keep()
        self._live[key] = (size, phase)
        self._now += size - known
        if self._now > self.peak:
            self.peak, self.moment, self._rising = self._now, self.phase, True

    def _drop(self, key: int) -> None:
        self._set(key, 0)
        del self._live[key]
        self._fsdp.discard(key)

    def _keep(self) -> None:
        # Something is freed after a rise: the sum was largest just before. A finalizer must not touch tensors, so
        # whose the storages are is found out before the next operator.
        self._rising, self._largest = False, dict(self._live)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # Other subclasses (DTensor and its like) come again, with the tensors inside them.
        if not all(issubclass(t, FakeTensor | torch.nn.Parameter) or t is Tensor for t in types):
            return NotImplemented
        if self._largest is not None:
            self.split()
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self.add(tensor)
        if func.namespace == "fsdp":  # packing before, and unpacking after FSDP's collectives
            tensors = (t for t in tree_iter((args, kwargs, result)) if isinstance(t, Tensor))
            self._fsdp.update(t.untyped_storage()._cdata for t in tensors)
        return result

    def __enter__(self):
        # FSDP frees and restores gathered parameters by the size of their storages, which no operator shows.
        resize, tracker = torch.UntypedStorage.resize_, self

        def resize_(storage, size):
            key = storage._cdata
            if key in tracker._live and size < storage.nbytes():
                tracker._set(key, size)
            resize(storage, size)
            if key in tracker._live:
                tracker._set(key, size)
                tracker._fsdp.add(key)
            return storage

        self._resize, torch.UntypedStorage.resize_ = resize, resize_
        return super().__enter__()

    def __exit__(self, *exception):
        torch.UntypedStorage.resize_ = self._resize
        return super().__exit__(*exception)


def _keys(tensors) -> set[int]:
    """Storages of tensors; of a DTensor that of this rank's part."""
    return {_plain(t).untyped_storage()._cdata for t in tensors if isinstance(t, Tensor)}


def _plain(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def plan(config, ranks: int) -> Plan:
    """What one rank of `ranks` needs for a training config, which is used up.

    Args:
        config: a parsed torchtitan `Trainer.Config`, of a model whose attention is scaled_dot_product_attention.
        ranks: processes of the training.

    Raises:
        RuntimeError: torchtitan is older than 0.3, or this process has process groups.
        ValueError: a layout that the training refuses (`check_parallelism`), or one of those that are not planned for:
            pipeline parallelism, offloading to the CPU.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from trn_kernels.recipes.parallelism import check_parallelism

    if ranks < 1:
        raise ValueError(f"ranks is {ranks}, must be at least 1")
    if not hasattr(config.training, "disable_cuda_graphs"):
        raise RuntimeError("plan needs torchtitan 0.3; this build is an older one")
    if dist.is_initialized():
        raise RuntimeError("plan needs a process of its own: torch.distributed is in use")
    if config.parallelism.pipeline_parallel_degree > 1:
        raise ValueError(
            f"parallelism.pipeline_parallel_degree is {config.parallelism.pipeline_parallel_degree}; plan takes 1: "
            "stages of a pipeline need different amounts"
        )
    if config.training.enable_cpu_offload:
        raise ValueError("training.enable_cpu_offload is on; plan counts memory of the device only")
    check_parallelism(config, processes=ranks)  # with compilation as asked for, which changes what is possible
    config.compile.enable = False
    multithreaded = torch.autograd.is_multithreading_enabled()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        torch.autograd.set_multithreading_enabled(False)  # as torchtitan's own start does
        return _plan(config, ranks)
    finally:
        torch.autograd.set_multithreading_enabled(multithreaded)
        dist.destroy_process_group()


def _plan(config, ranks: int) -> Plan:
    # In the order of torchtitan's trainer, which cannot be used: it needs tokenizer and data, and reads losses.
    from torchtitan.config import TORCH_DTYPE_MAP, apply_overrides
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.tools.utils import set_default_dtype

    from trn_kernels.overrides.registry import check_named

    training, spec = config.training, config.model_spec
    dims = ParallelDims.from_config(config.parallelism, ranks)
    dims.build_mesh()
    dist_utils.set_spmd_backend(config.parallelism.spmd_backend)
    spec.model.update_from_config(config=config)
    if config.override.imports:
        check_named(config.override.imports, config)
        apply_overrides(config.override, config)
    _balance_routing(spec.model)
    with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[training.dtype]):
        model = spec.model.build()
    total = sum(p.numel() for p in model.parameters())
    loss_fn = config.loss.build(compile_config=config.compile)
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder=config.dump_folder,
    )
    batch_ranks = dims.get_mesh("batch").size() if dims.dp_enabled else 1
    steps = _accumulation(training, batch_ranks)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model.to_empty(device="cpu")
        mode.allow_non_fake_inputs = False
        model.train()
        if hasattr(loss_fn, "set_lm_head"):
            loss_fn.set_lm_head(model.lm_head)
            model._skip_lm_head = True
        optimizers = config.optimizer.build(model_parts=[model])
        if spec.post_optimizer_build_fn is not None:
            spec.post_optimizer_build_fn(optimizers, [model], dims)
        context = dist_utils.get_spmd_context(parallel_dims=dims)
        parameters = list(model.parameters())

        def state():
            optimizer = (v for o in optimizers.optimizers for s in o.state.values() for v in s.values())
            return {
                "parameters": _keys(parameters),
                "buffers": _keys(model.buffers()),
                "gradients": _keys(p.grad for p in parameters),
                "optimizer": _keys(optimizer),
            }

        tracker = LiveBytes(state)
        for tensor in (*parameters, *model.buffers()):
            tracker.add(_plain(tensor))
        with tracker:
            for _ in range(2):
                tracker.reset()
                _step(tracker, model, loss_fn, optimizers, context, config, dims, min(steps, 2))
            tracker.split()
    return Plan(
        model=f"{spec.name} {spec.flavor}",
        ranks=ranks,
        degrees={axis: getattr(dims, axis) for axis in ("dp_replicate", "dp_shard", "cp", "tp", "ep")},
        batch=f"{steps} x {training.local_batch_size} x {training.seq_len} tokens a step",
        checkpointing=_checkpointing_name(config.activation_checkpoint),
        total_parameters=total,
        moment={"step": "optimizer's step"}.get(tracker.moment, tracker.moment),
        parts={name: tracker.parts.get(name, 0) for name in PARTS},
    )


def _step(tracker, model, loss_fn, optimizers, context, config, dims, micro_batches: int) -> None:
    from torchtitan.distributed import utils as dist_utils

    training = config.training
    tracker.phase = "step"
    # With CUDA graphs, which other devices leave out with a warning, torchtitan keeps gradients and zeroes them.
    optimizers.zero_grad(set_to_none=training.disable_cuda_graphs)
    for _ in range(micro_batches):
        tracker.phase = "activations"
        inputs, positions, labels = torch.zeros(
            3, training.local_batch_size, training.seq_len, dtype=torch.int64
        ).unbind()
        with context():
            prediction = model(inputs, positions=positions)
            tracker.phase = "loss"
            loss, _ = loss_fn(prediction, labels, torch.ones((), dtype=torch.int64), positions=positions)
            del prediction
            tracker.phase = "backward"
            loss.backward()
        del loss
    tracker.phase = "step"
    dist_utils.clip_grad_norm_(
        list(model.parameters()),
        training.max_norm,
        foreach=True,
        pp_mesh=None,
        ep_enabled=dims.ep_enabled,
    )
    optimizers.step()


def _accumulation(training, batch_ranks: int) -> int:
    """Micro-batches of a step; gradients live through all but the first."""
    if training.global_batch_size < 0:
        return 1
    steps, rest = divmod(training.global_batch_size, training.local_batch_size * batch_ranks)
    if rest or not steps:
        raise ValueError(
            f"training.global_batch_size is {training.global_batch_size}, not a multiple of training.local_batch_size "
            f"{training.local_batch_size} times {batch_ranks} data-parallel ranks"
        )
    return steps


def _balance_routing(model) -> None:
    """Let token dispatchers that read the counts of rows on the host suppose that all ranks get as many."""
    from torchtitan.config import derive
    from torchtitan.models.common import token_dispatcher as titan

    class Balanced(titan.AllToAllTokenDispatcher):
        @dataclass(kw_only=True, slots=True)
        class Config(titan.AllToAllTokenDispatcher.Config):
            pass

        def dispatch(self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E):
            self.rows = topk_expert_ids_TK.numel()
            return super().dispatch(x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E)

        def _sync_token_count_exchange(self, local, counts_of_all_ranks, ep_size):
            share, rest = divmod(self.rows, ep_size)
            splits = [share + (rank < rest) for rank in range(ep_size)]
            return counts_of_all_ranks.reshape(-1), splits, splits

    for _, dispatcher, parent, name in list(model.traverse(titan.AllToAllTokenDispatcher.Config)):
        if type(dispatcher) is titan.AllToAllTokenDispatcher.Config:
            setattr(parent, name, derive(dispatcher, Balanced.Config))


# -- command line ---------------------------------------------------------------------------------------

_AXES = {
    "fsdp": "data_parallel_shard_degree",
    "replicate": "data_parallel_replicate_degree",
    "tp": "tensor_parallel_degree",
    "ep": "expert_parallel_degree",
    "cp": "context_parallel_degree",
}


def _checkpointing(name: str):
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

    return {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}[name]


def _checkpointing_name(config) -> str:
    return "none" if config is None else type(config).__qualname__.split(".")[0].removesuffix("AC").lower()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trn_kernels.recipes.plan",
        description=__doc__.split("\n")[0],
        epilog="Further flags are torchtitan's, such as --training.seq_len 8192.",
        allow_abbrev=False,
    )
    parser.add_argument("--module", default="trn_kernels.recipes.qwen3", help="of the recipe (default: %(default)s)")
    parser.add_argument("--config", required=True, help="function in it")
    parser.add_argument("--ranks", type=int, required=True, help="processes of the training")
    for name, field in _AXES.items():
        parser.add_argument(f"--{name}", type=int, help=f"parallelism.{field} (default: the recipe's)")
    parser.add_argument("--ac", choices=("none", "selective", "full"), help="activation checkpointing")
    parser.add_argument("--hbm", type=float, default=HBM_TRN2 / 2**30, help="GiB of a rank (default: %(default)g)")
    parser.add_argument("--json", action="store_true", help="print bytes as JSON instead of a table")
    return parser


def parse(arguments: list[str] | None = None):
    """(options, torchtitan's parsed config) of a command line; what is not ours goes to torchtitan."""
    from torchtitan.config import ConfigManager

    options, rest = _parser().parse_known_args(arguments)
    config = ConfigManager().parse_args(["--module", options.module, "--config", options.config, *rest])
    for name, field in _AXES.items():
        if getattr(options, name) is not None:
            setattr(config.parallelism, field, getattr(options, name))
    if options.ac is not None:
        config.activation_checkpoint = _checkpointing(options.ac)
    return options, config


_LARGE, _FULL = "nki_qwen3_30b_a3b", "nki_qwen3_30b_a3b_full"
ROWS = (
    "native_qwen3_4b --ranks 64",
    "native_qwen3_4b --ranks 64 --tp 4",
    "native_qwen3_4b --ranks 256 --tp 4",
    "native_qwen3_4b --ranks 256 --tp 4 --replicate 4 --fsdp 16",
    "native_qwen3_4b --ranks 1024 --tp 4 --training.global_batch_size 256",
    f"{_LARGE} --ranks 64",
    f"{_LARGE} --ranks 64 --ep 8",
    f"{_LARGE} --ranks 64 --tp 4 --ep 8",
    f"{_LARGE} --ranks 256 --ep 8",
    f"{_FULL} --ranks 64",
    f"{_FULL} --ranks 64 --ep 8",
    f"{_FULL} --ranks 64 --tp 4 --ep 16",
    f"{_FULL} --ranks 256 --ep 16",
    f"{_FULL} --ranks 1024 --ep 16",
)
"""What is in the table of docs/scale-out.md: recipe and flags."""

_BEGIN, _END = "<!-- table of recipes/plan.py -->", "<!-- end of the table -->"


def table_row(row: str) -> str:
    """One line of the table in docs/scale-out.md, for one of `ROWS`."""
    # Recipes for Neuron are without CUDA graphs.
    result = run(["--config", *row.split(), "--training.disable_cuda_graphs"])
    parts, degrees = result.parts, result.degrees
    state = sum(parts[name] for name in ("parameters", "buffers", "gradients", "optimizer"))
    work = sum(parts[name] for name in ("activations", "loss", "backward", "step"))
    sizes = (f"{size / 2**30:.2f}" for size in (state, parts["fsdp"], work, result.peak))
    axes = (degrees[axis] for axis in ("dp_replicate", "dp_shard", "tp", "ep"))
    cells = (row.split()[0], result.ranks // 64, *axes, *sizes, result.moment)
    return f"| {' | '.join(map(str, cells))} |"


def write_table(path: str) -> None:
    """Replace the table in a Markdown file."""
    before, _, rest = Path(path).read_text().partition(_BEGIN)
    _, found, after = rest.partition(_END)
    if not found:
        raise ValueError(f"{path} has no lines {_BEGIN!r} and {_END!r}")
    head = (
        "| config | instances | replicate | fsdp | tp | ep | state | FSDP buffers | activations | peak | where |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    )
    Path(path).write_text("\n".join([before + _BEGIN, *head, *map(table_row, ROWS), _END + after]))


def run(arguments: list[str]) -> Plan:
    """The plan of a command line."""
    from trn_kernels.recipes import cpu

    options, config = parse(arguments)
    cpu.prepare_config(config, always=True)
    with contextlib.redirect_stdout(sys.stderr):
        return plan(config, options.ranks)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    try:
        return _main(sys.argv[1:] if arguments is None else arguments)
    except OSError as error:  # names the file
        print(f"error: {error}", file=sys.stderr)
    except Exception as error:
        if isinstance(error, ValueError | RuntimeError) and _is_told(error):
            print(f"error: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
    return 2


def _is_told(error: Exception) -> bool:
    """Did this package or torchtitan raise it? The message says it all then."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return (frame.f_globals.get("__package__") or "").startswith(("trn_kernels", "torchtitan"))


def _main(arguments: list[str]) -> int:
    from trn_kernels.recipes import cpu

    table = arguments[:1] == ["table"]
    if table and len(arguments) != 2:
        raise ValueError(f"table takes the path of one Markdown file, got {len(arguments) - 1}")
    if not table:
        options = _parser().parse_known_args(arguments)[0]
        if not 0 < options.hbm < math.inf:
            raise ValueError(f"hbm is {options.hbm:g}, must be a number of GiB above 0")
        hbm = round(options.hbm * 2**30)
    cpu.stub_triton()
    cpu.prepare(always=True)
    import torchtitan.trainer  # noqa: F401

    if table:
        write_table(arguments[1])
        return 0
    result = run(arguments)
    print(json.dumps(asdict(result) | {"peak": result.peak}) if options.json else result.table(hbm))
    return int(result.peak > hbm)


if __name__ == "__main__":
    from trn_kernels.recipes.train import drop_package_folder

    drop_package_folder()
    sys.exit(main())
