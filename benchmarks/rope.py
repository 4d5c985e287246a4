"""Cases of RoPE: shapes of Qwen3, tables in fp32 and bf16, positions gathered; the published way for comparison.

The published operator keeps heads before the sequence, so that the model's tensors are permuted and copied before
and after nki-library's ``rope_hf``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from trn_kernels.benchmarks import nki_library
from trn_kernels.benchmarks.measure import Case, Launch, launch_of
from trn_kernels.emulator import install, interop
from trn_kernels.ops import rope_hf
from trn_kernels.ops.rope import rope_hf_reference, rope_reference

HEADS = {"Qwen3-4B": (32, 8), "Qwen3-30B-A3B": (32, 4)}
HEAD_DIM = 128
SIZE = {torch.float32: 4, torch.bfloat16: 2}
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def cases(full: bool = False) -> Iterator[Case]:
    """The default set; ``full`` adds every combination of model, length, table, direction and LNC."""
    model = "Qwen3-30B-A3B"
    for table in (torch.float32, torch.bfloat16):
        for gathered in (False, True):
            yield ours(model, 4096, table, gathered, "forward", 2)
    for direction in ("backward", "both"):
        yield ours(model, 4096, torch.float32, False, direction, 2)
    for table in (torch.float32, torch.bfloat16):
        yield ours(model, 4096, table, False, "forward", 1)
    yield ours("Qwen3-4B", 4096, torch.float32, False, "forward", 2)
    for length in (2048, 8192, 16384, 32768):
        yield ours(model, length, torch.float32, False, "forward", 2)
    for make in (published, nkilib_alone):
        yield from make(model, 4096, "forward", 2)
    for implementation in ("PyTorch reference", "PyTorch, published layout"):
        yield pytorch(model, 1024, implementation)
    for name in HEADS if full else ():
        for length in (2048, 4096, 8192, 16384, 32768):
            for table in (torch.float32, torch.bfloat16):
                for direction in ("forward", "backward"):
                    for lnc in (1, 2):
                        yield ours(name, length, table, False, direction, lnc)
            yield from published(name, length, "forward", 2)


def shape_of(model: str, length: int, table: torch.dtype, gathered: bool) -> str:
    heads = "{}+{}".format(*HEADS[model])
    return f"{model}, S {length}, {heads} heads, bf16, {NAMES[table]} table{', gathered' if gathered else ''}"


def min_bytes(model: str, length: int, table: torch.dtype, gathered: bool) -> int:
    """q and k read and written in bf16, each row of the table read once, and the positions."""
    tensors = 2 * length * sum(HEADS[model]) * HEAD_DIM * 2
    return tensors + length * 2 * HEAD_DIM * SIZE[table] + (4 * length if gathered else 0)


def _problem(model, length, table, gathered, direction, lnc) -> dict:
    return {
        "op": "rope",
        "direction": direction,
        "shape": shape_of(model, length, table, gathered),
        "lnc": lnc,
        "min_bytes": min_bytes(model, length, table, gathered) * (2 if direction == "both" else 1),
    }


def tensors(model, length, table, gathered, device="cpu") -> tuple[torch.Tensor, ...]:
    """query, key, table and, if gathered, positions: unset but for the integers."""
    query, key = (
        torch.empty(1, length, heads, HEAD_DIM, dtype=torch.bfloat16, device=device) for heads in HEADS[model]
    )
    made = [query, key, torch.empty(length, 2 * HEAD_DIM, dtype=table, device=device)]
    # As two packed documents have them.
    positions = torch.arange(length, dtype=torch.int32).remainder(length // 2 + 1)[None].to(device)
    return (*made, positions) if gathered else tuple(made)


def ours(model, length, table, gathered, direction, lnc) -> Case:
    operators = {
        "forward": [torch.ops.trn_kernels.rope],
        "backward": [torch.ops.trn_kernels.rope_backward],
        "both": [torch.ops.trn_kernels.rope, torch.ops.trn_kernels.rope_backward],
    }[direction]

    def launches():
        return [launch_of(op, *tensors(model, length, table, gathered), lnc=lnc) for op in operators]

    def call(device):
        arguments = [
            t.normal_() if t.is_floating_point() else t for t in tensors(model, length, table, gathered, device)
        ]
        return lambda: [op(*arguments) for op in operators]

    plain = table is torch.float32 and not gathered and direction == "forward" and lnc == 2
    both = tuple(ours(model, length, table, gathered, d, lnc) for d in ("forward", "backward") if direction == "both")
    return Case(
        implementation="trn_kernels",
        **_problem(model, length, table, gathered, direction, lnc),
        parts=both,
        series=("sequence", length) if plain and model == "Qwen3-30B-A3B" else None,
        launches=None if both else launches,
        call=call,
        counts=tuple(op.__name__.split(".")[-1] for op in operators),
    )


# -- for comparison -------------------------------------------------------------------------------------


@functools.cache
def copy_kernel():
    """``permuted(x)``: x [B, S, N, H] to [B, N, S, H] in one DMA from HBM to HBM per core, the least a copy costs."""
    install()
    import nki
    import nki.isa as nisa
    import nki.language as nl

    @nki.jit
    def permuted(x):
        batch, length, heads, dim = x.shape
        out = nl.ndarray((batch, heads, length, dim), dtype=x.dtype, buffer=nl.shared_hbm)
        cores = nl.num_programs(0) if nl.program_ndim() != 0 else 1
        rows = length // cores
        first = nl.program_id(0) * rows if cores > 1 else 0
        for item in range(batch):
            size = length * heads * dim
            source = x.ap([[heads * dim, rows], [dim, heads], [1, dim]], offset=item * size + first * heads * dim)
            target = out.ap([[dim, rows], [length * dim, heads], [1, dim]], offset=item * size + first * dim)
            nisa.dma_copy(dst=target, src=source)
        return out

    return permuted


def _rope_hf_launch(model, length, lnc) -> Launch:
    """nki-library's kernel on tensors with heads first."""
    query, key, table = tensors(model, length, torch.float32, False)
    query, key, table = (
        interop.to_numpy(t) for t in (query.transpose(1, 2).contiguous(), key.transpose(1, 2).contiguous(), table)
    )
    kernel = nki_library.load("core.embeddings.rope_hf").rope_hf
    return Launch(kernel[lnc], (query, key, query.copy(), key.copy()), {"rope_cache": table})


def published(model, length, direction, lnc) -> Iterator[Case]:
    """Permute, copy, ``rope_hf``, permute, copy. Without nki-library the kernel between is ours for its layout."""

    def launches():
        query, key, table = tensors(model, length, torch.float32, False)
        copies = [Launch(copy_kernel()[lnc], (interop.to_numpy(x),), {}) for x in (query, key)]
        if nki_library.available():
            kernel = _rope_hf_launch(model, length, lnc)
        else:
            kernel = launch_of(torch.ops.trn_kernels.rope_hf, query, key, table, lnc=lnc)
        return [*copies, kernel, *copies]  # the way back moves the same bytes in the same runs

    def call(device):
        query, key, table = (t.normal_() for t in tensors(model, length, torch.float32, False, device))
        return lambda: rope_hf(query, key, table)

    yield Case(
        implementation="published" if nki_library.available() else "published, our kernel between",
        **_problem(model, length, torch.float32, False, direction, lnc),
        launches=launches,
        call=call,
        counts=("rope_hf",),
    )


def nkilib_alone(model, length, direction, lnc) -> Iterator[Case]:
    """nki-library's kernel, as if the model kept heads before the sequence."""
    if nki_library.available():
        yield Case(
            implementation="nkilib rope_hf alone",
            **_problem(model, length, torch.float32, False, direction, lnc),
            launches=lambda: [_rope_hf_launch(model, length, lnc)],
        )


def pytorch(model, length, implementation) -> Case:
    """Plain PyTorch in the model's layout or, with the copies, in the published one."""

    def call(device):
        query, key, table = (t.normal_() for t in tensors(model, length, torch.float32, False, device))
        if implementation == "PyTorch reference":
            return lambda: rope_reference(query, key, table)

        def through_copies():
            first = (t.transpose(1, 2).contiguous() for t in (query, key))
            return [t.transpose(1, 2).contiguous() for t in rope_hf_reference(*first, table)]

        return through_copies

    problem = _problem(model, length, torch.float32, False, "forward", 2)
    return Case(implementation=implementation, **problem, call=call, devices=("cpu", "trn2"))
