"""Rotary position embedding: ``rope`` in the model's layout, ``rope_hf`` through nki-library's contract.

Operators: ``trn_kernels::rope``, ``rope_backward``, ``rope_hf``, ``rope_hf_backward``. All are functional:
outputs are fresh and contiguous, inputs of any strides stay as they were.

Shape letters: B batch, S sequence, N heads, H head_dim, M rows of the table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trn_kernels.ops.neuron import backend_for, logical_neuron_cores, nki_op, wrap_nki

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)

# rope_hf works on whole tiles of this many positions per core.
ROPE_HF_TILE = 128


def rope(query: Tensor, key: Tensor, rope_cache: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by a table of cosines and sines (rotate-half convention), differentiable.

    ``y = x * cos + rotate_half(x) * sin`` in fp32 with one rounding at the end: bit for bit what torchtitan's
    ``CosSinRoPE`` computes of finite values. A NaN or an infinity may make NaN of the same element of the up to 128
    positions that a kernel takes together. The table gets no gradient.

    Args:
        query: [B, S, Nq, H], float32, bfloat16 or float16; any S, any Nq, even H, any strides.
        key: [B, S, Nk, H], dtype and device of query.
        rope_cache: [M, 2H], or [1, M, 2H] or [B, M, 2H] with a table per batch; cosines then sines; float32
            (recommended) or the dtype of query.
        positions: [B, S] or [1, S] integers, the row of each position; None means 0 to S - 1.

    Returns:
        The rotated query and key, contiguous, same shapes and dtypes.

    Raises:
        TypeError: a dtype that is not one of the above.
        ValueError: shapes, devices or table length that do not fit; on CPU also a position outside the table
            (on a device such a position is a run-time error of the DMA, never a read outside the table).
    """
    return torch.ops.trn_kernels.rope(query, key, rope_cache, positions)


def rope_hf(query: Tensor, key: Tensor, rope_cache: Tensor) -> tuple[Tensor, Tensor]:
    """``rope`` without positions, through the contract of nki-library's ``rope_hf`` kernel.

    The kernel wants [B, N, S, H], so query and key are permuted and copied on the way in and out: ``rope``
    needs neither. Where nkilib is importable its kernel runs (it converts the table to the dtype of query).

    Args:
        query, key, rope_cache: as for ``rope``; S a multiple of 128 * LNC.

    Raises:
        TypeError, ValueError: as ``rope``, and for a sequence length that is no such multiple.
    """
    return torch.ops.trn_kernels.rope_hf(query, key, rope_cache)


# -- references -----------------------------------------------------------------------------------------


def rope_reference(
    query: Tensor,
    key: Tensor,
    rope_cache: Tensor,
    positions: Tensor | None = None,
    heads_first: bool = False,
    backward: bool = False,
) -> tuple[Tensor, Tensor]:
    """What the kernel ``rope`` computes, in plain PyTorch. Arguments as in ``kernels.rope``."""
    num_positions = query.shape[2 if heads_first else 1]
    if positions is None:
        table = rope_cache[..., :num_positions, :]
    elif rope_cache.ndim == 3:
        batch = torch.arange(rope_cache.shape[0], device=rope_cache.device)[:, None]
        table = rope_cache[batch, positions.long()]
    else:
        table = rope_cache[positions.long()]
    table = table.unsqueeze(-3 if heads_first else -2).float()
    cos, sin = table.chunk(2, dim=-1)

    def rotate(x: Tensor) -> Tensor:
        y = x.float()
        first, second = (y * sin if backward else y).chunk(2, dim=-1)
        if backward:
            return (y * cos + torch.cat((second, -first), dim=-1)).to(x.dtype)
        return (y * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)

    return rotate(query), rotate(key)


def rope_hf_reference(query: Tensor, key: Tensor, rope_cache: Tensor, backward: bool = False) -> tuple[Tensor, Tensor]:
    """What the kernel ``rope_hf`` computes, in plain PyTorch. Arguments as in ``kernels.rope_hf``."""
    return rope_reference(query, key, rope_cache, None, True, backward)


# -- checks ---------------------------------------------------------------------------------------------


def _check(query: Tensor, key: Tensor, rope_cache: Tensor, positions: Tensor | None) -> None:
    """Refuse what the kernels do not take, from shapes and dtypes alone."""
    for name, x in (("query", query), ("key", key)):
        if x.dtype not in _FLOATS:
            raise TypeError(f"{name} is {x.dtype}; rope takes float32, bfloat16 or float16")
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; rope takes [batch, sequence, heads, head_dim]")
    if key.dtype != query.dtype:
        raise TypeError(f"key is {key.dtype}, query is {query.dtype}; they must agree")
    for name, t in (("key", key), ("rope_cache", rope_cache), ("positions", positions)):
        if t is not None and t.device != query.device:
            raise ValueError(f"{name} is on {t.device}, query is on {query.device}")
    num_batch, num_positions, _, head_dim = query.shape
    if key.shape[:2] != query.shape[:2] or key.shape[3] != head_dim:
        raise ValueError(
            f"query {tuple(query.shape)} and key {tuple(key.shape)} must agree in batch, sequence and head_dim"
        )
    if head_dim % 2 or head_dim == 0:
        raise ValueError(f"head_dim is {head_dim}; rope rotates pairs, so it must be even and positive")
    if rope_cache.dtype not in (torch.float32, query.dtype):
        raise TypeError(f"rope_cache is {rope_cache.dtype}; it must be float32 or the dtype of query, {query.dtype}")
    if rope_cache.ndim not in (2, 3) or rope_cache.shape[-1] != 2 * head_dim:
        raise ValueError(
            f"rope_cache has shape {tuple(rope_cache.shape)}; for head_dim {head_dim} it must be "
            f"[rows, {2 * head_dim}] or [batch, rows, {2 * head_dim}]"
        )
    if rope_cache.ndim == 3 and rope_cache.shape[0] not in (1, num_batch):
        raise ValueError(
            f"rope_cache {tuple(rope_cache.shape)} is for batch {rope_cache.shape[0]}, query has {num_batch}"
        )
    if positions is None:
        if rope_cache.shape[-2] < num_positions:
            raise ValueError(f"rope_cache has {rope_cache.shape[-2]} rows, the sequence has {num_positions} positions")
        return
    if positions.dtype not in _INTEGERS:
        raise TypeError(f"positions are {positions.dtype}; they index rows, so they must be integers")
    if positions.ndim != 2 or positions.shape[0] not in (1, num_batch) or positions.shape[1] != num_positions:
        raise ValueError(
            f"positions have shape {tuple(positions.shape)}; for this query it must be "
            f"[{num_batch}, {num_positions}] or [1, {num_positions}]"
        )


def _check_values(rope_cache: Tensor, positions: Tensor | None) -> None:
    """Refuse positions outside the table, where their values are on the host."""
    if positions is None or positions.device.type != "cpu" or positions.numel() == 0:
        return
    low, high = (int(v) for v in torch.aminmax(positions))
    rows = rope_cache.shape[-2]
    if low < 0 or high >= rows:
        raise ValueError(f"position {low if low < 0 else high} is outside the {rows} rows of rope_cache")


def _check_rope_hf(query: Tensor, key: Tensor, rope_cache: Tensor) -> None:
    _check(query, key, rope_cache, None)
    lnc = logical_neuron_cores()
    if query.shape[1] % (ROPE_HF_TILE * lnc):
        raise ValueError(
            f"the sequence length is {query.shape[1]}; rope_hf needs a multiple of {ROPE_HF_TILE * lnc} "
            f"({ROPE_HF_TILE} * LNC, LNC is {lnc}); rope takes any length"
        )


# -- operators ------------------------------------------------------------------------------------------

_rope = wrap_nki("rope:rope", op="rope", reference=rope_reference)
_rope_backward = wrap_nki("rope:rope", op="rope_backward", reference=rope_reference)
_rope_hf = wrap_nki("rope_hf:rope_hf", op="rope_hf", reference=rope_hf_reference)
_rope_hf_backward = wrap_nki("rope_hf:rope_hf", op="rope_hf_backward", reference=rope_hf_reference)


def _one_table(rope_cache: Tensor) -> Tensor:
    """A table shared by the whole batch as [M, 2H], so that its rows are read once."""
    batches = rope_cache.shape[0]
    shared = rope_cache.ndim == 3 and (batches == 1 or (batches > 1 and rope_cache.stride(0) == 0))
    return (rope_cache[0] if shared else rope_cache).contiguous()


def _launch(caller, query: Tensor, key: Tensor, *arguments) -> tuple[Tensor, Tensor]:
    """Launch on contiguous tensors. Nothing runs for empty ones: the device would return zeros for both."""
    backend_for(query.device)  # also where nothing runs, what cannot be honoured is an error
    query, key = query.contiguous(), key.contiguous()
    if query.numel() == 0 and key.numel() == 0:
        return torch.empty_like(query), torch.empty_like(key)
    if query.numel() == 0:
        return torch.empty_like(query), caller(key, key, *arguments)[1]
    if key.numel() == 0:
        return caller(query, query, *arguments)[0], torch.empty_like(key)
    return caller(query, key, *arguments)


def _run_rope(caller, query: Tensor, key: Tensor, rope_cache: Tensor, positions: Tensor | None, backward: bool):
    _check(query, key, rope_cache, positions)
    _check_values(rope_cache, positions)
    if positions is not None:
        shared = positions.shape[0] > 1 and positions.stride(0) == 0
        positions = (positions[:1] if shared else positions).to(torch.int32).contiguous()
    return _launch(caller, query, key, _one_table(rope_cache), positions, False, backward)


def _run_rope_hf(caller, query: Tensor, key: Tensor, rope_cache: Tensor, backward: bool):
    _check_rope_hf(query, key, rope_cache)
    query, key = query.transpose(1, 2), key.transpose(1, 2)
    query, key = _launch(caller, query, key, _one_table(rope_cache), backward)
    return query.transpose(1, 2).contiguous(), key.transpose(1, 2).contiguous()


@nki_op("trn_kernels::rope")
def _rope_op(query: Tensor, key: Tensor, rope_cache: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return _run_rope(_rope, query, key, rope_cache, positions, False)


@nki_op("trn_kernels::rope_backward")
def _rope_backward_op(
    grad_query: Tensor, grad_key: Tensor, rope_cache: Tensor, positions: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return _run_rope(_rope_backward, grad_query, grad_key, rope_cache, positions, True)


@nki_op("trn_kernels::rope_hf")
def _rope_hf_op(query: Tensor, key: Tensor, rope_cache: Tensor) -> tuple[Tensor, Tensor]:
    return _run_rope_hf(_rope_hf, query, key, rope_cache, False)


@nki_op("trn_kernels::rope_hf_backward")
def _rope_hf_backward_op(grad_query: Tensor, grad_key: Tensor, rope_cache: Tensor) -> tuple[Tensor, Tensor]:
    return _run_rope_hf(_rope_hf_backward, grad_query, grad_key, rope_cache, True)


def _fake_rope(query, key, rope_cache, positions=None):
    _check(query, key, rope_cache, positions)
    return query.new_empty(query.shape), key.new_empty(key.shape)


def _fake_rope_hf(query, key, rope_cache):
    _check_rope_hf(query, key, rope_cache)
    return query.new_empty(query.shape), key.new_empty(key.shape)


def _save_table(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[2:])


def _register_gradients(op, adjoint, fake) -> None:
    """The rotation is linear in query and key: its gradient is the adjoint operator, with the same table."""

    def backward(ctx, grad_query, grad_key):
        table = ctx.saved_tensors
        grads = adjoint(grad_query, grad_key, *table)
        return *(g if needed else None for g, needed in zip(grads, ctx.needs_input_grad, strict=False)), *(
            None for _ in table
        )

    op.register_fake(fake)
    op.register_autograd(backward, setup_context=_save_table)


_register_gradients(_rope_op, _rope_backward_op, _fake_rope)
_register_gradients(_rope_backward_op, _rope_op, _fake_rope)
_register_gradients(_rope_hf_op, _rope_hf_backward_op, _fake_rope_hf)
_register_gradients(_rope_hf_backward_op, _rope_hf_op, _fake_rope_hf)
