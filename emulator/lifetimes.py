"""Which on-chip tensors hold a value at the same time: the capacity of SBUF and PSUM, and addresses that clash.

A value lives from its first write to its last read; a write after a read begins another value, and if it writes a part
and the rest is read later, goes on with the old one. That is the least that any allocator needs in the order of the
program; what is refused here, only a compiler that reorders or spills could fit. A tensor of up to 32 partitions takes
a quarter of the bytes of its rows, one of up to 64 a half: others can lie beside it, as start partitions are multiples
of 32. Alignment, gaps and banks are not counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from math import prod

import numpy as np

from . import dtypes
from .arch import Target
from .errors import NKIError
from .tensor import MemoryRegion, Storage, Tensor


class _Buffer:
    """One place on the chip; iterations of a device loop share theirs.

    Attributes:
        size: bytes per partition.
        quarters: how many of the four groups of 32 partitions it takes.
        spans: [first write, last read] of every value that it held, as counts of instructions.
        was_read: was its last use a read?
        renewed: of a value that began with a part of the tensor, which bytes are its own; None if all are.
    """

    __slots__ = (
        "region", "label", "partitions", "quarters", "size", "address", "where", "spans", "was_read", "renewed",
    )  # fmt: skip

    def __init__(self, storage: Storage, now: int):
        self.region = storage.region
        self.partitions = storage.shape[0]
        self.quarters = 1 if self.partitions <= 32 else 2 if self.partitions <= 64 else 4
        self.size = prod(storage.shape[1:]) * dtypes.itemsize(storage.dtype)
        self.label = f"{storage.name or 'unnamed'} {storage.shape} {storage.dtype}: {self.size} B"
        self.address = storage.address
        self.where = storage.where
        self.spans = [[now, now]]
        self.was_read = False
        self.renewed: np.ndarray | None = None

    def read(self, t: Tensor, now: int) -> None:
        if self.renewed is not None and not t.bytes_of(self.renewed).all():
            # The rest is of the value before, which was needed all the time.
            self.spans[-2:] = [[self.spans[-2][0], now]]
            self.renewed = None
        self.spans[-1][1] = now
        self.was_read = True

    def write(self, t: Tensor, now: int) -> None:
        if self.was_read and self.spans[-1][1] < now:
            self.spans.append([now, now])
            whole = t.size * dtypes.stored(t.dtype).itemsize == t.storage.raw.size
            self.renewed = None if whole else np.zeros(t.storage.raw.size, bool)
        if self.renewed is not None and t.runtime is None:
            t.bytes_of(self.renewed)[...] = True
        self.was_read = False

    def clashes(self, other: _Buffer) -> bool:
        """Do the two have addresses that share bytes?"""
        (p, at), (q, other_at) = self.address, other.address
        return (
            p < q + other.partitions
            and q < p + self.partitions
            and at < other_at + other.size
            and other_at < at + self.size
        )


class Lifetimes:
    """Of the on-chip tensors of one core."""

    def __init__(self):
        self._now = 0
        self._buffers: dict[tuple, _Buffer] = {}

    def issue(self, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """An instruction reads and writes these."""
        self._now = now = self._now + 1
        for t in reads:
            if t.storage.region.on_chip:
                self._buffer(t.storage).read(t, now)
        for t in writes:
            if t.storage.region.on_chip:
                self._buffer(t.storage).write(t, now)

    def _buffer(self, storage: Storage) -> _Buffer:
        buffer = self._buffers.get(storage.slot)
        if buffer is None:
            buffer = self._buffers[storage.slot] = _Buffer(storage, self._now)
        return buffer

    def high_water(self, region: MemoryRegion) -> tuple[int, list[_Buffer]]:
        """The most bytes that live at a time, a mean per partition, and the tensors that they belong to."""
        changes: dict[int, int] = defaultdict(int)
        buffers = [b for b in self._buffers.values() if b.region is region]
        for buffer in buffers:
            for first, last in buffer.spans:
                changes[first] += buffer.size * buffer.quarters
                changes[last + 1] -= buffer.size * buffer.quarters
        level = peak = peak_at = 0
        for at in sorted(changes):
            level += changes[at]
            if level > peak:
                peak, peak_at = level, at
        return -(-peak // 4), [b for b in buffers if any(first <= peak_at <= last for first, last in b.spans)]

    def check(self, target: Target, unchecked: frozenset[str] = frozenset()) -> None:
        """Refuse what does not fit the target, and values that are lost because their addresses clash."""
        for region, limit in ((MemoryRegion.sbuf, target.sbuf_usable_bytes), (MemoryRegion.psum, target.psum_bytes)):
            peak, live = self.high_water(region)
            if peak > limit and "capacity" not in unchecked:
                largest = "; ".join(b.label for b in sorted(live, key=lambda b: -b.size * b.quarters)[:8])
                error = NKIError(
                    "capacity",
                    f"{peak} bytes of {region.value} per partition are live at a time in the program's order, the "
                    f"limit is {limit}: {len(live)} tensors, the largest are {largest}",
                )
                error.location = live[-1].where
                raise error
        for old, new in () if "address-overlap" in unchecked else self._clashes():
            error = NKIError(
                "address-overlap",
                f"{new.label} at {new.address} of {new.region.value} overwrites {old.label} at {old.address}, "
                f"allocated at {old.where}, which is read later",
            )
            error.location = new.where
            raise error

    def _clashes(self) -> Iterator[tuple[_Buffer, _Buffer]]:
        """Values that live at a time at addresses that share bytes. One that ends where the next begins is in place."""
        for region in (MemoryRegion.sbuf, MemoryRegion.psum):
            placed = [b for b in self._buffers.values() if b.region is region and b.address is not None]
            values = sorted(((first, last, i) for i, b in enumerate(placed) for first, last in b.spans))
            live: list[tuple[int, int]] = []
            for first, last, i in values:
                live = [(end, j) for end, j in live if end > first]
                for _, j in live:
                    if i != j and placed[i].clashes(placed[j]):
                        yield placed[j], placed[i]
                live.append((last, i))
