"""Instructions of NKI that are refused by name: those of trn3, and those nobody needed here yet."""

from __future__ import annotations

from ..errors import NKIError
from ..machine import core

TRN3 = ("activate2", "exponential", "nc_matmul_mx", "quantize_mx", "rand2")
NOT_IMPLEMENTED = (
    "dropout",
    "rand_get_state",
    "rand_set_state",
    "rng",
    "sequence_bounds",
    "set_rng_seed",
    "tensor_scalar_cumulative",
    "topk",
)


def _refuse(name: str):
    def issue(*_, **__):
        if name in TRN3:
            error = NKIError("target", f"{name} needs trn3, this is {core().target.name}")
        else:
            error = NKIError("not-implemented", f"the emulator has no {name}")
        error.instruction = name
        raise error

    issue.__name__ = issue.__qualname__ = name
    issue.__doc__ = f"Refused: see ``{__name__}``."
    return issue


__all__ = [*TRN3, *NOT_IMPLEMENTED]
globals().update({name: _refuse(name) for name in (*TRN3, *NOT_IMPLEMENTED)})
