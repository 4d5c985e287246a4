"""Tensors of NKI: a storage in one of the memories and a strided view of it.

An address is ``offset + sum(stride_k * i_k)`` in elements of the view's dtype. SBUF and PSUM tensors have
the partition dimension first; every partition holds the same number of elements (``Tensor.row``).
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from . import dtypes
from .arch import Target, target
from .errors import NKIError, kernel_location
from .registers import VirtualRegister


class MemoryRegion(enum.Enum):
    """Where a tensor lives. ``private_hbm`` is one copy per core, ``shared_hbm`` one for both cores."""

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"

    def __init__(self, value: str):
        self.on_chip: bool = value in ("sbuf", "psum")


class Storage:
    """Bytes of one allocation.

    Attributes:
        raw: the bytes, flat uint8.
        region: the memory.
        row_bytes: of a partition, as the device counts them; on HBM of the whole tensor.
        written: PSUM only, one flag per byte: who wrote it (see ``isa.tensor_engine``)? None before any matmul.
        filled: which elements hold something: True (all), False (none), or one flag per ``unit`` bytes.
        unit: bytes per flag of ``filled``.
        origin: where what nothing wrote came from, if ``filled`` is not True because of a copy or a computation.
        accesses: what the cores did to it since the last meeting (see ``races``); None where one core runs.
        loop: the device loop whose body allocated it (see ``machine.Core.innermost_loop``); None for arguments.
        slot: which buffer of its core it is: iterations of a device loop allocate the same ones. None for arguments
            and shared_hbm. (Not the storage itself: a cycle would keep it until Python's collector runs, which
            trainers turn off.)
        address: (start partition, byte in the partition) that the kernel asked for, or None.
        where: ``file:line`` that allocated it; None for arguments.
        guessed: does it hold integers made of floats in a shape-only run, where no float is computed?
    """

    __slots__ = (
        "raw", "region", "dtype", "shape", "row_bytes", "name", "written", "writable", "loop", "slot", "address",
        "where", "guessed", "filled", "unit", "origin", "accesses",
    )  # fmt: skip

    def __init__(self, raw, region, dtype, shape, name, writable=True, filled: bool = False):
        self.raw = raw
        self.region = region
        self.dtype = dtype
        self.shape = shape
        self.row_bytes = prod(shape[1:] if region.on_chip else shape) * dtypes.itemsize(dtype)
        self.name = name
        self.written: np.ndarray | None = None
        self.writable = writable
        self.filled: bool | np.ndarray = filled or raw.size == 0
        self.unit = dtypes.stored(dtype).itemsize
        self.origin: str | None = None
        self.accesses = None
        self.loop: object | None = None
        self.slot: tuple | None = None
        self.address: tuple[int, int] | None = None
        self.where: str | None = None
        self.guessed = False

    def from_where(self) -> str:
        return f"; it holds what {self.origin} made of unwritten elements" if self.origin else ""


@dataclass(frozen=True)
class Indirect:
    """Run-time part of an address: an index read when the instruction runs, times ``scale`` elements."""

    index: Tensor | VirtualRegister
    scale: int
    per_partition: bool

    def scalar(self) -> int:
        """The one index, read now."""
        if isinstance(self.index, VirtualRegister):
            return self.index.read()
        return int(self.index.load().reshape(-1)[0])


def _view(method):
    """A method that makes a view: arguments that Python refuses are the kernel's mistake."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def checked(self, *args, **kwargs):
        try:
            return method(self, *args, **kwargs)
        except (TypeError, ValueError) as error:
            raise NKIError("signature", f"tensor.{method.__name__}{signature}: {error}") from error

    return checked


class Tensor:
    """A view. ``shape``, ``strides`` and ``offset`` count elements of ``dtype``."""

    __slots__ = ("storage", "dtype", "shape", "strides", "offset", "runtime", "outside", "_array")
    # Without this Python would iterate by indexing; NKI has no loop over the elements of a tensor.
    __iter__ = None

    def __init__(self, storage, dtype, shape, strides, offset=0, runtime=None):
        self.storage: Storage = storage
        self.dtype: str = dtype
        self.shape: tuple[int, ...] = shape
        self.strides: tuple[int, ...] = strides
        self.offset: int = offset
        self.runtime: Indirect | None = runtime
        # Why an instruction may not use this view; kernels may make one that they do not use.
        self.outside: str | None = None
        self._array: np.ndarray | None = None

    # -- attributes ----------------------------------------------------------------------------------

    @property
    def buffer(self) -> MemoryRegion:
        return self.storage.region

    @property
    def name(self) -> str:
        return self.storage.name

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def row(self) -> int:
        """Elements of this view's dtype per partition (on HBM: in the whole storage)."""
        return self.storage.row_bytes // dtypes.itemsize(self.dtype)

    @property
    def start_partition(self) -> int:
        return self.offset // self.row if self.offset and self.row else 0

    @property
    def free_size(self) -> int:
        """Elements per partition that the view covers."""
        return prod(self.shape[1:])

    def __repr__(self) -> str:
        return f"Tensor({self.name or 'unnamed'}, {self.shape}, {self.dtype}, {self.buffer.value})"

    # What NKI knows only on the device cannot steer Python, nor does Python compute with it.

    def _no_value(self, *_):
        raise NKIError(
            "tensor-value",
            f"{self!r} has no value while the kernel is built: Python cannot compare, test, compute with or assign its "
            "elements; use an instruction (`is None` asks whether there is a tensor)",
        )

    def __eq__(self, other):
        # Kernels of nki-library ask `x == None` of arguments that may be missing.
        return False if other is None else self._no_value()

    def __ne__(self, other):
        return True if other is None else self._no_value()

    def __bool__(self) -> bool:
        # nki-library also writes `if x:` of tensors that may be missing, on chip too. A single element that was picked
        # out of one is there, so of it the question can only mean its value.
        picked = self.size == 1 and self.buffer.on_chip and self.storage.shape != self.shape
        return self._no_value() if picked else True

    __hash__ = object.__hash__
    __int__ = __float__ = __index__ = __contains__ = __setitem__ = _no_value
    __lt__ = __le__ = __gt__ = __ge__ = _no_value
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _no_value
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _no_value
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __and__ = __rand__ = __or__ = __ror__ = _no_value
    __xor__ = __rxor__ = __neg__ = __pos__ = __abs__ = __invert__ = _no_value

    # -- values (for the emulator, not for kernels) ---------------------------------------------------

    def array(self) -> np.ndarray:
        """The NumPy view of a tensor without run-time addressing."""
        if self._array is None:
            if self.runtime is not None:
                raise NKIError("indirect", f"{self!r} has a run-time address, which dma_copy and tensor_copy take")
            self._array = self.window(self.shape, self.strides, self.offset)
        return self._array

    def window(self, shape, strides, offset) -> np.ndarray:
        """A NumPy view of the storage: shape, strides and offset in elements of this view's dtype."""
        dtype = dtypes.stored(self.dtype)
        size = dtype.itemsize
        if prod(shape) == 0:
            return np.empty(shape, dtype)
        return np.ndarray(shape, dtype, self.storage.raw, offset * size, tuple(s * size for s in strides))

    def written(self) -> np.ndarray:
        """PSUM only: the accumulation flags of ``array()``, with one more dimension: the bytes of an element."""
        if self.storage.written is None:
            self.storage.written = np.zeros(self.storage.raw.size, np.uint8)
        return self._per_byte(self.storage.written, self.shape, self.strides, self.offset)

    def _per_byte(self, flags, shape, strides, offset) -> np.ndarray:
        """The part of flat per-byte flags that lies under a view, with one more dimension: the bytes."""
        size = dtypes.stored(self.dtype).itemsize
        if prod(shape) == 0:
            return np.empty((*shape, size), flags.dtype)
        return np.ndarray((*shape, size), flags.dtype, flags, offset * size, (*(s * size for s in strides), 1))

    def bytes_of(self, flags: np.ndarray) -> np.ndarray:
        """The part of flags, one per byte of the storage, that lies under this view (at its static address)."""
        return self._per_byte(flags, self.shape, self.strides, self.offset)

    # Which elements were ever written. Most tensors are filled by one instruction, which costs no flags.

    def filled(self, shape=None, strides=None, offset=None) -> np.ndarray:
        """The flags of ``Storage.filled`` under a view (default: this one), per element or per byte of it."""
        shape, strides = self.shape if shape is None else shape, self.strides if strides is None else strides
        offset = self.offset if offset is None else offset
        storage = self.storage
        if isinstance(storage.filled, bool):
            storage.filled = (np.ones if storage.filled else np.zeros)(storage.raw.size // storage.unit, bool)
        size = dtypes.stored(self.dtype).itemsize
        if size != storage.unit and storage.unit != 1:  # two dtypes on one storage: flags per byte from now on
            storage.filled, storage.unit = np.repeat(storage.filled, storage.unit), 1
        if size != storage.unit:
            return self._per_byte(storage.filled, shape, strides, offset)
        if prod(shape) == 0:
            return np.empty(shape, bool)
        return np.ndarray(shape, bool, storage.filled, offset, strides)

    def load(self) -> np.ndarray:
        """The elements, to read them: all of them were written before."""
        if self.storage.filled is not True:
            self.check_filled()
        return self.array()

    def check_filled(self, flags: np.ndarray | None = None) -> None:
        """Refuse to read what nothing wrote. ``flags``: those of the elements that are read, default all."""
        storage = self.storage
        if storage.filled is True or self.size == 0:
            return
        if flags is None:
            flags = self.filled()
        if flags.all():
            if flags.size * storage.unit == storage.raw.size and not self.repeats():
                storage.filled = True
            return
        missing = int(flags.size - np.count_nonzero(flags))
        if storage.filled is not True and not np.asarray(storage.filled).any():
            raise NKIError("never-written", f"{self!r} is read, and nothing has written it{storage.from_where()}")
        at = tuple(int(i) for i in np.unravel_index(int(np.argmin(flags)), flags.shape))[: self.ndim]
        raise NKIError(
            "never-written",
            f"{missing} of {flags.size} elements of {self!r} are read before anything wrote them, the first is {at}"
            + storage.from_where(),
        )

    def unwritten(self) -> np.ndarray | None:
        """Per element, does it hold what nothing wrote? None where that is true of no element."""
        if self.storage.filled is True or self.size == 0:
            return None
        flags = self.filled()
        flags = ~(flags if flags.ndim == self.ndim else flags.all(axis=-1))
        return flags if flags.any() else None

    def forget(self, unwritten: np.ndarray | None) -> None:
        """After a copy or a computation: what these elements were made of, in order, was unwritten, so they are."""
        if unwritten is not None:
            self.filled()[unwritten.reshape(self.shape)] = False
            if self.storage.origin is None:
                self.storage.origin = kernel_location()

    def target(self) -> np.ndarray:
        """The elements, to write all of them."""
        self.fill()
        return self.array()

    def fill(self) -> None:
        """Note that every element is written."""
        storage = self.storage
        if storage.filled is True:
            return
        if self.size * dtypes.stored(self.dtype).itemsize == storage.raw.size and 0 not in self.strides:
            storage.filled = True  # no pattern of a destination repeats an element, so this is all of it
        else:
            self.filled()[...] = True

    def moved(self, skip: bool = False) -> Tensor | None:
        """The view where its scalar index, read now, puts it; None if that is outside and ``skip``."""
        if self.runtime is None or self.runtime.per_partition:
            return self
        index = self.runtime.scalar()
        # On chip the index moves along the free dimensions, so the view must stay in its partitions.
        on_chip = self.buffer.on_chip
        first = index * self.runtime.scale + (self.offset % self.row if on_chip else self.offset)
        last = first + self.extent(1 if on_chip else 0)
        if index < 0 or last >= self.row:
            if skip:
                return None
            raise NKIError("indirect-range", f"index {index} moves {self!r} to element {last} of {self.row}")
        return Tensor(self.storage, self.dtype, self.shape, self.strides, self.offset + index * self.runtime.scale)

    def extent(self, first_dim: int = 0) -> int:
        """Distance in elements from the first to the last element, over the dimensions from ``first_dim``."""
        return sum(s * (n - 1) for s, n in zip(self.strides[first_dim:], self.shape[first_dim:], strict=True))

    def steps(self, first_dim: int = 0) -> tuple[tuple[int, int], ...]:
        """``(stride, count)`` of the dimensions from ``first_dim``, contiguous ones merged: what hardware walks."""
        merged: list[tuple[int, int]] = []
        for stride, count in zip(self.strides[first_dim:], self.shape[first_dim:], strict=True):
            if count == 1:
                continue
            if merged and merged[-1][0] == stride * count:
                merged[-1] = (stride, merged[-1][1] * count)
            else:
                merged.append((stride, count))
        return tuple(merged)

    def repeats(self, sink: bool = False) -> bool:
        """Does the pattern hold one element several times? ``sink`` allows it for dimensions of stride 0."""
        return _repeats(self.shape, self.strides, sink)

    def overlaps(self, other: Tensor) -> bool:
        """Do the two share elements? Run-time addresses are not known here: False."""
        if self.storage is not other.storage or self.runtime is not None or other.runtime is not None:
            return False
        return np.shares_memory(self.array(), other.array())

    def conflicts(self, other: Tensor) -> bool:
        """Do the two share elements other than by being the same elements, each once, in the same order?"""
        if not self.overlaps(other):
            return False
        same = (self.dtype, self.offset, self.steps()) == (other.dtype, other.offset, other.steps())
        return not same or self.repeats()

    # -- views ---------------------------------------------------------------------------------------

    def __getitem__(self, key) -> Tensor:
        """Slices, ``nl.ds``, ints and ``...``, as in NKI.

        On chip an int keeps the partition dimension (size 1) and the result stays at least 2-D; on HBM an
        int drops its dimension and the result stays at least 1-D. Out-of-range slices are errors.
        """
        self._refuse_indirect("indexing")
        keys = list(key) if isinstance(key, tuple) else [key]
        at = next((i for i, k in enumerate(keys) if k is Ellipsis), None)
        if at is not None:
            keys[at : at + 1] = [slice(None)] * (self.ndim - len(keys) + 1)
        keys += [slice(None)] * (self.ndim - len(keys))
        if len(keys) != self.ndim:
            raise NKIError("index", f"{len(keys)} indices for {self!r}")

        offset = self.offset
        kept: list[tuple[int, int]] = []
        minimum = 2 if self.buffer.on_chip else 1
        for dim, (k, size, stride) in enumerate(zip(keys, self.shape, self.strides, strict=True)):
            if isinstance(k, slice):
                if k.start is k.stop is k.step is None:  # most slices: all of the dimension
                    kept.append((size, stride))
                    continue
                start, stop, step = self._bounds(k, dim)
                if self.buffer.on_chip and dim == 0 and step != 1:
                    raise NKIError("partition-step", f"step {step} over the partitions of {self!r}: they are a range")
                offset += start * stride
                kept.append((max(0, -(-(stop - start) // step)), stride * step))
            elif isinstance(k, (int, np.integer)) and not isinstance(k, bool):
                if not -size <= k < size:
                    raise NKIError("index", f"index {k} of dimension {dim} is outside {self!r}")
                offset += (k % size) * stride
                if self.buffer.on_chip and dim == 0:
                    kept.append((1, stride))
            else:
                raise NKIError("index", f"a tensor index is an int, a slice, nl.ds or ..., not {type(k).__name__}")
        while len(kept) < minimum:
            kept.append((1, 1))
        shape, strides = zip(*kept, strict=True)
        return Tensor(self.storage, self.dtype, shape, strides, offset)

    def _bounds(self, key: slice, dim: int) -> tuple[int, int, int]:
        size = self.shape[dim]
        step = 1 if key.step is None else integer(key.step, "a slice step")
        start = 0 if key.start is None else integer(key.start, "a slice start")
        stop = size if key.stop is None else integer(key.stop, "a slice end")
        start, stop = (v + size if v < 0 else v for v in (start, stop))
        if step < 1 or not 0 <= start <= size or not start <= stop <= size:
            raise NKIError("index", f"index range [{start}, {stop}) step {step} exceeds dimension {dim} of {self!r}")
        return start, stop, step

    @_view
    def reshape(self, shape: Sequence[int]) -> Tensor:
        """The same elements in another shape; on chip the partition dimension stays."""
        self._refuse_indirect("reshape")
        shape = _shape(shape)
        if prod(shape) != self.size:
            raise NKIError("reshape", f"{self!r} has {self.size} elements, shape {shape} has {prod(shape)}")
        if self.buffer.on_chip and shape[0] != self.shape[0]:
            raise NKIError("reshape", f"the partition dimension of {self!r} cannot become {shape[0]}")
        if self.buffer.on_chip and len(shape) < 2:
            raise NKIError("on-chip-rank", f"{self.buffer.value} tensors have at least 2 dimensions, got {shape}")
        first = 1 if self.buffer.on_chip else 0
        if not self._contiguous(first):
            raise NKIError("reshape", f"{self!r} with strides {self.strides} is not contiguous")
        strides = self.strides[:first] + row_major(shape[first:])
        return Tensor(self.storage, self.dtype, shape, strides, self.offset)

    @_view
    def view(self, dtype) -> Tensor:
        """The bytes as another dtype; the last dimension counts that one's elements."""
        self._refuse_indirect("view")
        old, new = dtypes.itemsize(self.dtype), dtypes.itemsize(dtype := dtypes.name_of(dtype))
        _same_bytes(self.dtype, dtype)
        if new == old:
            return Tensor(self.storage, dtype, self.shape, self.strides, self.offset)
        if self.strides[-1] != 1 and self.shape[-1] != 1:
            raise NKIError("view", f"the last dimension of {self!r} is not contiguous")
        starts = (self.offset, *self.strides[:-1], self.shape[-1], self.row)
        if any(n * old % new for n in starts):
            raise NKIError("view", f"{self.shape[-1]} elements of {self!r} are no whole number of {dtype}")
        offset, *strides, last, _ = (n * old // new for n in starts)
        return Tensor(self.storage, dtype, (*self.shape[:-1], last), (*strides, 1), offset)

    # The views of NKI 0.5. On chip none of them moves the partition dimension.

    def _dim(self, dim, what: str, first: int = 0) -> int:
        self._refuse_indirect(what)
        dim = integer(dim, "dim")
        lowest = max(first, int(self.buffer.on_chip))
        if not lowest <= dim < self.ndim:
            raise NKIError("view", f"{what} of dimension {dim} of {self!r}")
        return dim

    def _with(self, shape, strides, offset=None) -> Tensor:
        """The same storage under other dimensions; never fewer than NKI keeps."""
        shape, strides = tuple(shape), tuple(strides)
        for _ in range((2 if self.buffer.on_chip else 1) - len(shape)):
            shape, strides = (*shape, 1), (*strides, 1)
        return Tensor(self.storage, self.dtype, shape, strides, self.offset if offset is None else offset)

    @_view
    def slice(self, dim, start, end, step=1) -> Tensor:
        """``self[..., start:end:step, ...]`` of one dimension."""
        if not 0 <= integer(dim, "dim") < self.ndim:
            raise NKIError("view", f"slice of dimension {dim} of {self!r}")
        if not 0 <= integer(start, "start") < integer(end, "end"):
            raise NKIError("index", f"slice from {start} to {end}: 0 <= start < end")
        return self[(slice(None),) * dim + (slice(start, end, step),)]

    @_view
    def select(self, dim, index) -> Tensor:
        """One element of a dimension, which goes; a register or tensor index is read at run time."""
        if not isinstance(index, (Tensor, VirtualRegister)):
            if not 0 <= integer(dim, "dim") < self.ndim:
                raise NKIError("view", f"select of dimension {dim} of {self!r}")
            return self[(slice(None),) * dim + (integer(index, "index"),)]
        dim = self._dim(dim, "select")
        if not isinstance(index, VirtualRegister):
            _check_index(index, "index")
            if index.size != 1:
                raise NKIError("indirect", f"select takes one index, its shape is {index.shape}")
        view = self._with(self.shape[:dim] + self.shape[dim + 1 :], self.strides[:dim] + self.strides[dim + 1 :])
        view.runtime = Indirect(index, self.strides[dim], False)
        return view

    @_view
    def vector_select(self, dim, vector_offset) -> Tensor:
        """Row ``vector_offset[p]`` of dimension 0 for each partition p; HBM only."""
        if self.buffer.on_chip or integer(dim, "dim") != 0:
            raise NKIError("indirect", f"vector_select needs HBM and dimension 0, got {self!r}, dimension {dim}")
        self._refuse_indirect("vector_select")
        _check_index(vector_offset, "vector_offset")
        view = self._with((vector_offset.shape[0], *self.shape[1:]), self.strides)
        view.runtime = Indirect(vector_offset, self.strides[0], True)
        return view

    @_view
    def permute(self, dims) -> Tensor:
        """The dimensions in another order."""
        self._refuse_indirect("permute")
        dims = tuple(integer(d, "a dimension") for d in dims)
        if sorted(dims) != list(range(self.ndim)) or (self.buffer.on_chip and dims[0] != 0):
            raise NKIError("view", f"permute{dims} of {self!r}")
        return self._with((self.shape[d] for d in dims), (self.strides[d] for d in dims))

    @_view
    def broadcast(self, dim, size) -> Tensor:
        """A dimension of size 1 repeated, without a copy."""
        dim = self._dim(dim, "broadcast")
        if self.shape[dim] != 1:
            raise NKIError("view", f"broadcast of dimension {dim} of {self!r}: its size must be 1")
        return self._with(
            (*self.shape[:dim], integer(size, "size"), *self.shape[dim + 1 :]),
            (*self.strides[:dim], 0, *self.strides[dim + 1 :]),
        )

    @_view
    def expand_dim(self, dim) -> Tensor:
        """A new dimension of size 1 before ``dim``."""
        self._refuse_indirect("expand_dim")
        if not int(self.buffer.on_chip) <= integer(dim, "dim") <= self.ndim:
            raise NKIError("view", f"expand_dim {dim} of {self!r}")
        return self._with((*self.shape[:dim], 1, *self.shape[dim:]), (*self.strides[:dim], 1, *self.strides[dim:]))

    @_view
    def squeeze_dim(self, dim) -> Tensor:
        """Without a dimension of size 1."""
        dim = self._dim(dim, "squeeze_dim")
        if self.shape[dim] != 1:
            raise NKIError("view", f"squeeze_dim {dim} of {self!r}: its size must be 1")
        return self._with(self.shape[:dim] + self.shape[dim + 1 :], self.strides[:dim] + self.strides[dim + 1 :])

    @_view
    def reshape_dim(self, dim, shape) -> Tensor:
        """One dimension split into several; one size may be -1."""
        dim = self._dim(dim, "reshape_dim")
        shape = tuple(integer(n, "a size") for n in shape)
        known = prod(n for n in shape if n != -1)
        if shape.count(-1) == 1 and known and self.shape[dim] % known == 0:
            shape = tuple(self.shape[dim] // known if n == -1 else n for n in shape)
        if not shape or min(shape) < 0 or prod(shape) != self.shape[dim]:
            raise NKIError("view", f"dimension {dim} of {self!r} does not split into {shape}")
        inner = (s * self.strides[dim] for s in row_major(shape))
        return self._with(
            (*self.shape[:dim], *shape, *self.shape[dim + 1 :]), (*self.strides[:dim], *inner, *self.strides[dim + 1 :])
        )

    @_view
    def flatten_dims(self, start_dim, end_dim) -> Tensor:
        """The dimensions from ``start_dim`` to ``end_dim`` (inclusive) as one."""
        first, last = self._dim(start_dim, "flatten_dims"), self._dim(end_dim, "flatten_dims")
        part = Tensor(self.storage, self.dtype, self.shape[first : last + 1], self.strides[first : last + 1])
        if first > last or (part.size and len(part.steps()) > 1):
            raise NKIError("view", f"dimensions {first} to {last} of {self!r}, strides {self.strides}, are not one run")
        step = part.steps()[0][0] if part.size and part.steps() else 1
        return self._with(
            (*self.shape[:first], part.size, *self.shape[last + 1 :]),
            (*self.strides[:first], step, *self.strides[last + 1 :]),
        )

    @_view
    def rearrange(self, src_pattern, dst_pattern, fixed_sizes=None) -> Tensor:
        """Split, reorder and merge dimensions by name: ``(("b", ("h", "w")), ("b", "w", "h"), {"h": 4})``."""
        sizes = dict(fixed_sizes or {})
        groups = [[g] if isinstance(g, str) else list(g) for g in src_pattern]
        wanted = [[g] if isinstance(g, str) else list(g) for g in dst_pattern]
        names = [name for group in groups for name in group]
        if len(groups) != self.ndim or len(set(names)) != len(names) or sorted(names) != sorted(sum(wanted, [])):
            raise NKIError("view", f"rearrange {src_pattern} to {dst_pattern} of {self!r}")
        view = self
        for dim in reversed(range(self.ndim)):
            if len(groups[dim]) > 1:
                view = view.reshape_dim(dim, [sizes.get(name, -1) for name in groups[dim]])
            elif sizes.get(groups[dim][0], self.shape[dim]) != self.shape[dim]:
                raise NKIError("view", f"rearrange: {groups[dim][0]} is {self.shape[dim]}, not {sizes}")
        view = view.permute([names.index(name) for group in wanted for name in group])
        for dim, group in enumerate(wanted):
            if len(group) > 1:
                view = view.flatten_dims(dim, dim + len(group) - 1)
        return view

    def is_contiguous(self) -> bool:
        """Row-major without holes; on chip within each partition."""
        return self._contiguous(int(self.buffer.on_chip))

    def indirect(self, index) -> Tensor:
        """Of trn3 only."""
        raise NKIError("target", f"tensor.indirect needs trn3, this is {target().name}")

    def is_indirect(self) -> bool:
        """Has the view a run-time address?"""
        return self.runtime is not None

    def get_pattern(self) -> list[list[int]]:
        """``[[stride, count], ...]``, as ``.ap`` takes it."""
        return [[stride, count] for stride, count in zip(self.strides, self.shape, strict=True)]

    def _contiguous(self, first_dim: int) -> bool:
        """Are the dimensions from ``first_dim`` row-major without holes?"""
        steps = self.steps(first_dim)
        return self.size == 0 or steps == () or (len(steps) == 1 and steps[0][0] == 1)

    @_view
    def ap(self, pattern, offset=None, scalar_offset=None, vector_offset=None, indirect_dim=0, dtype=None):
        """An explicit access pattern of the storage: ``[[stride, count], ...]``, outermost first.

        Args:
            pattern: strides and counts in elements of ``dtype``. On chip the first pair is the partition
                step, ``[elements per partition, partitions]``.
            offset: first element, from the start of the storage; None takes the view's own.
            scalar_offset: a register or a one-element SBUF tensor, read when the instruction runs; its value times the
                size of what lies right of ``indirect_dim`` is added to every address.
            vector_offset: ``[P, 1]`` int32 or uint32 in SBUF; partition p starts at row ``vector_offset[p]``
                of the tensor, and the first stride of the pattern is not used. HBM only, ``indirect_dim`` 0.
            dtype: reinterpret the bytes.
        """
        self._refuse_indirect(".ap")
        if offset is not None and self.offset:
            # NKI's documents contradict each other here: absolute, or added to the view's own offset.
            raise NKIError("ap-offset", f"an explicit offset on a view that starts at {self.offset}; use .ap on "
                           "the whole tensor")  # fmt: skip
        base = self
        if dtype is not None and dtypes.name_of(dtype) != self.dtype:
            base = Tensor(self.storage, dtypes.name_of(dtype), self.shape, self.strides, self.offset)
            _same_bytes(self.dtype, base.dtype)
            if base.offset:
                raise NKIError("ap-offset", f"dtype= on a view that starts at element {self.offset}")
            if self.row * dtypes.itemsize(self.dtype) % dtypes.itemsize(base.dtype):
                raise NKIError("ap-dtype", f"{self.row} elements of {self.dtype} are no whole number of {base.dtype}")
        start = self.offset if offset is None else integer(offset, "offset")
        try:
            pairs = [(stride, count) for stride, count in pattern]
        except (TypeError, ValueError):
            raise NKIError("ap", f"a pattern is [[stride, count], ...], not {pattern!r}") from None
        strides = tuple(integer(stride, "a stride of the pattern") for stride, _ in pairs)
        counts = tuple(integer(count, "a count of the pattern") for _, count in pairs)
        if not counts or any(n < 0 for n in counts) or any(s < 0 for s in strides) or start < 0:
            raise NKIError("ap", f"pattern {pattern} at offset {start}: counts, strides and offset are >= 0")

        if scalar_offset is not None and vector_offset is not None:
            raise NKIError("indirect", "scalar_offset and vector_offset exclude each other")
        indirect = None
        if scalar_offset is not None or vector_offset is not None:
            if not 0 <= integer(indirect_dim, "indirect_dim") < self.ndim:
                raise NKIError("indirect", f"indirect_dim {indirect_dim} of {self!r}")
            if not self._contiguous(1 if self.buffer.on_chip else 0):
                raise NKIError("indirect", f"an index counts rows of a whole tensor, {self!r} is a part of one")
            if dtypes.itemsize(base.dtype) != dtypes.itemsize(self.dtype):
                # In which dtype the index would count is not documented.
                raise NKIError("indirect", f"a run-time index into {self!r} with dtype={base.dtype}")
        if vector_offset is not None:
            _check_index(vector_offset, "vector_offset")
            if self.buffer.on_chip or indirect_dim != 0:
                raise NKIError(
                    "indirect",
                    f"vector_offset needs a tensor in HBM and indirect_dim 0, got {self!r}, dim {indirect_dim}",
                )
            # dma_transpose takes more columns; the other users demand (counts[0], 1).
            if vector_offset.size < counts[0]:
                raise NKIError(
                    "indirect",
                    f"vector_offset has {counts[0]} indices for this pattern, its shape is {vector_offset.shape}",
                )
            indirect = Indirect(vector_offset, prod(self.shape[1:]), True)
        elif scalar_offset is not None:
            if not isinstance(scalar_offset, VirtualRegister):
                _check_index(scalar_offset, "scalar_offset")
                if scalar_offset.size != 1:
                    raise NKIError("indirect", f"scalar_offset is one element, its shape is {scalar_offset.shape}")
            if self.buffer.on_chip and indirect_dim == 0:
                raise NKIError("indirect", f"scalar_offset cannot move the partitions of {self!r}")
            indirect = Indirect(scalar_offset, prod(self.shape[indirect_dim + 1 :]), False)
        view = Tensor(base.storage, base.dtype, counts, strides, start, indirect)
        view._check_pattern()
        return view

    def _check_pattern(self) -> None:
        """The static part of the pattern stays inside the storage and, on chip, inside each partition."""
        row, size = self.row, self.row * (self.storage.shape[0] if self.buffer.on_chip else 1)
        if 0 in self.shape:
            return
        free = self.extent(1)
        if self.buffer.on_chip and row:
            if self.strides[0] != row and self.shape[0] > 1:
                raise NKIError(
                    "ap",
                    f"partition step {self.strides[0]} of {self!r}: it must be {row}, the elements per partition",
                )
            if self.offset % row + free >= row:
                self.outside = (
                    f"elements {self.offset % row} to {self.offset % row + free} of a partition of {row} elements"
                )
                return
        moved = self.runtime is not None and self.runtime.per_partition
        last = self.offset + free + (0 if moved else self.strides[0] * (self.shape[0] - 1))
        if last >= size:
            self.outside = f"element {last} is outside {self.storage.name or 'the tensor'} of {size} elements"

    def check_inside(self) -> None:
        """Refuse to use a view that leaves its tensor."""
        if self.outside is not None:
            raise NKIError("ap", self.outside)

    def _refuse_indirect(self, what: str) -> None:
        self.check_inside()
        if self.runtime is not None:
            raise NKIError("indirect", f"{what} of a view with a run-time address")


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@functools.lru_cache(maxsize=10_000)
def _repeats(shape: tuple[int, ...], strides: tuple[int, ...], sink: bool) -> bool:
    if 0 in shape:
        return False
    reach = 0
    steps = sorted(step for step in zip(strides, shape, strict=True) if step[1] > 1)
    if sink:
        steps = [step for step in steps if step[0] != 0]
    for stride, count in steps:
        if stride <= reach:
            break
        reach += stride * (count - 1)
    else:
        return False
    addresses = np.zeros(1, np.int64)
    for stride, count in steps:
        addresses = np.add.outer(addresses, stride * np.arange(count)).reshape(-1)
    return np.unique(addresses).size != addresses.size


def integer(value, what: str) -> int:
    """``value`` as an int. A bool or a float here is a slip that Python would let pass."""
    if type(value) is int:
        return value
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    raise NKIError("integer", f"{what} is an integer, not {value!r}")


def _shape(shape) -> tuple[int, ...]:
    if not isinstance(shape, (tuple, list)) or not shape:
        raise NKIError("shape", f"a shape is a tuple of sizes, not {shape!r}")
    shape = tuple(integer(n, "a size of the shape") for n in shape)
    if min(shape) < 0:
        raise NKIError("shape", f"shape {shape}: sizes are >= 0")
    return shape


def _same_bytes(old: str, new: str) -> None:
    """Reinterpreting needs the bytes of the device."""
    if not dtypes.precise and old != new and not all(dtypes.stored(d) == dtypes.NUMPY[d] for d in (old, new)):
        raise NKIError("precise-fp", f"{old} as {new} with NKI_PRECISE_FP=0, which stores floats as fp32")


def _check_index(index, what: str) -> None:
    if not isinstance(index, Tensor) or index.buffer is not MemoryRegion.sbuf:
        raise NKIError("index-operand", f"{what} is a tensor in SBUF, got {index!r}")
    index.check_inside()
    if index.dtype not in ("int32", "uint32"):
        raise NKIError("index-operand", f"{what} is int32 or uint32, got {index.dtype}")


def allocate(
    shape,
    dtype,
    region: MemoryRegion,
    name: str = "",
    checked: bool = False,
    floats: bool = True,
    chip: Target | None = None,
) -> Tensor:
    """A fresh tensor.

    checked: reading what nothing wrote is refused; else it reads NaN, or 4 in integers.
    floats: False where no float is ever computed; they are 0.
    chip: whose limits hold, default ``arch.target()``.
    """
    shape = _shape(shape)
    dtype = dtypes.name_of(dtype)
    if region.on_chip:
        _check_on_chip(shape, dtype, region, chip or target())
    count = prod(shape)
    nothing = not floats and dtypes.is_float(dtype)
    raw = (np.zeros if nothing else np.empty)(count * dtypes.stored(dtype).itemsize, np.uint8)
    if not checked and not nothing:
        dtypes.poison(raw.view(dtypes.stored(dtype)))
    return Tensor(Storage(raw, region, dtype, shape, name, filled=not checked), dtype, shape, row_major(shape))


def from_array(array: np.ndarray, name: str, dtype: str | None = None) -> Tensor:
    """A kernel argument: an HBM tensor on the memory of ``array``, which must be contiguous.

    dtype: the NKI dtype that the array holds, default its own.
    """
    dtype = dtypes.name_of(array.dtype) if dtype is None else dtype
    shape = array.shape or (1,)
    raw = array.reshape(-1).view(np.uint8)
    storage = Storage(raw, MemoryRegion.shared_hbm, dtype, shape, name, writable=array.flags.writeable, filled=True)
    return Tensor(storage, dtype, shape, row_major(shape))


def _check_on_chip(shape, dtype, region, chip: Target) -> None:
    if len(shape) < 2:
        raise NKIError("on-chip-rank", f"{region.value} tensors have at least 2 dimensions, got {shape}")
    if shape[0] > chip.partitions:
        raise NKIError("partition-limit", f"{shape[0]} partitions, the limit is {chip.partitions}")
    row_bytes = prod(shape[1:]) * dtypes.itemsize(dtype)
    limit = chip.psum_bytes if region is MemoryRegion.psum else chip.sbuf_usable_bytes
    if row_bytes > limit:
        raise NKIError(
            "capacity",
            f"{row_bytes} bytes of {region.value} per partition for {shape} {dtype}, the limit is {limit}",
        )
