"""Errors of the operators against fp64, next to those of the same computation in plain PyTorch.

    python -m trn_kernels.benchmarks.accuracy docs/accuracy.md

rewrites the table in the documentation, which a test compares with the kernels as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from trn_kernels.ops import grouped_experts, rope
from trn_kernels.ops.grouped_experts import grouped_experts_reference

LIMIT = 1.5
"""An operator's error is at most this many times that of PyTorch in the same dtype."""


class Error(NamedTuple):
    """Relative errors ``|y - truth| / |truth|`` (2-norms, truth in fp64) of one result."""

    op: str
    shape: str
    dtype: str
    result: str
    kernel: float
    pytorch: float

    @property
    def ratio(self) -> float:
        return self.kernel / self.pytorch


def errors() -> Iterator[Error]:
    """Every row of the table."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield from _rope(dtype)
        for tokens, top_k, num_experts, dim, hidden in ((256, 2, 8, 256, 768), (131, 3, 7, 97, 47)):
            yield from _grouped_experts(dtype, tokens, top_k, num_experts, dim, hidden)


def _rope(dtype) -> Iterator[Error]:
    generator = torch.Generator().manual_seed(0)
    angles = torch.outer(torch.arange(512), 1e6 ** -(torch.arange(0, 128, 2) / 128)).repeat(1, 2)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    inputs = [torch.randn(1, 512, heads, 128, generator=generator).to(dtype) for heads in (8, 2)]

    def definition(query: Tensor, key: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = table.to(query.dtype)[:, None].chunk(2, dim=-1)

        def rotate(x):
            first, second = x.chunk(2, dim=-1)
            return x * cos + torch.cat((-second, first), dim=-1) * sin

        return rotate(query), rotate(key)

    names = ("query", "key", "grad query", "grad key")
    yield from _compare("rope", "S 512, heads 8 + 2, H 128", names, rope, definition, inputs, table)


def _grouped_experts(dtype, tokens, top_k, num_experts, dim, hidden) -> Iterator[Error]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    ids = draw(tokens, num_experts).topk(top_k).indices.flatten()
    weights = draw(num_experts, hidden, dim), draw(num_experts, dim, hidden), draw(num_experts, hidden, dim)
    inputs = [t.to(dtype) for t in (draw(len(ids), dim), *(w / w.shape[-1] ** 0.5 for w in weights))]
    shape = f"{tokens} tokens, top {top_k} of {num_experts}, D {dim}, F {hidden}"
    names = ("y", "grad x", "grad w1", "grad w2", "grad w3")
    counts = torch.bincount(ids, minlength=num_experts)
    yield from _compare("grouped_experts", shape, names, grouped_experts, grouped_experts_reference, inputs, counts)


def _compare(op, shape, names, kernel: Callable, definition: Callable, inputs: list[Tensor], extra) -> Iterator[Error]:
    wide = [t.double() for t in inputs]
    double = extra.double() if extra.is_floating_point() else extra
    truth = _results(definition, wide, double, inputs[0].dtype)
    ours, theirs = (_results(function, inputs, extra, inputs[0].dtype) for function in (kernel, definition))
    dtype = str(inputs[0].dtype).removeprefix("torch.")
    for name, right, a, b in zip(names, truth, ours, theirs, strict=True):
        yield Error(op, shape, dtype, name, *(float((t.double() - right).norm() / right.norm()) for t in (a, b)))


def _results(function: Callable, inputs: list[Tensor], extra: Tensor, dtype) -> list[Tensor]:
    """Outputs, and the gradients of all inputs for a fixed gradient of the outputs, which ``dtype`` can hold."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    outputs = function(*leaves, extra)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(o.shape, generator=generator).to(dtype).to(o.dtype) for o in outputs]
    return [*(o.detach() for o in outputs), *torch.autograd.grad(outputs, leaves, upstream)]


HEADER = f"""# Accuracy

Relative error `|y - truth| / |truth|` against fp64, of the kernel and of the same computation in plain PyTorch in the
same dtype. The kernel's is at most {LIMIT} times PyTorch's. PyTorch rounds every intermediate result to the dtype; the
kernels compute in fp32 between their loads and stores, so in the small dtypes they are usually closer.

Backend: cpu (the kernels in the emulator, which does not approximate the activation functions as a device does).
In float32 the order of the sums decides, which a processor's BLAS chooses: the experts' figures there vary by a factor
of up to 1.5 between machines. Made by `python -m trn_kernels.benchmarks.accuracy docs/accuracy.md`; a test compares.

| operator | shape | dtype | result | kernel | PyTorch | ratio |
|---|---|---|---|---|---|---|
"""


def main(path: str) -> None:
    rows = [f"| {e.op} | {e.shape} | {e.dtype} | {e.result} | {e.kernel:.2e} | {e.pytorch:.2e} | {e.ratio:.2f} |"
            for e in errors()]  # fmt: skip
    Path(path).write_text(HEADER + "\n".join(rows) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m trn_kernels.benchmarks.accuracy FILE")
    main(sys.argv[1])
