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
# Bytes per partition for the tiles of one chunk of heads. Twice that, so that the next chunk loads while this one
# computes, and two tables (8 KiB each at most) fit the 207 KiB a kernel may use on trn2.
CHUNK_BYTES = 88 * 1024
# Columns of one half that a chunk covers; more than any model's head_dim / 2.
CHUNK_COLUMNS = 512
# Bytes per partition of PSUM for the sines of a tile and the products of some heads: half of it, as above.
PSUM_BYTES = 8 * 1024
SIZE_OF = {"float32": 4, "bfloat16": 2, "float16": 2}


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

        An operand in PSUM halves the cycles of the Vector engine, so the sines and one of the two products live
        there; GpSimd, which does not reach PSUM, computes the other product at the same time.

        SBUF per partition: a chunk of heads at most CHUNK_BYTES, its table at most 8 KiB, each twice. PSUM:
        PSUM_BYTES for sines and products together, twice.

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
                _rotate_heads(query, query_out, table, batch, row, num_rows, column, num_columns, heads_first)
                _rotate_heads(key, key_out, table, batch, row, num_rows, column, num_columns, heads_first)
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


def _load_index(positions, batch, row, num_rows):
    """Positions of one tile, one per partition: (P, 1) int32 @ SBUF."""
    index = nl.ndarray((num_rows, 1), dtype=nl.int32, buffer=nl.sbuf)
    start = batch * positions.shape[1] + row
    nisa.dma_copy(dst=index, src=positions.ap([[1, num_rows], [1, 1]], offset=start))
    return index


def _load_table(rope_cache, first_row, index, row, num_rows, column, num_columns, backward):
    """The table of one tile, (P, cos or sin, half, C) @ SBUF, and its signed sines, (P, half, C) fp32 @ PSUM.

    The second is what the *other* half of x is multiplied with: (-sin1, sin2) forward, (sin2, -sin1) backward.
    Rows count from ``first_row``, the table of this batch.
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

    cross = nl.ndarray((num_rows, 2, num_columns), dtype=nl.float32, buffer=nl.psum)
    minus, plus = (1, 0) if backward else (0, 1)  # halves that -sin1 and sin2 go to
    nisa.tensor_scalar(
        dst=cross[:, minus, :],
        data=table[:, 1, 0, :],
        op0=nl.multiply,
        operand0=-1.0,
        engine=nisa.vector_engine,
    )
    nisa.tensor_copy(dst=cross[:, plus, :], src=table[:, 1, 1, :], engine=nisa.scalar_engine)
    return table, cross


def _rotate_heads(source, result, table, batch, row, num_rows, column, num_columns, heads_first):
    """Rotate all heads of one tile of positions, in chunks of heads that fit SBUF."""
    num_heads = _dimensions(source, heads_first)[2]
    # Input and output tile in the tensor's dtype, one fp32 product.
    head_bytes = 2 * num_columns * (2 * SIZE_OF[source.dtype] + 4)
    per_chunk = max(1, CHUNK_BYTES // head_bytes)
    for head in range(0, num_heads, per_chunk):
        count = min(per_chunk, num_heads - head)
        pattern, offset = _access(source, batch, row, num_rows, head, count, column, num_columns, heads_first)
        x = nl.ndarray((num_rows, count, 2, num_columns), dtype=source.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=x, src=source.ap(pattern, offset=offset))
        y = nl.ndarray((num_rows, count, 2, num_columns), dtype=source.dtype, buffer=nl.sbuf)
        per_product = PSUM_BYTES // (2 * num_columns * 4) - 1  # what the sines leave, in heads
        for first in range(0, count, per_product):
            heads = slice(first, min(count, first + per_product))
            _rotate(y[:, heads, :, :], x[:, heads, :, :], table)
        nisa.dma_copy(dst=result.ap(pattern, offset=offset), src=y)


def _access(tensor, batch, row, num_rows, head, count, column, num_columns, heads_first):
    """Access pattern (P, N, 2, C) of one tile in HBM, and its first element."""
    _, num_positions, num_heads, head_dim = _dimensions(tensor, heads_first)
    if heads_first:
        row_step, head_step = head_dim, num_positions * head_dim
    else:
        row_step, head_step = num_heads * head_dim, head_dim
    offset = batch * num_positions * num_heads * head_dim + row * row_step + head * head_step + column
    return [[row_step, num_rows], [head_step, count], [head_dim // 2, 2], [1, num_columns]], offset


def _rotate(y, x, table):
    """y = x * cos + other half of x * signed sin, for some heads (P, N, 2, C). Products in fp32."""
    table, cross = table
    num_rows, count, _, num_columns = x.shape
    # The table is one row per position: a step of 0 repeats it for every head.
    cos_step, cross_step = 4 * num_columns, 2 * num_columns
    straight = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.sbuf)
    cos = table.ap([[cos_step, num_rows], [0, count], [num_columns, 2], [1, num_columns]], offset=0)
    nisa.tensor_tensor(dst=straight, data1=x, data2=cos, op=nl.multiply, engine=nisa.gpsimd_engine)
    crossed = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.psum)
    for half in range(2):
        sin = cross.ap([[cross_step, num_rows], [0, count], [1, num_columns]], offset=half * num_columns)
        nisa.tensor_tensor(dst=crossed[:, :, half, :], data1=x[:, :, 1 - half, :], data2=sin, op=nl.multiply)
    nisa.tensor_tensor(dst=y, data1=straight, data2=crossed, op=nl.add)
