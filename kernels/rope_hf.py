"""Rotary embedding behind the contract of nki-library's ``rope_hf``: heads before the sequence.

Where nkilib is importable its kernel runs; elsewhere ``kernels.rope``, which reads this layout by another
access pattern. They differ in one point: nkilib converts the table to the dtype of query first.
"""

import nki
import nki.language as nl

from trn_kernels.kernels.rope import rope

try:
    from nkilib.core.embeddings.rope_hf import rope_hf as nkilib_rope_hf
except ImportError:
    nkilib_rope_hf = None

# rope_hf works on whole tiles of this many positions per core.
TILE_ROWS = 128


@nki.jit
def rope_hf(query, key, rope_cache, backward=False):
    """Rotate queries and keys by rows 0 to S - 1 of a table.

    Dimensions:
        B: batch. S: sequence length, a multiple of 128 * LNC. Nq, Nk: heads. H: head_dim, even. M >= S.

    Args:
        query: [B, Nq, S, H] @ HBM.
        key: [B, Nk, S, H] @ HBM.
        rope_cache: [M, 2H] or [B, M, 2H] @ HBM, cosines then sines.
        backward: rotate gradients back.

    Returns:
        The rotated query and key, same shapes and dtypes @ HBM.
    """
    num_cores = nl.num_programs(0) if nl.program_ndim() != 0 else 1
    assert query.shape[2] % (TILE_ROWS * num_cores) == 0, (
        f"sequence length {query.shape[2]} is no multiple of {TILE_ROWS * num_cores}"
    )
    if nkilib_rope_hf is None:
        return rope(query, key, rope_cache, None, True, backward)
    query_out = nl.ndarray(query.shape, dtype=query.dtype, buffer=nl.shared_hbm)
    key_out = nl.ndarray(key.shape, dtype=key.dtype, buffer=nl.shared_hbm)
    return nkilib_rope_hf(query, key, query_out, key_out, rope_cache=rope_cache, backward=backward)
