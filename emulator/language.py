"""``nki.language``: dtypes, memories, allocation, ranges and the launch grid."""

from __future__ import annotations

import builtins
import contextlib
import functools
from collections.abc import Iterator

import numpy as np

from . import dtypes
from .arch import target
from .errors import NKIError
from .loops import dynamic_range, fori_loop, while_loop  # noqa: F401  part of nki.language
from .machine import core
from .objects import NKIObject  # noqa: F401  part of nki.language
from .operators import OPS
from .tensor import MemoryRegion, Tensor, integer
from .tensor import Tensor as NkiTensor  # noqa: F401  part of nki.language

sbuf = MemoryRegion.sbuf
psum = MemoryRegion.psum
hbm = private_hbm = MemoryRegion.private_hbm
shared_hbm = MemoryRegion.shared_hbm

# dtypes are plain strings, operators are objects: nl.float32, nl.add, nl.exp, ...
globals().update({name: name for name in dtypes.NAMES if name != "bool"})
globals().update(OPS)
bool_ = "bool"
# Functions of NKI that allocate and compute in one call (documented as experimental): refused by name.
_NOT_IMPLEMENTED = frozenset(
    (
        "all",
        "broadcast_to",
        "ceil",
        "cos",
        "divide",
        "dropout",
        "empty_like",
        "expand_dims",
        "floor",
        "fmod",
        "full",
        "gather_flattened",
        "load",
        "load_transpose2d",
        "logical_not",
        "matmul",
        "max",
        "mean",
        "min",
        "mod",
        "negative",
        "ones",
        "prod",
        "rand",
        "random_seed",
        "rms_norm",
        "softmax",
        "store",
        "sum",
        "tan",
        "transpose",
        "trunc",
        "var",
        "where",
        "zeros",
        "zeros_like",
    )  # fmt: skip
)
_TRN3 = frozenset(("abs_max", "abs_min"))


def __getattr__(name: str):
    if name in ("bool", "range"):  # undocumented names of nki-library; here they would hide Python's
        return {"bool": "bool", "range": builtins.range}[name]
    if name in _NOT_IMPLEMENTED:
        return functools.partial(_not_implemented, name)
    if name in _TRN3:
        return functools.partial(_trn3, name)
    raise AttributeError(f"nki.language has no {name}")


def _not_implemented(name: str, *_, **__):
    raise NKIError("not-implemented", f"the emulator has no nl.{name}; use the instructions of nki.isa")


def _trn3(name: str, *_, **__):
    raise NKIError("target", f"nl.{name} needs trn3, this is {target().name}")


class _TileSize:
    """Limits of the target."""

    @property
    def pmax(self) -> int:
        return target().partitions

    @property
    def psum_bank_fmax(self) -> int:
        """fp32 elements of one PSUM bank."""
        return target().psum_bank_bytes // 4

    psum_fmax = psum_bank_fmax

    @property
    def psum_bank_fmax_bytes(self) -> int:
        return target().psum_bank_bytes

    @property
    def gemm_stationary_fmax(self) -> int:
        return target().matmul_stationary

    @property
    def gemm_moving_fmax(self) -> int:
        return target().matmul_moving

    @property
    def bn_stats_fmax(self) -> int:
        return target().bn_stats

    @property
    def psum_min_align(self) -> int:
        """Bytes. No document prints it; the verifier of the compiler demands it of bf16 slots."""
        return target().psum_alignment

    @property
    def psum_num_banks(self) -> int:
        return target().psum_banks

    @property
    def total_available_sbuf_size(self) -> int:
        """Usable bytes of SBUF per partition."""
        return target().sbuf_usable_bytes

    sbuf_fmax_bytes = total_available_sbuf_size

    @property
    def sbuf_fmax(self) -> int:
        """fp32 elements of SBUF per partition."""
        return self.sbuf_fmax_bytes // 4

    @property
    def sbuf_size_bytes(self) -> int:
        """Usable bytes of all partitions."""
        return self.sbuf_fmax_bytes * self.pmax


tile_size = _TileSize()


def ndarray(shape, dtype, buffer=MemoryRegion.sbuf, name="", address=None) -> Tensor:
    """An uninitialised tensor in ``buffer`` (default SBUF).

    ``address`` is (start partition, byte in the partition) on the chip. Here every tensor has a memory of its own; of
    two whose addresses share bytes, only one may hold a value at a time.
    """
    if not isinstance(buffer, MemoryRegion):
        raise NKIError("buffer", f"buffer is nl.sbuf, nl.psum, nl.hbm or nl.shared_hbm, not {buffer!r}")
    if address is None:
        return core().ndarray(shape, dtype, buffer, name)
    address = _address(address, buffer)
    tensor = core().ndarray(shape, dtype, buffer, name, address)
    _check_address(tensor, *address)
    return tensor


def _address(address, buffer: MemoryRegion) -> tuple[int, int]:
    if not buffer.on_chip or not isinstance(address, (tuple, list)) or len(address) != 2:
        raise NKIError("address", f"address={address!r} of {buffer.value}: it is (partition, byte) in sbuf or psum")
    return integer(address[0], "the partition of an address"), integer(address[1], "the byte of an address")


def _check_address(tensor: Tensor, partition: int, byte: int) -> None:
    """The tensor lies on the chip. From any partition: what only a DMA touches need not start at a multiple of 32."""
    chip = core().target
    if not 0 <= partition <= chip.partitions - tensor.shape[0]:
        raise NKIError(
            "address",
            f"{tensor.shape[0]} partitions from partition {partition}: {tensor.buffer.value} has {chip.partitions}",
        )
    limit = chip.psum_bytes if tensor.buffer is MemoryRegion.psum else chip.sbuf_usable_bytes
    if not 0 <= byte <= limit - tensor.storage.row_bytes:
        raise NKIError(
            "address",
            f"{tensor.storage.row_bytes} bytes from byte {byte} of a partition: {tensor.buffer.value} has {limit}",
        )


def ds(start, size) -> slice:
    """A slice of ``size`` elements from ``start``."""
    start = integer(start, "start")
    return slice(start, start + integer(size, "size"))


def static_range(start, stop=None, step=1) -> builtins.range:
    """An unrolled loop: Python's ``range``."""
    return builtins.range(start) if stop is None else builtins.range(start, stop, step)


affine_range = sequential_range = static_range


def shared_constant(constant) -> Tensor:
    """A read-only tensor in shared HBM with the values of a NumPy array or of a ``.npy`` file."""
    return core().constant(np.ascontiguousarray(np.load(constant) if isinstance(constant, str) else constant))


def shared_identity_matrix(n, dtype="uint8", dst=None) -> Tensor:
    """An identity matrix [n, n] in SBUF."""
    if dst is not None:
        raise NKIError("not-implemented", "shared_identity_matrix with dst")
    tensor = ndarray((integer(n, "n"), n), dtype)
    tensor.target()[...] = np.eye(n)
    return tensor


def is_hbm(buffer) -> bool:
    return buffer in (MemoryRegion.private_hbm, MemoryRegion.shared_hbm)


def is_sbuf(buffer) -> bool:
    return buffer is MemoryRegion.sbuf


def is_psum(buffer) -> bool:
    return buffer is MemoryRegion.psum


def is_on_chip(buffer) -> bool:
    return isinstance(buffer, MemoryRegion) and buffer.on_chip


@contextlib.contextmanager
def no_reorder() -> Iterator[None]:
    """Keep the order of the program, as the emulator always does. Device loops are not legal inside."""
    with core().no_reorder():
        yield


def device_print(print_prefix, tensor) -> None:
    """Print a tensor, of which nothing may be unwritten."""
    if not isinstance(tensor, Tensor):
        raise NKIError("operand", f"nl.device_print prints a tensor, not {type(tensor).__name__}")
    tensor.check_inside()
    print(print_prefix, tensor.load())


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
