"""Cases of the experts: Qwen3-30B-A3B whole and as reduced for training, several routings; others for comparison.

Shape letters: R rows (tokens times top-k), D model dimension, F hidden dimension, E experts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from trn_kernels.benchmarks import nki_library
from trn_kernels.benchmarks.measure import Case, Launch, device_call, launch_of
from trn_kernels.emulator import interop
from trn_kernels.ops.grouped_experts import grouped_experts_reference, routing_tables

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Problem:
    """One mixture-of-experts layer on one logical core.

    ``routing``: "balanced", every expert has as many rows, to one; "random", every token draws its experts uniformly;
    "skewed", it draws expert i in proportion to 1 / (i + 1); "one expert" gets all.
    """

    model: str
    num_experts: int
    top_k: int
    tokens: int
    routing: str
    dim: int = 2048
    hidden: int = 768
    dtype: torch.dtype = torch.bfloat16

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k

    @property
    def shape(self) -> str:
        return (
            f"{self.model}, {self.num_experts} experts top {self.top_k}, {self.tokens} tokens, {NAMES[self.dtype]}, "
            f"{self.routing}"
        )

    def counts(self) -> torch.Tensor:
        """Rows of each expert, [E] int64."""
        return torch.tensor(self._counts())

    @functools.cache  # noqa: B019  a few problems, made once
    def _counts(self) -> np.ndarray:
        if self.routing == "balanced":
            return self.rows // self.num_experts + (np.arange(self.num_experts) < self.rows % self.num_experts)
        if self.routing == "one expert":
            return np.eye(self.num_experts, dtype=np.int64)[self.num_experts // 2] * self.rows
        chance = np.ones(self.num_experts)
        if self.routing == "skewed":
            chance /= np.arange(1, self.num_experts + 1)
        # The largest of logits plus Gumbel noise: draws without replacement.
        noise = np.random.default_rng(0).gumbel(size=(self.tokens, self.num_experts))
        experts = np.argpartition(-(np.log(chance) + noise), self.top_k - 1)[:, : self.top_k]
        return np.bincount(experts.ravel(), minlength=self.num_experts)

    def min_bytes(self, direction: str) -> int:
        """Rows and weights of experts that have rows once in, results once out.

        Forward: x, weights; y, and h1 and h3, which the backward needs. Inference is without those. Backward: the
        gradient of y, x, h1, h3, weights; the gradients of x and of every weight.
        """
        used = int((self._counts() > 0).sum())
        weights = 3 * self.dim * self.hidden
        forward = 2 * self.rows * self.dim + used * weights
        saved = 2 * self.rows * self.hidden
        backward = 3 * self.rows * self.dim + saved + (used + self.num_experts) * weights
        elements = {
            "inference": forward,
            "forward": forward + saved,
            "backward": backward,
            "both": forward + saved + backward,
        }
        return self.dtype.itemsize * elements[direction]

    def flops(self, direction: str) -> int:
        """Three matmuls forward, six backward."""
        matmuls = {"inference": 3, "forward": 3, "backward": 6, "both": 9}[direction]
        return matmuls * 2 * self.rows * self.dim * self.hidden

    def tensors(self, device="cpu") -> dict[str, torch.Tensor]:
        """x, w1, w2, w3, unset."""
        shapes = {
            "x": (self.rows, self.dim),
            "w1": (self.num_experts, self.hidden, self.dim),
            "w2": (self.num_experts, self.dim, self.hidden),
            "w3": (self.num_experts, self.hidden, self.dim),
        }
        return {name: torch.empty(shape, dtype=self.dtype, device=device) for name, shape in shapes.items()}


def reduced(tokens: int, routing: str = "balanced") -> Problem:
    """As ``recipes.qwen3.nki_qwen3_30b_a3b`` trains it."""
    return Problem("Qwen3-30B-A3B reduced", 64, 4, tokens, routing)


def whole(tokens: int, routing: str = "balanced") -> Problem:
    return Problem("Qwen3-30B-A3B", 128, 8, tokens, routing)


# Seconds on the model: what tests compare with the committed figures.
SMALL = Problem("one small layer", 8, 2, 512, "balanced", dim=1024, hidden=512)
FOR_CPU = Problem("one layer for a CPU", 16, 4, 512, "balanced", dim=512, hidden=256, dtype=torch.float32)


def cases(full: bool = False) -> Iterator[Case]:
    """The default set; ``full`` adds more lengths, and nki-library's kernels at 16,384 tokens (many minutes)."""
    for problem in (reduced(1024), reduced(4096), reduced(16384), whole(4096), whole(16384)):
        for direction in ("forward", "backward"):
            yield ours(problem, direction, 2)
    for direction in ("forward", "backward"):
        yield ours(SMALL, direction, 2)
    for problem in (reduced(4096), whole(4096)):
        yield ours(problem, "inference", 2)
    yield ours(reduced(4096), "both", 2)
    for direction in ("forward", "backward"):
        yield ours(reduced(4096), direction, 1)
    for routing in ("random", "skewed", "one expert"):
        for direction in ("forward", "backward"):
            yield ours(reduced(4096, routing), direction, 2)
    yield from nkilib(reduced(4096), *NKILIB)
    yield from nkilib(whole(4096), "bwmm_shard_on_block")
    for implementation in ("PyTorch loop", "PyTorch grouped matmul"):
        for direction in ("inference", "both"):
            yield pytorch(FOR_CPU, direction, implementation)
    if full:
        for problem in (reduced(2048), reduced(8192), reduced(32768), whole(4096, "skewed"), whole(16384, "skewed")):
            for direction in ("forward", "backward"):
                yield ours(problem, direction, 2)
        for problem in (whole(4096), reduced(16384), whole(16384)):
            yield from nkilib(problem, *NKILIB)


def _problem(problem: Problem, direction: str, lnc: int) -> dict:
    return {
        "op": "grouped_experts",
        "direction": direction,
        "shape": problem.shape,
        "lnc": lnc,
        "min_bytes": problem.min_bytes(direction),
        "flops": problem.flops(direction),
    }


def ours(problem: Problem, direction: str, lnc: int) -> Case:
    ops = torch.ops.trn_kernels

    def launches():
        x, w1, w2, w3 = problem.tensors().values()
        if direction != "backward":
            save = direction != "inference"
            return [launch_of(ops.grouped_experts, x, w1, w2, w3, problem.counts(), save, lnc=lnc)]
        h = torch.empty(problem.rows, problem.hidden, dtype=x.dtype)
        tables = routing_tables(problem.counts(), problem.rows, lnc)
        return [launch_of(ops.grouped_experts_backward, x, x, w1, w2, w3, h, h, *tables, [True] * 4, lnc=lnc)]

    def call(device):
        x, w1, w2, w3 = (t.normal_(std=0.02) for t in problem.tensors(device).values())
        counts = problem.counts().to(device)
        forward = (x, w1, w2, w3, counts)
        if direction == "inference":
            return lambda: ops.grouped_experts(*forward, False)
        if direction == "forward":
            return lambda: ops.grouped_experts(*forward, True)
        if direction == "both":

            def both():
                y, *kept = ops.grouped_experts(*forward, True)
                return ops.grouped_experts_backward(y, x, w1, w2, w3, *kept, [True] * 4)

            return both
        y, *kept = ops.grouped_experts(*forward, True)
        return lambda: ops.grouped_experts_backward(y, x, w1, w2, w3, *kept, [True] * 4)

    usual = problem.routing == "balanced" and lnc == 2 and direction in ("forward", "backward")
    return Case(
        implementation="trn_kernels",
        **_problem(problem, direction, lnc),
        series=(f"tokens, {direction}", problem.tokens) if usual and problem.num_experts == 64 else None,
        parts=tuple(ours(problem, d, lnc) for d in ("forward", "backward") if direction == "both"),
        launches=None if direction == "both" else launches,
        call=call,
        counts=(
            *(("grouped_experts",) if direction != "backward" else ()),
            *(("grouped_experts_backward",) if direction in ("backward", "both") else ()),
        ),
    )


# -- for comparison -------------------------------------------------------------------------------------


# nki-library's kernels by what they are compared with here.
NKILIB = {
    "bwmm_shard_on_block": "inference",
    "blockwise_mm_baseline_shard_intermediate_hybrid": "inference",
    "blockwise_mm_baseline_shard_intermediate": "forward",
    "blockwise_mm_bwd": "backward",
}


def nkilib(problem: Problem, *kernels: str) -> Iterator[Case]:
    """nki-library's blockwise kernels on the same rows, each with its own tables of blocks. They need both cores.

    Of its forwards one deals whole blocks to the cores and one, "hybrid", counts its last blocks at run time; what
    its backward needs is saved only by one that splits the hidden dimension.
    """
    for kernel in kernels if nki_library.available() else ():
        yield Case(
            implementation=f"nkilib {kernel}",
            **_problem(problem, NKILIB[kernel], 2),
            launches=lambda kernel=kernel: [nkilib_launch(problem, kernel)],
            call=lambda device, kernel=kernel: device_call(*nkilib_arguments(problem, kernel), 2, device),
        )


def nkilib_launch(problem: Problem, kernel: str) -> Launch:
    function, arguments = nkilib_arguments(problem, kernel)
    return Launch(function[2], (), arguments)


def nkilib_arguments(problem: Problem, kernel: str) -> tuple[object, dict]:
    """A kernel of ``NKILIB`` and its arguments by name, floats unset."""
    block = nki_library.BLOCK
    ids, experts = nki_library.block_tables(problem.counts().numpy(), block)
    rows, dim, hidden, num_experts = problem.rows, problem.dim, problem.hidden, problem.num_experts
    sample = interop.to_numpy(torch.empty(0, dtype=torch.bfloat16))
    empty = lambda *shape: np.empty(shape, sample.dtype)  # noqa: E731
    arguments = {
        "hidden_states": empty(rows, dim),
        "expert_affinities_masked": empty(rows * num_experts, 1),
        "gate_up_proj_weight": empty(num_experts, dim, 2, hidden),
        "down_proj_weight": empty(num_experts, hidden, dim),
        "block_size": block,
        "token_position_to_id": ids,
        "block_to_expert": experts,
        # Every row has one expert, so no result is added to another.
        "is_tensor_update_accumulating": False,
    }
    if kernel == "blockwise_mm_bwd":
        module = nki_library.load("experimental.moe.bwd.blockwise_mm_backward")
        parameters = nki_library.load("experimental.moe.bwd.moe_bwd_parameters")
        arguments |= {
            "gate_up_proj_act_checkpoint_T": empty(len(experts), 2, hidden, block),
            "down_proj_act_checkpoint": empty(len(experts), block, dim),
            "output_hidden_states_grad": empty(rows, dim),
            "skip_dma": parameters.SkipMode(True, False),
            "clamp_limits": parameters.ClampLimits(None, None, None, None),
        }
    else:
        folder = "core.moe.moe_cte"
        module = nki_library.load(f"{folder}.bwmm_shard_on_{'block' if kernel == 'bwmm_shard_on_block' else 'I'}")
        modes = nki_library.load("core.utils.common_types").ExpertAffinityScaleMode
        arguments |= {
            "skip_dma": nki_library.load(f"{folder}.moe_cte_utils").SkipMode(True, False),
            "expert_affinities_scaling_mode": modes.NO_SCALE,
        }
    if kernel == "blockwise_mm_baseline_shard_intermediate":
        arguments["checkpoint_activation"] = True
    if kernel == "blockwise_mm_baseline_shard_intermediate_hybrid":
        # 1 for every block that has rows, and a 0 at the end.
        used = (ids.reshape(-1, block) >= 0).any(1)
        arguments |= {
            "conditions": np.append(used, False).astype(np.int32),
            "block_to_expert": experts[:, None],
        }
    return getattr(module, kernel), arguments


def grouped_matmul(x, w1, w2, w3, counts):
    """The experts by torch's grouped matmul, which takes the last row of each expert."""
    offsets = counts.cumsum(0).to(torch.int32)
    h1, h3 = (F.grouped_mm(x, w.transpose(1, 2), offs=offsets) for w in (w1, w3))
    return F.grouped_mm(F.silu(h1) * h3, w2.transpose(1, 2), offs=offsets)


def pytorch(problem: Problem, direction: str, implementation: str) -> Case:
    function = {"PyTorch loop": grouped_experts_reference, "PyTorch grouped matmul": grouped_matmul}[implementation]

    def call(device):
        inputs = [t.normal_(std=0.02) for t in problem.tensors(device).values()]
        counts = problem.counts().to(device)
        if direction == "inference":
            return lambda: function(*inputs, counts)
        leaves = [t.requires_grad_() for t in inputs]
        upstream = torch.ones_like(leaves[0])
        return lambda: torch.autograd.grad(function(*leaves, counts), leaves, upstream)

    # The loop reads the counts on the host, so neither is timed on the device.
    return Case(implementation=implementation, **_problem(problem, direction, 1), call=call, devices=("cpu",))
