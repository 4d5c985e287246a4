"""``nki.language``: dtypes, memories, allocation, ranges and the launch grid."""

from __future__ import annotations

from . import dtypes
from .errors import NKIError
from .loops import fori_loop, while_loop  # noqa: F401  part of nki.language
from .machine import core
from .operators import OPS
from .tensor import MemoryRegion, Tensor, integer

sbuf = MemoryRegion.sbuf
psum = MemoryRegion.psum
hbm = private_hbm = MemoryRegion.private_hbm
shared_hbm = MemoryRegion.shared_hbm

# dtypes are plain strings, operators are objects: nl.float32, nl.add, nl.exp, ...
globals().update({name: name for name in dtypes.NUMPY if name != "bool"})
globals().update(OPS)
# Names that kernels mention; a tensor of one of these is refused.
for _name in ("float8_e4m3fn", "float8_e8m0fnu", "tfloat32", "float8_e5m2_x4", "float8_e4m3fn_x4", "float4_e2m1fn_x4"):
    globals()[_name] = _name
bool_ = "bool"


class _TileSize:
    """Limits of the target, read while a kernel runs."""

    @property
    def pmax(self) -> int:
        return core().target.partitions

    @property
    def psum_fmax(self) -> int:
        """fp32 elements of one PSUM bank."""
        return core().target.psum_bank_bytes // 4

    @property
    def gemm_stationary_fmax(self) -> int:
        return core().target.matmul_stationary

    @property
    def gemm_moving_fmax(self) -> int:
        return core().target.matmul_moving

    @property
    def psum_num_banks(self) -> int:
        return core().target.psum_banks

    @property
    def total_available_sbuf_size(self) -> int:
        """Usable bytes of SBUF per partition."""
        return core().target.sbuf_usable_bytes

    sbuf_fmax_bytes = total_available_sbuf_size


tile_size = _TileSize()


def ndarray(shape, dtype, buffer=MemoryRegion.sbuf, name="", address=None) -> Tensor:
    """An uninitialised tensor in ``buffer`` (default SBUF). ``address`` is accepted and has no effect here."""
    if not isinstance(buffer, MemoryRegion):
        raise NKIError("buffer", f"buffer is nl.sbuf, nl.psum, nl.hbm or nl.shared_hbm, not {buffer!r}")
    return core().ndarray(shape, dtype, buffer, name)


def ds(start, size) -> slice:
    """A slice of ``size`` elements from ``start``."""
    start = integer(start, "start")
    return slice(start, start + integer(size, "size"))


def static_range(start, stop=None, step=1) -> range:
    """An unrolled loop: Python's ``range``."""
    return range(start) if stop is None else range(start, stop, step)


affine_range = sequential_range = static_range


def program_id(axis=0) -> int:
    """Which core of the launch this is, 0 or 1."""
    _axis(axis)
    return core().index


def num_programs(axes=0) -> int:
    """How many cores the kernel runs on, 1 or 2."""
    if axes is not None:
        _axis(axes)
    return core().cores


def program_ndim() -> int:
    """1 when the kernel was launched with ``kernel[lnc]``, else 0."""
    return int(core().has_grid)


def _axis(axis) -> None:
    if axis != 0:
        raise NKIError("program-axis", f"axis {axis}: the launch grid has one axis, 0")
