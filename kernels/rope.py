"""Rotary position embedding of queries and keys, forward and backward, in the model's own layout.

    y1 = x1 * cos1 - x2 * sin1        dx1 = dy1 * cos1 + dy2 * sin2
    y2 = x2 * cos2 + x1 * sin2        dx2 = dy2 * cos2 - dy1 * sin1

1 and 2 are the halves of head_dim (the rotate-half convention of Hugging Face and torchtitan). The backward
is the adjoint also where the halves of a table differ.

Shape letters: B batch, S sequence, N heads (Nq of the queries, Nk of the keys), H head_dim, M rows of the
table, P partitions. On chip a tensor is (P, N, 2, C): one position per partition, C columns of each half.
"""

import nki
import nki.isa as nisa
import nki.language as nl

# Positions per tile: one per SBUF partition.
TILE_ROWS = 128
# Columns of one half that a chunk covers, so that a head fits one bank of PSUM; no model's head_dim is larger.
CHUNK_COLUMNS = 256
# fp32 columns of a bank: what the Tensor engine adds at a time. So many banks of heads are loaded and stored together.
BANK_COLUMNS = 512
CHUNK_BANKS = 8
# The Vector engine rotates one of so many banks alone; the others it shares with GpSimd, which multiplies, and with the
# Tensor engine, which adds. So all three are busy equally long, and less than the DMA of trn2.
SHARED_BANKS = 6


@nki.jit
def rope(query, key, rope_cache, positions=None, heads_first=False, backward=False):
    """Rotate queries and keys by the rows of a table of cosines and sines.

    Dimensions:
        B: batch. S: sequence length, any. Nq, Nk: heads, any. H: head_dim, even. M: rows of the table.

    Args:
        query: [B, S, Nq, H] @ HBM, or [B, Nq, S, H] with ``heads_first``; float32, bfloat16 or float16.
        key: [B, S, Nk, H] @ HBM, or [B, Nk, S, H] with ``heads_first``; dtype of query.
        rope_cache: [M, 2H] or [B, M, 2H] @ HBM, cosines then sines; float32 or the dtype of query.
        positions: [B, S] or [1, S] int32 @ HBM, rows of the table; None means row s for position s.
        heads_first: layout of query, key and the results.
        backward: rotate gradients back: query and key are then the gradients of the results.

    Returns:
        The rotated query and key, same shapes and dtypes @ HBM.

    Notes:
        Arithmetic in fp32, one rounding at the end. Every element of query, key and a used row of the table
        is read once by the core that needs it; every output element is written once. The cores of an LNC=2
        launch take halves of the sequence and never write the same memory. A position outside the table is
        a run-time error of the DMA, which never reads outside it.

        The work is divided so that the DMA limits: for most heads GpSimd multiplies by the cosines, Vector by the
        sines, the Tensor engine adds (the identity times one product, then the other, into one place of PSUM,
        exact in fp32) and Scalar rounds the sum into SBUF; for the rest Vector does everything. An operand in PSUM
        halves the cycles of the Vector engine, so its tables and one product live there. The Tensor engine
        multiplies all positions of a tile by 0 or 1: a value that is not finite may make NaN of the same element
        of its 128 positions.

        Per partition, for one chunk of heads: 32 KiB of SBUF for fp32 inputs and outputs, 32 KiB for products and
        4 KiB for the table; of PSUM 4 KiB for the table, a bank for a product of the Vector engine and one for a sum
        of the Tensor engine. Half of both memories at most, so that the next chunk can begin.

    Pseudocode:
        for rows of the sequence in tiles of 128 (this core's half):
            for batch:
                load cosines and sines of the rows          (once for all of the batch if they are shared)
                for tensor in query, key:
                    for chunk of heads: load, rotate, store
    """
    num_batch, num_positions, _, head_dim = _dimensions(query, heads_first)
    assert head_dim % 2 == 0, f"head_dim {head_dim} is odd"
    assert _dimensions(key, heads_first)[:2] == (num_batch, num_positions), f"query {query.shape}, key {key.shape}"
    assert key.shape[3] == head_dim, f"head_dim of query {head_dim}, of key {key.shape[3]}"
    assert query.dtype == key.dtype, f"query is {query.dtype}, key is {key.dtype}"
    assert rope_cache.shape[-1] == 2 * head_dim, f"table {rope_cache.shape} for head_dim {head_dim}"
    table_per_batch = len(rope_cache.shape) == 3
    if table_per_batch:
        assert rope_cache.shape[0] == num_batch, f"table {rope_cache.shape} for batch {num_batch}"
    table_rows = rope_cache.shape[-2]
    if positions is None:
        assert table_rows >= num_positions, f"table {rope_cache.shape} for {num_positions} positions"
    else:
        assert positions.shape[0] in (1, num_batch) and positions.shape[1] == num_positions, (
            f"positions {positions.shape} for batch {num_batch}, sequence {num_positions}"
        )
    query_out = nl.ndarray(query.shape, dtype=query.dtype, buffer=nl.shared_hbm)
    key_out = nl.ndarray(key.shape, dtype=key.dtype, buffer=nl.shared_hbm)

    positions_per_batch = positions is not None and positions.shape[0] > 1
    reload_table = table_per_batch or positions_per_batch
    tables = rope_cache.reshape((num_batch * table_rows, 2 * head_dim)) if table_per_batch else rope_cache
    half = head_dim // 2
    first, last = _my_rows(num_positions)
    bank = 0  # counts banks of heads, of which the engines take turns
    identity = _identity(min(TILE_ROWS, last - first)) if last > first else None
    for row in range(first, last, TILE_ROWS):
        num_rows = min(TILE_ROWS, last - row)
        for column in range(0, half, CHUNK_COLUMNS):
            num_columns = min(CHUNK_COLUMNS, half - column)
            for batch in range(num_batch):
                if batch == 0 or reload_table:
                    index = None
                    if positions is not None:
                        index = _load_index(positions, batch if positions_per_batch else 0, row, num_rows)
                    first_row = batch * table_rows if table_per_batch else 0
                    table = _load_table(tables, first_row, index, row, num_rows, column, num_columns, backward)
                for source, result in ((query, query_out), (key, key_out)):
                    tile = (batch, row, num_rows, column, num_columns)
                    bank = _rotate_heads(source, result, table, identity, tile, heads_first, bank)
    return query_out, key_out


def _dimensions(tensor, heads_first):
    """(B, S, N, H) of a tensor in either layout."""
    if heads_first:
        return tensor.shape[0], tensor.shape[2], tensor.shape[1], tensor.shape[3]
    return tuple(tensor.shape)


def _my_rows(num_positions):
    """First and last position of this core: contiguous parts of the sequence."""
    if nl.program_ndim() == 0:
        return 0, num_positions
    per_core = (num_positions + nl.num_programs(0) - 1) // nl.num_programs(0)
    first = min(num_positions, nl.program_id(0) * per_core)
    return first, min(num_positions, first + per_core)


def _identity(size):
    """The identity matrix, (size, size) fp32 @ SBUF."""
    distance = nl.ndarray((size, size), dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=distance, pattern=[[-1, size]], channel_multiplier=1)
    identity = nl.ndarray((size, size), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=identity, data=distance, op0=nl.equal, operand0=0)
    return identity


def _load_index(positions, batch, row, num_rows):
    """Positions of one tile, one per partition: (P, 1) int32 @ SBUF."""
    index = nl.ndarray((num_rows, 1), dtype=nl.int32, buffer=nl.sbuf)
    start = batch * positions.shape[1] + row
    nisa.dma_copy(dst=index, src=positions.ap([[1, num_rows], [1, 1]], offset=start))
    return index


def _load_table(rope_cache, first_row, index, row, num_rows, column, num_columns, backward):
    """The table of one tile, (P, cos or sin, half, C) @ SBUF, and for the Vector engine (P, .., half, C) fp32 @ PSUM.

    In the second the sines are signed and lie where the *other* half of x meets them: (-sin1, sin2) forward,
    (sin2, -sin1) backward. Rows count from ``first_row``, the table of this batch.
    """
    head_dim = rope_cache.shape[1] // 2
    half = head_dim // 2
    table = nl.ndarray((num_rows, 2, 2, num_columns), dtype=rope_cache.dtype, buffer=nl.sbuf)
    pattern = [[2 * head_dim, num_rows], [head_dim, 2], [half, 2], [1, num_columns]]
    if index is None:
        source = rope_cache.ap(pattern, offset=(first_row + row) * 2 * head_dim + column)
    else:
        start = first_row * 2 * head_dim + column
        source = rope_cache.ap(pattern, offset=start, vector_offset=index, indirect_dim=0)
    nisa.dma_copy(dst=table, src=source)

    wide = nl.ndarray((num_rows, 2, 2, num_columns), dtype=nl.float32, buffer=nl.psum)
    nisa.tensor_copy(dst=wide[:, 0, :, :], src=table[:, 0, :, :], engine=nisa.vector_engine)
    minus, plus = (1, 0) if backward else (0, 1)  # halves that -sin1 and sin2 go to
    nisa.tensor_scalar(
        dst=wide[:, 1, minus, :], data=table[:, 1, 0, :], op0=nl.multiply, operand0=-1.0, engine=nisa.vector_engine
    )
    nisa.tensor_copy(dst=wide[:, 1, plus, :], src=table[:, 1, 1, :], engine=nisa.vector_engine)
    return table, wide


def _rotate_heads(source, result, table, identity, tile, heads_first, bank):
    """Rotate all heads of one tile of positions, in chunks. Returns ``bank``, counted on."""
    batch, row, num_rows, column, num_columns = tile
    num_heads = _dimensions(source, heads_first)[2]
    per_bank = BANK_COLUMNS // (2 * num_columns)
    per_chunk = CHUNK_BANKS * per_bank
    for head in range(0, num_heads, per_chunk):
        count = min(per_chunk, num_heads - head)
        pattern, offset = _access(source, batch, row, num_rows, head, count, column, num_columns, heads_first)
        x = nl.ndarray((num_rows, count, 2, num_columns), dtype=source.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=x, src=source.ap(pattern, offset=offset))
        y = nl.ndarray((num_rows, count, 2, num_columns), dtype=source.dtype, buffer=nl.sbuf)
        for first in range(0, count, per_bank):
            heads = slice(first, min(count, first + per_bank))
            on_vector = bank % SHARED_BANKS == SHARED_BANKS - 1
            _rotate(y[:, heads, :, :], x[:, heads, :, :], table, None if on_vector else identity)
            bank = bank + 1
        nisa.dma_copy(dst=result.ap(pattern, offset=offset), src=y)
    return bank


def _access(tensor, batch, row, num_rows, head, count, column, num_columns, heads_first):
    """Access pattern (P, N, 2, C) of one tile in HBM, and its first element."""
    _, num_positions, num_heads, head_dim = _dimensions(tensor, heads_first)
    if heads_first:
        row_step, head_step = head_dim, num_positions * head_dim
    else:
        row_step, head_step = num_heads * head_dim, head_dim
    offset = batch * num_positions * num_heads * head_dim + row * row_step + head * head_step + column
    return [[row_step, num_rows], [head_step, count], [head_dim // 2, 2], [1, num_columns]], offset


def _rotate(y, x, table, identity):
    """y = x * cos + other half of x * signed sin, for a bank of heads (P, N, 2, C). Products and sum in fp32.

    Without ``identity`` on the Vector engine alone, else on GpSimd, Vector, Tensor and Scalar engine.
    """
    table, wide = table
    num_rows, num_heads, _, num_columns = x.shape
    on_vector = identity is None
    # The table is one row per position: a step of 0 repeats it for every head.
    rows = [4 * num_columns, num_rows]
    straight = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.sbuf)
    cos = (wide if on_vector else table).ap([rows, [0, num_heads], [num_columns, 2], [1, num_columns]], offset=0)
    engine = nisa.vector_engine if on_vector else nisa.gpsimd_engine
    nisa.tensor_tensor(dst=straight, data1=x, data2=cos, op=nl.multiply, engine=engine)
    crossed = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.psum if on_vector else nl.sbuf)
    for half in range(2):
        sin = wide.ap([rows, [0, num_heads], [1, num_columns]], offset=(2 + half) * num_columns)
        nisa.tensor_tensor(dst=crossed[:, :, half, :], data1=x[:, :, 1 - half, :], data2=sin, op=nl.multiply)
    if on_vector:
        nisa.tensor_tensor(dst=y, data1=straight, data2=crossed, op=nl.add)
        return
    total = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.psum)
    ones = identity[0:num_rows, 0:num_rows]
    for product in (straight, crossed):
        nisa.nc_matmul(dst=total, stationary=ones, moving=product, is_stationary_onezero=True)
    nisa.tensor_copy(dst=y, src=total, engine=nisa.scalar_engine)
