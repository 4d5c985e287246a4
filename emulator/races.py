"""Races of the two cores of an LNC=2 launch on shared HBM.

Between two meetings (``core_barrier``, ``sendrecv``) nothing orders the cores. So in each such stretch every
access to a tensor in shared HBM is noted, and where the cores meet, what one of them wrote must not be what the
other read or wrote. That finds a race in either order of running, whether or not it changed the result.

Cores that do the same work twice are not refused: where both leave the same bits in an element it does not matter
who was last, and who reads an element that each core wrote once, after writing it itself, reads those bits.
"""

from __future__ import annotations

import numpy as np

from . import dtypes
from .errors import NKIError, kernel_location
from .tensor import Storage, Tensor


class Access:
    """The bytes of a storage that one instruction read or wrote, once or ``count`` times.

    Attributes:
        rows: of the first dimension, those that were touched; None for all.
        when: the number of the first of these accesses.
        low, high: the first byte and the one after the last.
        line: the kernel's line.
    """

    __slots__ = ("shape", "strides", "offset", "rows", "when", "count", "low", "high", "line")

    def __init__(self, t: Tensor, rows: np.ndarray | None, when: int):
        size = dtypes.stored(t.dtype).itemsize
        self.shape = (*t.shape, size)
        self.strides = (*(s * size for s in t.strides), 1)
        self.offset = t.offset * size
        self.rows = rows
        self.when = when
        self.count = 1
        first, last = (0, t.shape[0] - 1) if rows is None else (int(rows.min()), int(rows.max()))
        self.low = self.offset + first * self.strides[0]
        self.high = self.offset + last * self.strides[0] + (t.extent(1) + 1) * size
        self.line = kernel_location()

    def bytes_of(self, flat: np.ndarray) -> np.ndarray:
        """These bytes of a flat map of the storage."""
        view = np.ndarray(self.shape, flat.dtype, flat, self.offset, self.strides)
        return view if self.rows is None else view[self.rows]

    def add_to(self, counts: np.ndarray) -> None:
        """Count the accesses per byte, up to 2."""
        view = np.ndarray(self.shape, counts.dtype, counts, self.offset, self.strides)
        at = slice(None) if self.rows is None else self.rows
        view[at] = np.minimum(view[at] + min(self.count, 2), 2)


class Extent:
    """What a set of accesses spans: from ``low`` to ``high``, in each ``step`` bytes from ``first`` to ``last``.

    The second pair tells apart two cores that share the columns of a matrix between them.
    """

    __slots__ = ("low", "high", "step", "first", "last")

    def __init__(self):
        self.low, self.high, self.step, self.first, self.last = 1 << 62, -1, None, 0, 0

    def add(self, access: Access) -> None:
        step = access.strides[0] if access.shape[0] > 1 else 0
        inner = sum(s * (n - 1) for s, n in zip(access.strides[1:], access.shape[1:], strict=True)) + 1
        if self.high < 0:
            self.step = step
            if step:
                self.first, self.last = access.offset % step, access.offset % step + inner
        elif step != self.step:
            self.step = 0
        elif step:
            first = access.offset % step
            self.first, self.last = min(self.first, first), max(self.last, first + inner)
        self.low, self.high = min(self.low, access.low), max(self.high, access.high)

    def meets(self, other: Extent) -> bool:
        """May the two share bytes?"""
        if self.low >= other.high or other.low >= self.high:
            return False
        if self.step and self.step == other.step and max(self.last, other.last) <= self.step:
            return self.first < other.last and other.first < self.last
        return True


class Log:
    """What each core did to one storage since the cores last met.

    Attributes:
        reads, writes: per core, each access once, by what identifies it.
        extents: of the reads and of the writes of each core.
        before: the bytes when the second core began to overwrite what the first wrote; None if it did not.
    """

    __slots__ = ("reads", "writes", "read_extents", "write_extents", "before", "clock")

    def __init__(self):
        self.clear()

    def clear(self) -> None:
        self.reads: tuple[dict, dict] = ({}, {})
        self.writes: tuple[dict, dict] = ({}, {})
        self.read_extents = (Extent(), Extent())
        self.write_extents = (Extent(), Extent())
        self.before: np.ndarray | None = None
        self.clock = 0

    def note(self, accesses: dict, extent: Extent, t: Tensor, rows: np.ndarray | None) -> Access | None:
        if t.size == 0 or (rows is not None and rows.size == 0):
            return None
        self.clock += 1
        key = (t.offset, t.shape, t.strides, t.dtype, None if rows is None else rows.tobytes())
        access = accesses.get(key)
        if access is None:
            access = accesses[key] = Access(t, rows, self.clock)
            extent.add(access)
        else:
            access.count += 1
        return access


def note_read(core: int, t: Tensor, rows: np.ndarray | None = None) -> None:
    """Core ``core`` reads the view, or some rows of its first dimension."""
    log: Log = t.storage.accesses
    log.note(log.reads[core], log.read_extents[core], t, rows)


def note_write(core: int, t: Tensor, rows: np.ndarray | None = None) -> None:
    """Core ``core`` is about to write the view, or some rows of its first dimension."""
    log: Log = t.storage.accesses
    log.note(log.writes[core], log.write_extents[core], t, rows)
    if log.before is None and log.write_extents[core].meets(log.write_extents[1 - core]):
        log.before = t.storage.raw.copy()


def check(storage: Storage) -> None:
    """The cores meet or end: refuse what conflicts, forget the rest."""
    log: Log = storage.accesses
    if log.writes[0] or log.writes[1]:
        counts = _Counts(storage, log)
        if log.before is not None:
            both = (counts[0] > 0) & (counts[1] > 0) & (storage.raw != log.before)
            if both.any():
                _refuse(storage, log.writes[0], 0, log.writes[1], "writes other values to", int(both.argmax()))
        for writer in (0, 1):
            if log.write_extents[writer].meets(log.read_extents[1 - writer]):
                _check_reads(storage, log, counts, writer)
    log.clear()


class _Counts:
    """How often each core wrote each byte, 2 meaning more than once; counted when it is asked for."""

    def __init__(self, storage: Storage, log: Log):
        self._storage, self._log = storage, log
        self._maps: dict[int, np.ndarray] = {}

    def __getitem__(self, core: int) -> np.ndarray:
        if core not in self._maps:
            counts = self._maps[core] = np.zeros(self._storage.raw.size, np.uint8)
            for access in self._log.writes[core].values():
                access.add_to(counts)
        return self._maps[core]


def _check_reads(storage: Storage, log: Log, counts: _Counts, writer: int) -> None:
    reader = 1 - writer
    for read in log.reads[reader].values():
        theirs = read.bytes_of(counts[writer])
        if not theirs.any():
            continue
        bad = theirs > 0
        own = [access for access in log.writes[reader].values() if access.when < read.when]
        if own:
            before = np.zeros(storage.raw.size, np.uint8)
            for access in own:
                access.add_to(before)
            once = (theirs == 1) & (read.bytes_of(counts[reader]) == 1) & (read.bytes_of(before) > 0)
            bad &= ~once
        if bad.any():
            touched = np.zeros(storage.raw.size, bool)
            view = np.ndarray(read.shape, bool, touched, read.offset, read.strides)
            view[slice(None) if read.rows is None else read.rows] = bad
            at = int(touched.argmax())
            _refuse(storage, log.writes[writer], writer, {None: read}, "reads", at)


def _refuse(storage: Storage, writes: dict, writer: int, others: dict, what: str, at: int) -> None:
    """Raise: byte ``at`` is in conflict."""

    def line(accesses: dict) -> str | None:
        for access in accesses.values():
            access.add_to(touched := np.zeros(storage.raw.size, np.uint8))
            if touched[at]:
                return access.line
        return None

    element = tuple(int(i) for i in np.unravel_index(at // dtypes.stored(storage.dtype).itemsize, storage.shape))
    error = NKIError(
        "core-race",
        f"core {writer} writes {storage.name or 'a tensor'} {storage.shape} in shared HBM at {line(writes)} and core "
        f"{1 - writer} {what} the same elements, the first is {element}, at {line(others)}, with nothing that orders "
        "the two (core_barrier, sendrecv)",
    )
    error.location = line(others)
    raise error
