"""Grouped experts of a mixture of experts (SwiGLU) on tokens sorted by expert.

Operators: ``trn_kernels::grouped_experts`` and ``grouped_experts_backward``. Both are functional: outputs are
fresh and contiguous, inputs of any strides stay as they were.

Shape letters: R rows, D model dimension, F hidden dimension, E experts; for the tables see ``routing_tables``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trn_kernels.ops.neuron import backend_for, logical_neuron_cores, nki_op, wrap_nki

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int32, torch.int64)

# As in kernels/grouped_experts.py, which this file must not import before a launch; a test compares them.
TILE_ROWS = 128
SLOT_COLUMNS = 8
EXTRA_SLOTS = 3
# Element offsets of the kernels' access patterns are 32-bit integers on the device.
MAX_ELEMENTS = 2**31 - 1
# D of which tiles of 128 rows, and 128 columns of the weights, fit into SBUF in the forward and in the backward.
MAX_DIM = {torch.float32: 8576, torch.bfloat16: 15872, torch.float16: 15872}


def grouped_experts(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
    """``y = (silu(x w1^T) * (x w3^T)) w2^T`` of each expert on its own rows of x, differentiable.

    Matmuls accumulate in fp32; each result is rounded once. Shapes are static and routing is data: nothing reads
    the counts on the host of a device, and one compiled kernel serves every routing.

    For the backward are kept: x, the weights, the routing tables, and h1 = x w1^T and h3 = x w3^T in the dtype of
    x (2 R F elements). Recomputed from them are silu(h1), its slope and the product, which are element-wise. To
    recompute h1 and h3 as well would save their memory and add a third to the matmuls of the backward; activation
    checkpointing makes that trade where it is wanted. Without gradients nothing is kept.

    Args:
        x: [R, D] float32, bfloat16 or float16, rows sorted by expert; any R, also 0; any strides.
        w1, w3: [E, F, D], gate and up projection, dtype and device of x; any E, F, D of at least 1, D up to 8,576 in
            float32 and 15,872 in the others.
        w2: [E, D, F], down projection.
        num_tokens_per_expert: [E] int32 or int64, how many rows each expert has. Rows after the last expert's
            give zeros, in y and in the gradient of x.

    Returns:
        y: [R, D], contiguous, dtype of x.

    Raises:
        TypeError: a dtype that is not one of the above.
        ValueError: shapes or devices that do not fit, a larger D, more than 2^31 - 1 elements in x, h1 or a weight;
            on CPU also counts that are negative or more than R in all (on a device such counts never make the kernel
            touch memory outside its tensors).
    """
    inputs = (x, w1, w2, w3)
    save = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    return torch.ops.trn_kernels.grouped_experts(*inputs, num_tokens_per_expert, save)[0]


# -- routing --------------------------------------------------------------------------------------------


def table_shapes(num_rows: int, num_experts: int, lnc: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Shapes of the two routing tables, enough for every routing of ``num_rows`` rows.

    A core has at most R // 128 full tiles, a partial one per expert that has rows, and one of rows of no expert.
    After them come two tiles per slot, and two empty ones, with which weight gradients begin.
    """
    slots = (num_experts + lnc - 1) // lnc
    return (
        (lnc, _num_tiles(num_rows, num_experts) + 2 * slots + 2, TILE_ROWS),
        (lnc, slots + EXTRA_SLOTS, SLOT_COLUMNS),
    )


def _num_tiles(num_rows: int, num_experts: int) -> int:
    return num_rows // TILE_ROWS + torch.sym_min(num_experts, num_rows) + 1


def routing_tables(num_tokens_per_expert: Tensor, num_rows: int, lnc: int) -> tuple[Tensor, Tensor]:
    """The tables that address every row, from the counts, by integer operations on their device.

    Experts are sorted by their number of tiles and dealt to the cores, so that the experts of a slot have about
    as many tiles on every core: device loops run equally often on all, the shorter expert's last tiles are empty.

    Args:
        num_tokens_per_expert: [E] integers.
        num_rows: R.
        lnc: cores of the launch.

    Returns:
        rows: [LNC, N, 128] int32, the row of x at each place of each tile, -1 for none; never outside 0 .. R - 1.
        slots: [LNC, S + 3, 8] int32; columns and the three extra rows are those of ``kernels.grouped_experts``.
    """
    device = num_tokens_per_expert.device
    num_experts = num_tokens_per_expert.shape[0]
    num_tiles = _num_tiles(num_rows, num_experts)
    num_slots = (num_experts + lnc - 1) // lnc
    integers = {"dtype": torch.int32, "device": device}

    counts = num_tokens_per_expert.clamp(0, num_rows).to(torch.int32)
    ends = counts.cumsum(0, dtype=torch.int32).clamp(max=num_rows)
    tiles = (counts + TILE_ROWS - 1) // TILE_ROWS
    order = torch.argsort(tiles, descending=True, stable=True).to(torch.int32)

    # Expert of slot s on core c, -1 where the cores are more than the experts that are left.
    missing = torch.full((num_slots * lnc - order.shape[0],), -1, **integers)
    experts = torch.cat([order, missing]).view(num_slots, lnc).T
    there = experts >= 0
    index = experts.clamp(min=0).long()
    first_row = torch.where(there, (ends - counts)[index], 0)
    end_row = torch.where(there, ends[index], 0)

    slot_tiles = torch.where(there, tiles[index], 0).amax(0)
    end = slot_tiles.cumsum(0, dtype=torch.int32)
    first = end - slot_tiles
    # The rows of no expert, dealt to the cores tile by tile.
    used, routed = end[-1:], ends[-1:]
    rest = ((num_rows - routed + TILE_ROWS - 1) // TILE_ROWS + lnc - 1) // lnc

    tile = torch.arange(num_tiles, **integers)
    core = torch.arange(lnc, **integers)[:, None]
    slot = (tile[:, None] >= end).sum(1)  # num_slots for the tiles after the last slot's
    is_rest = slot == num_slots
    slot = slot.clamp(max=num_slots - 1)
    start = torch.where(
        is_rest,
        routed + ((tile - used) * lnc + core) * TILE_ROWS,
        first_row[:, slot] + (tile - first[slot]) * TILE_ROWS,
    )
    limit = torch.where(is_rest, num_rows, end_row[:, slot])
    rows = start[..., None] + torch.arange(TILE_ROWS, **integers)
    rows = torch.where((rows >= 0) & (rows < limit[..., None]), rows, -1).to(torch.int32)

    # The first two tiles of every slot once more, without rows where the slot has fewer, and two without rows.
    head = torch.arange(2, **integers)
    place = (first[:, None] + head).clamp(max=num_tiles - 1).long()
    heads = torch.where((head < slot_tiles[:, None])[None, :, :, None], rows[:, place], -1).flatten(1, 2)
    rows = torch.cat([rows, heads, torch.full((lnc, 2, TILE_ROWS), -1, **integers)], dim=1)

    def clip(values: Tensor) -> Tensor:
        return values.clamp(0, num_tiles).expand(lnc, -1)

    rest_from = torch.minimum(first + 2, end)
    quads = rest_from + (end - rest_from) // 4 * 4
    columns = [
        experts.clamp(min=0),
        experts,
        clip(first),
        clip(end),
        (num_tiles + 2 * torch.arange(num_slots, **integers)).expand(lnc, -1),
        clip(rest_from),
        clip(quads),
        clip(quads + (end - quads) // 2 * 2),
    ]
    nothing = num_tiles + 2 * num_slots
    empty = torch.tensor([0, -1, 0, 0, nothing, 0, 0, 0], **integers).expand(lnc, 2, -1)
    zero = torch.zeros_like(used)
    last = torch.cat([zero, zero - 1, used, used + rest, zero, zero, zero, zero])
    last = last.clamp(max=num_tiles).expand(lnc, 1, -1)
    slots = torch.cat([torch.stack(columns, dim=-1), empty, last], dim=1).to(torch.int32)
    return rows.contiguous(), slots.contiguous()


# -- references -----------------------------------------------------------------------------------------


def grouped_experts_reference(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
    """What ``grouped_experts`` computes, as a loop over experts in plain PyTorch (reads the counts on the host)."""
    parts, start = [], 0
    for expert, count in enumerate(num_tokens_per_expert.tolist()):
        rows = x[start : start + count]
        parts.append((F.silu(rows @ w1[expert].T) * (rows @ w3[expert].T)) @ w2[expert].T)
        start += count
    return torch.cat([*parts, torch.zeros_like(x[start:])])


def _expert_rows(rows: Tensor, slots: Tensor):
    """(expert, its rows) of every slot, from the tables."""
    for core in range(rows.shape[0]):
        for _, expert, first, end, *_ in slots[core, :-EXTRA_SLOTS].tolist():
            index = rows[core, first:end].flatten()
            if expert >= 0:
                yield expert, index[index >= 0].long()


def _forward_reference(x, w1, w2, w3, rows, slots, save=False):
    """What the kernel ``grouped_experts`` computes, in plain PyTorch."""
    y, h1, h3 = torch.zeros_like(x), x.new_zeros(x.shape[0], w1.shape[1]), x.new_zeros(x.shape[0], w1.shape[1])
    for expert, index in _expert_rows(rows, slots):
        h1[index], h3[index] = x[index] @ w1[expert].T, x[index] @ w3[expert].T
        y[index] = (F.silu(h1[index]) * h3[index]) @ w2[expert].T
    return (y, h1, h3) if save else (y,)


def _backward_reference(
    grad_y, x, w1, w2, w3, h1, h3, rows, slots, need_x=True, need_w1=True, need_w2=True, need_w3=True
):
    """What the kernel ``grouped_experts_backward`` computes, in plain PyTorch."""
    grads = [torch.zeros_like(t) for t in (x, w1, w2, w3)]
    for expert, index in _expert_rows(rows, slots):
        gate = h1[index].float()
        sigmoid = gate.sigmoid()
        da = (grad_y[index] @ w2[expert]).float()
        dh1 = (da * h3[index] * sigmoid * (1 + gate * (1 - sigmoid))).to(x.dtype)
        dh3 = (da * gate * sigmoid).to(x.dtype)
        grads[0][index] = dh1 @ w1[expert] + dh3 @ w3[expert]
        grads[1][expert] = dh1.T @ x[index]
        grads[2][expert] = grad_y[index].T @ (gate * sigmoid * h3[index]).to(x.dtype)
        grads[3][expert] = dh3.T @ x[index]
    return tuple(g for g, needed in zip(grads, (need_x, need_w1, need_w2, need_w3), strict=True) if needed)


# -- checks ---------------------------------------------------------------------------------------------


def _check(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, counts: Tensor | None = None) -> None:
    """Refuse what the kernels do not take, from shapes and dtypes alone."""
    if x.dtype not in _FLOATS:
        raise TypeError(f"x is {x.dtype}; grouped_experts takes float32, bfloat16 or float16")
    for name, t in (("w1", w1), ("w2", w2), ("w3", w3)):
        if t.dtype != x.dtype:
            raise TypeError(f"{name} is {t.dtype}, x is {x.dtype}; they must agree")
    for name, t in (("w1", w1), ("w2", w2), ("w3", w3), ("num_tokens_per_expert", counts)):
        if t is not None and t.device != x.device:
            raise ValueError(f"{name} is on {t.device}, x is on {x.device}")
    if x.ndim != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; grouped_experts takes [rows, D]")
    if w1.ndim != 3:
        raise ValueError(f"w1 has shape {tuple(w1.shape)}; grouped_experts takes [E, F, D]")
    num_experts, hidden, dim = w1.shape
    if min(num_experts, hidden, dim) < 1:
        raise ValueError(f"w1 has shape {tuple(w1.shape)}; E, F and D must be at least 1")
    for name, t, shape in (
        ("x", x, (x.shape[0], dim)),
        ("w3", w3, (num_experts, hidden, dim)),
        ("w2", w2, (num_experts, dim, hidden)),
    ):
        if tuple(t.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(t.shape)}; with w1 {tuple(w1.shape)} it must be {shape}")
    if isinstance(dim, int) and dim > MAX_DIM[x.dtype]:
        raise ValueError(f"w1 has shape {tuple(w1.shape)}; D {dim} of {x.dtype} must be at most {MAX_DIM[x.dtype]}")
    for name, size in (("x", x.shape[0] * dim), ("h1", x.shape[0] * hidden), ("w1", num_experts * hidden * dim)):
        # A symbolic size of a trace, which may depend on data, is checked when the operator runs.
        if isinstance(size, int) and size > MAX_ELEMENTS:
            raise ValueError(f"{name} has {size} elements; an offset in it must fit 31 bits, at most {MAX_ELEMENTS}")
    if counts is None:
        return
    if counts.dtype not in _INTEGERS:
        raise TypeError(f"num_tokens_per_expert is {counts.dtype}; it must be int32 or int64")
    if tuple(counts.shape) != (num_experts,):
        raise ValueError(f"num_tokens_per_expert has shape {tuple(counts.shape)}; w1 has {num_experts} experts")


def _check_values(counts: Tensor, num_rows: int) -> None:
    """Refuse impossible counts, where their values are on the host."""
    if counts.device.type != "cpu":
        return
    low, total = int(counts.min()), sum(counts.tolist())  # as Python adds up: a sum in int64 may wrap
    if low < 0:
        raise ValueError(f"num_tokens_per_expert has a negative count, {low}")
    if total > num_rows:
        raise ValueError(f"num_tokens_per_expert adds up to {total}, x has {num_rows} rows")


# -- operators ------------------------------------------------------------------------------------------

_forward = wrap_nki("grouped_experts:grouped_experts", op="grouped_experts", reference=_forward_reference)
_backward = wrap_nki(
    "grouped_experts:grouped_experts_backward", op="grouped_experts_backward", reference=_backward_reference
)


def _shapes(x, w1, save: bool, lnc: int):
    """Shapes of what the forward operator returns: y, h1, h3, rows, slots."""
    h = (x.shape[0], w1.shape[1]) if save else (0, w1.shape[1])
    return (x.shape, h, h, *table_shapes(x.shape[0], w1.shape[0], lnc))


@nki_op("trn_kernels::grouped_experts")
def _grouped_experts_op(
    x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, num_tokens_per_expert: Tensor, save: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y, then what the backward needs: h1 and h3 (without rows unless ``save``), and the routing tables."""
    _check(x, w1, w2, w3, num_tokens_per_expert)
    _check_values(num_tokens_per_expert, x.shape[0])
    backend_for(x.device)  # also where nothing runs, what cannot be honoured is an error
    lnc = logical_neuron_cores()
    rows, slots = routing_tables(num_tokens_per_expert, x.shape[0], lnc)
    x, w1, w2, w3 = (t.contiguous() for t in (x, w1, w2, w3))
    # Nothing runs for no rows.
    results = _forward[lnc](x, w1, w2, w3, rows, slots, save) if x.shape[0] else (torch.empty_like(x),)
    empty = _shapes(x, w1, save, lnc)[1]
    y, h1, h3 = results if len(results) == 3 else (results[0], x.new_empty(empty), x.new_empty(empty))
    return y, h1, h3, rows, slots


@_grouped_experts_op.register_fake
def _(x, w1, w2, w3, num_tokens_per_expert, save=True):
    _check(x, w1, w2, w3, num_tokens_per_expert)
    y, h1, h3, rows, slots = _shapes(x, w1, save, logical_neuron_cores())
    tables = (num_tokens_per_expert.new_empty(shape, dtype=torch.int32) for shape in (rows, slots))
    return x.new_empty(y), x.new_empty(h1), x.new_empty(h3), *tables


@nki_op("trn_kernels::grouped_experts_backward")
def _grouped_experts_backward_op(
    grad_y: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    h1: Tensor,
    h3: Tensor,
    rows: Tensor,
    slots: Tensor,
    need: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, w1, w2, w3; one that ``need`` does not ask for has no elements."""
    _check(x, w1, w2, w3)
    wanted = [t for t, needed in zip((x, w1, w2, w3), need, strict=True) if needed]
    if x.shape[0] == 0 or not wanted:
        computed = iter([torch.zeros_like(t, memory_format=torch.contiguous_format) for t in wanted])
    else:
        arguments = (grad_y, x, w1, w2, w3, h1, h3, rows, slots)
        computed = iter(_backward[rows.shape[0]](*(t.contiguous() for t in arguments), *need))
    return tuple(next(computed) if needed else x.new_empty(0) for needed in need)


@_grouped_experts_backward_op.register_fake
def _(grad_y, x, w1, w2, w3, h1, h3, rows, slots, need):
    _check(x, w1, w2, w3)
    return tuple(x.new_empty(t.shape if n else 0) for t, n in zip((x, w1, w2, w3), need, strict=True))


def _save(ctx, inputs, output) -> None:
    x, w1, w2, w3, _, save = inputs
    _, h1, h3, rows, slots = output
    ctx.mark_non_differentiable(h1, h3, rows, slots)
    ctx.set_materialize_grads(False)
    ctx.saved_h = save
    ctx.save_for_backward(x, w1, w2, w3, h1, h3, rows, slots)


def _gradients(ctx, grad_y, *_):
    if grad_y is None:
        return None, None, None, None, None, None
    if not ctx.saved_h:
        raise RuntimeError("trn_kernels::grouped_experts was called with save=False; it has no gradient then")
    need = list(ctx.needs_input_grad[:4])
    grads = torch.ops.trn_kernels.grouped_experts_backward(grad_y, *ctx.saved_tensors, need)
    return *(g if needed else None for g, needed in zip(grads, need, strict=True)), None, None


_grouped_experts_op.register_autograd(_gradients, setup_context=_save)
