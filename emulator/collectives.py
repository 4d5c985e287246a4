"""``nki.collectives``: names that kernels import. A launch here has one device, so every call is refused by name."""

from __future__ import annotations

from .errors import NKIError

_NAMES = (
    "all_gather",
    "all_gather_v",
    "all_reduce",
    "all_to_all",
    "all_to_all_v",
    "collective_permute",
    "collective_permute_implicit",
    "collective_permute_implicit_current_processing_rank_id",
    "collective_permute_implicit_reduce",
    "rank_id",
    "reduce_scatter",
)


class ReplicaGroup:
    """Lists of ranks that work together."""

    def __init__(self, replica_groups):
        self.replica_groups = replica_groups


def _refuse(name: str):
    def call(*_, **__):
        raise NKIError("not-implemented", f"nki.collectives.{name}: the emulator runs one device")

    call.__name__ = call.__qualname__ = name
    return call


globals().update({name: _refuse(name) for name in _NAMES})
