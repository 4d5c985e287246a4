"""RoPE of torchtitan's cosine/sine models (Qwen3, gpt-oss) through our NKI kernels.

Scope: `CosSinRoPE` itself, not its subclasses. The table stays torchtitan's own (float32, not saved in
checkpoints), so checkpoints are those of the stock model in both directions.

    --override.imports trn_kernels.overrides.nki_rope
"""

from dataclasses import dataclass
from typing import Literal, get_args

import spmd_types as spmd
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchtitan.config import derive
from torchtitan.models.common.rope import CosSinRoPE

from trn_kernels import ops

Kernel = Literal["rope", "rope_hf"]

# torchtitan's layouts for its SPMD type checker, per mesh axis.
_HEADS = {"dp": spmd.S(0), "cp": spmd.S(1), "tp": spmd.S(2)}  # [batch, seq, heads, head_dim]
_TABLE = {"dp": spmd.R, "cp": spmd.R, "tp": spmd.R}  # [rows, 2 * head_dim]
_POSITIONS = {"dp": spmd.S(0), "cp": spmd.S(1), "tp": spmd.R}  # [batch, seq]


class NKIRoPE(CosSinRoPE):
    """`CosSinRoPE` with its rotation done by one of our operators.

    Results equal the stock module's bit for bit. With `kernel="rope"` the float32 table
    `[rows, 2 * head_dim]` and the positions go straight to the operator, which gathers the rows itself.
    `rope_hf` has no positions: it rotates row i of the sequence by row i of its table. torchtitan's data
    loader always passes positions, so for that kernel the table is gathered here first, into
    `[batch, seq, 2 * head_dim]`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        kernel: Kernel = "rope"
        """Operator that rotates: "rope" (any sequence length) or "rope_hf" (multiples of 128 * LNC)."""

        def __post_init__(self):
            if self.kernel not in get_args(Kernel):
                raise ValueError(f"kernel must be one of {get_args(Kernel)}, got {self.kernel!r}")

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate query and key.

        Args:
            query, key: `[batch, seq, heads, head_dim]`, or DTensors of it that share a mesh and placements.
            positions: integer table rows, `[batch, seq]` or `[1, seq]`; None for 0 .. seq-1. With DTensors, a
                plain tensor holds this rank's part.

        Returns:
            Rotated query and key, of the same shapes, dtypes and placements.

        Raises:
            ValueError: a DTensor layout whose local parts cannot be rotated alone; a position out of range.
        """
        if not isinstance(query, DTensor):
            return _rotate(self.config.kernel, query, key, self.cache, positions)
        _check_placements(query, key, self.cache, positions)
        rotated = _rotate(
            self.config.kernel,
            # The rotation is the same on every rank of an axis, so gradients keep the layout of the values.
            query.to_local(grad_placements=query.placements),
            key.to_local(grad_placements=key.placements),
            _local(self.cache),
            _local(positions),
        )
        return tuple(
            DTensor.from_local(local, like.device_mesh, like.placements, run_check=False)
            for local, like in zip(rotated, (query, key), strict=True)
        )

    def _apply(self, fn, recurse=True):
        # module.to(bfloat16) may move the table, but never round it: past a few hundred positions bfloat16
        # angles are noise.
        table = self.cache
        super()._apply(fn, recurse)
        if self.cache.dtype != table.dtype:
            self.cache = table.to(self.cache.device)
        return self


def nki_rope(cfg: CosSinRoPE.Config, *, kernel: Kernel = "rope") -> NKIRoPE.Config:
    """RoPE by an NKI kernel (kernel: rope or rope_hf)."""
    return derive(cfg, NKIRoPE.Config, kernel=kernel)


def _rotate(kernel, query, key, table, positions):
    rotate = _rotate_by_row if positions is None else _rotate_by_position
    return rotate(kernel, query, key, table, positions)


def _rotate_local(kernel, query, key, table, positions):
    if kernel == "rope":
        return ops.rope(query, key, table, positions)
    return ops.rope_hf(query, key, table if positions is None else _gather(table, positions))


# An operator has no rule in the SPMD type checker; its boundary is declared instead. Without the checker
# these are plain calls.
_rotate_by_row = spmd.local_map(in_types=(None, _HEADS, _HEADS, _TABLE, None), out_types=(_HEADS, _HEADS))(
    _rotate_local
)
_rotate_by_position = spmd.local_map(in_types=(None, _HEADS, _HEADS, _TABLE, _POSITIONS), out_types=(_HEADS, _HEADS))(
    _rotate_local
)


def _gather(table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rows of the table at `positions` `[batch, seq]`: `[batch, seq, width]`, or `[seq, width]` for batch 1."""
    if positions.device.type == "cpu" and positions.numel() and not torch.compiler.is_compiling():
        low, high = (int(bound) for bound in positions.aminmax())
        if low < 0 or high >= len(table):
            raise ValueError(f"positions must be in 0..{len(table) - 1} (rows of the table), got {low}..{high}")
    return table[positions[0] if len(positions) == 1 else positions]


def _local(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The table's or the positions' part of this rank; neither has a gradient."""
    return tensor.to_local(grad_placements=tensor.placements) if isinstance(tensor, DTensor) else tensor


def _check_placements(query, key, table, positions) -> None:
    """Refuse DTensors whose local parts cannot be rotated on their own."""
    if not isinstance(key, DTensor) or (key.device_mesh, key.placements) != (
        query.device_mesh,
        query.placements,
    ):
        raise ValueError(
            "query and key must have the same placements, got "
            f"{query.placements} and {getattr(key, 'placements', 'a plain tensor')}"
        )
    # Parts of the sequence know their rows only from positions; parts of head_dim lack the other half.
    dims = (0, 2) if positions is None else (0, 1, 2)
    for placement in query.placements:
        if not (isinstance(placement, Replicate) or isinstance(placement, Shard) and placement.dim in dims):
            raise ValueError(f"query and key must be replicated or sharded on one of dims {dims}, got {placement}")
    if isinstance(table, DTensor) and not all(isinstance(p, Replicate) for p in table.placements):
        raise ValueError(f"the RoPE table must be replicated, got {table.placements}")
