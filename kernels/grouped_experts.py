"""Grouped experts of a mixture of experts (SwiGLU), forward and backward, for tokens sorted by expert.

    y = (silu(x w1^T) * (x w3^T)) w2^T                    of each expert, on its own rows of x

Shape letters: R rows (tokens routed to these experts), D model dimension, F hidden dimension, E experts,
T rows of a tile, P partitions, LNC physical cores, S slots, N tiles of one core.

Routing is data: shapes and the program are the same for every routing. Two integer tables address everything
(``ops.grouped_experts.routing_tables`` makes them from the counts, on the device):

* ``rows`` [LNC, N, T]: the row of x at each place of each tile, -1 where there is none. A row that is not there
  is not read (its place is zero) and not written.
* ``slots`` [LNC, S + 3, 8]: a slot is one expert on one core; all cores run slot s, and as many tiles of it, at
  the same time, because device loops must not diverge between cores. Columns: EXPERT (whose weights to load),
  RESULT (whose gradients to write, -1 for none); its tiles are FIRST to END. Where two or more tiles are taken
  together, two that are always there come first (HEAD and the next: copies of the first two, or of nothing), then
  the others, FROM to QUADS four or two at a time, QUADS to TWOS two at a time, TWOS to END alone. After the S
  slots come two empty ones, loaded ahead, and one for the rows that belong to no expert.

Every expert, hence every row and every weight gradient, belongs to one core: the cores share nothing that is
written, no barrier is needed, and the order in which they run changes no bit.
"""

import nki
import nki.isa as nisa
import nki.language as nl

P = 128  # partitions; also the rows T of a tile and the edge of a block of the contraction
BANK = 512  # fp32 elements of one PSUM bank, the widest moving operand
PIECE = 2048  # columns of a row that are loaded or stored at a time
SIZE_OF = {"float32": 4, "bfloat16": 2, "float16": 2}
# Bytes per partition that a kernel may use on trn2: 224 KiB less what the system keeps (the smaller of
# two figures of nki-library).
SBUF_BYTES = 224 * 1024 - 16384 - 8 - 520
# Bytes per partition of the fp32 accumulators of weight gradients.
ACCUMULATOR_BYTES = 48 * 1024
ACCUMULATOR_COLUMNS = 2048

EXPERT, RESULT, FIRST, END, HEAD, FROM, QUADS, TWOS = range(8)
SLOT_COLUMNS = 8
# Slots after the S that run: two loaded ahead, one for the rows of no expert.
EXTRA_SLOTS = 3


@nki.jit
def grouped_experts(x, w1, w2, w3, rows, slots, save=False):
    """Forward of the experts.

    Dimensions:
        R, D, F, E: any, at least 1. The largest element offset, max(R * max(D, F), E * F * D), fits 31 bits, and D
            fits SBUF: up to 8,576 in float32, 15,872 in the others.

    Args:
        x: [R, D] @ HBM, sorted by expert; float32, bfloat16 or float16.
        w1, w3: [E, F, D] @ HBM, dtype of x.
        w2: [E, D, F] @ HBM, dtype of x.
        rows, slots: int32 @ HBM, see the module.
        save: also return what the backward needs.

    Returns:
        y [R, D] @ HBM; with ``save`` also h1 = x w1^T and h3 = x w3^T, [R, F] @ HBM, in the dtype of x.

    Notes:
        Matmuls accumulate in fp32 in PSUM. silu and the product are fp32; a = silu(h1) * h3 is rounded once, as
        the operand of the second matmul. Rows of no expert are exact zeros.

        SBUF per partition, in bytes of the dtype: the weights of an expert 3 * D * F / 128, twice where it fits, so
        that the next expert loads while this one computes; two tiles of about 4 D + 5 F elements. At D 2048, F 768
        in bfloat16: 144 + 45 KiB of 207. Weights that do not fit are loaded for every tile, in chunks of F.
        PSUM: 2 banks for transposes, 2 for h1 and h3, 2 for y, each pair rotating.

    Pseudocode:
        load the weights of slot 0
        for slots s:                                            (device loop, two slots each)
            load the weights of slot s + 1                      (transposed by the DMA or the tensor engine)
            for tiles of slot s:                                (two gathered before those weights, then device loops)
                xT = transpose(gather(x, rows))
                h1, h3 = xT^T w1T, xT^T w3T                     (PSUM, accumulated over D)
                a = silu(h1) * h3;  aT = transpose(a)
                scatter(y, rows) = aT^T w2T                     (PSUM, accumulated over F)
        zeros for the rows of no expert
    """
    num_rows, dim = x.shape
    num_experts, hidden, _ = w1.shape
    _check(x, w1, w2, w3, rows, slots)
    y = nl.ndarray((num_rows, dim), dtype=x.dtype, buffer=nl.shared_hbm)
    results = [y]
    if save:
        results.append(nl.ndarray((num_rows, hidden), dtype=x.dtype, buffer=nl.shared_hbm))
        results.append(nl.ndarray((num_rows, hidden), dtype=x.dtype, buffer=nl.shared_hbm))

    buffers, chunk, group = _plan_forward(dim, hidden, SIZE_OF[x.dtype], save)

    def load(weights, slot, ahead, first, columns):
        info = _slot(slots, slot, ahead)
        expert = _expert_of_partitions(slots, slot, ahead)
        _load_transposed(weights[0], w1, info, expert, first, columns, 0, dim)
        _load_transposed(weights[1], w3, info, expert, first, columns, 0, dim)
        _load_transposed(weights[2], w2, info, expert, 0, dim, first, columns)

    def allocate(columns):
        # w1T, w3T: (P, blocks of D, F); w2T: (P, blocks of F, D)
        return [
            nl.ndarray((P, _blocks(dim), columns), dtype=x.dtype, buffer=nl.sbuf),
            nl.ndarray((P, _blocks(dim), columns), dtype=x.dtype, buffer=nl.sbuf),
            nl.ndarray((P, _blocks(columns), dim), dtype=x.dtype, buffer=nl.sbuf),
        ]

    def gather(at, plus):
        index = _load_index(rows, at, plus)
        return index, _gather_transposed(x, index)

    def tile(weights, slot, ahead, gathered):
        index, xT = gathered
        total = None if buffers else nl.ndarray((P, dim), dtype=nl.float32, buffer=nl.sbuf)
        for first in range(0, hidden, chunk):
            columns = min(chunk, hidden - first)
            if buffers == 0:
                weights = allocate(columns)
                load(weights, slot, ahead, first, columns)
            saved = [nl.ndarray((P, columns), dtype=x.dtype, buffer=nl.sbuf) for _ in results[1:]]
            a = nl.ndarray((P, columns), dtype=x.dtype, buffer=nl.sbuf)
            for start in range(0, columns, BANK):
                width = min(BANK, columns - start)
                h1 = _multiply(xT, weights[0], dim, start, width)
                h3 = _multiply(xT, weights[1], dim, start, width)
                silu = nl.ndarray((P, width), dtype=nl.float32, buffer=nl.sbuf)
                nisa.activation(dst=silu, op=nl.silu, data=h1)
                nisa.tensor_tensor(dst=a[:, start : start + width], data1=silu, data2=h3, op=nl.multiply)
                if save:
                    nisa.tensor_copy(dst=saved[0][:, start : start + width], src=h1, engine=nisa.scalar_engine)
                    nisa.tensor_copy(dst=saved[1][:, start : start + width], src=h3, engine=nisa.vector_engine)
            for result, h in zip(results[1:], saved, strict=True):
                _scatter(result, index, h, first, columns)
            aT = _transposed(a, columns)

            def part(start, width, aT=aT, weights=weights, columns=columns):
                return _multiply(aT, weights[2], columns, start, width)

            _store_rows(y, index, total, first == 0, first + columns == hidden, part)

    _for_slots(slots, buffers, chunk, group, allocate, load, gather, tile)
    _zero_rows_of_no_expert(results, rows, slots)
    return tuple(results)


@nki.jit
def grouped_experts_backward(
    grad_y, x, w1, w2, w3, h1, h3, rows, slots, need_x=True, need_w1=True, need_w2=True, need_w3=True
):
    """Gradients of the experts.

    Dimensions:
        As in ``grouped_experts``.

    Args:
        grad_y: [R, D] @ HBM, dtype of x.
        x, w1, w2, w3, rows, slots: as in ``grouped_experts``.
        h1, h3: [R, F] @ HBM, what the forward saved.
        need_x, need_w1, need_w2, need_w3: which gradients to compute; at least one.

    Returns:
        A tuple @ HBM in the dtype of x of those that are needed: grad_x [R, D], grad_w1 [E, F, D],
        grad_w2 [E, D, F], grad_w3 [E, F, D]. Experts without rows get exact zeros, and so do rows of no expert.

    Notes:
        No matmul of the forward is computed again: silu and its derivative come from h1. Weight gradients
        accumulate in fp32 on chip over all rows of the expert and are written once.

        SBUF per partition: first pass, the weights as in the forward and two tiles of about 3 D + 11 F elements;
        second pass, ACCUMULATOR_BYTES and four tiles of both operands, twice.

    Pseudocode:
        for slots s, tiles of slot s:                           (device loops, as in the forward)
            da = gather(grad_y)T^T w2                           (PSUM, accumulated over D)
            dh1 = da * h3 * silu'(h1);  dh3 = da * silu(h1);  a = silu(h1) * h3
            scatter(dh1, dh3, a)                                (HBM scratch, for the second pass)
            scatter(grad_x) = dh1T^T w1 + dh3T^T w3             (PSUM, accumulated over F)
        for (left, right, gradient) in (dh1, x, w1), (dh3, x, w3), (grad_y, a, w2):
            for slots s, chunks of the gradient:                (device loop, two slots each)
                accumulator = gather(left)^T gather(right)      of the first two tiles
                for the other tiles of slot s:                  (device loops, four, two and one tile each)
                    accumulator += gather(left)^T gather(right) (PSUM over those tiles, then SBUF)
                gradient[expert] = accumulator
    """
    num_rows, dim = x.shape
    num_experts, hidden, _ = w1.shape
    _check(x, w1, w2, w3, rows, slots)
    assert grad_y.shape == x.shape and grad_y.dtype == x.dtype, f"grad_y {grad_y.shape} {grad_y.dtype}, x {x.shape}"
    assert h1.shape == (num_rows, hidden) and h3.shape == (num_rows, hidden), f"h1 {h1.shape}, h3 {h3.shape}"
    assert need_x or need_w1 or need_w2 or need_w3, "no gradient is needed"
    grad_x = nl.ndarray((num_rows, dim), dtype=x.dtype, buffer=nl.shared_hbm) if need_x else None
    # What a weight gradient needs of every row, from the first pass to the second: dh1, a, dh3.
    scratch = []
    for needed in (need_w1, need_w2, need_w3):
        buffer = nl.ndarray((num_rows, hidden), dtype=x.dtype, buffer=nl.shared_hbm) if needed else None
        scratch.append(buffer)

    buffers, chunk, group = _plan_backward(dim, hidden, SIZE_OF[x.dtype], need_x)

    def load(weights, slot, ahead, first, columns):
        info = _slot(slots, slot, ahead)
        _load_blocks(weights[0], w2, info, 0, dim, first, columns)
        if need_x:
            _load_blocks(weights[1], w1, info, first, columns, 0, dim)
            _load_blocks(weights[2], w3, info, first, columns, 0, dim)

    def allocate(columns):
        # w2: (P, blocks of D, F); w1, w3: (P, blocks of F, D)
        weights = [nl.ndarray((P, _blocks(dim), columns), dtype=x.dtype, buffer=nl.sbuf)]
        for _ in range(2 if need_x else 0):
            weights.append(nl.ndarray((P, _blocks(columns), dim), dtype=x.dtype, buffer=nl.sbuf))
        return weights

    def gather(at, plus):
        index = _load_index(rows, at, plus)
        saved = [_gather(h, index, 0, hidden) for h in (h1, h3)] if chunk == hidden else None
        return index, _gather_transposed(grad_y, index), saved

    def tile(weights, slot, ahead, gathered):
        index, dyT, saved = gathered
        total = None
        if need_x and buffers == 0:
            total = nl.ndarray((P, dim), dtype=nl.float32, buffer=nl.sbuf)
        for first in range(0, hidden, chunk):
            columns = min(chunk, hidden - first)
            if buffers == 0:
                weights = allocate(columns)
                load(weights, slot, ahead, first, columns)
            h1_tile, h3_tile = saved or [_gather(h, index, first, columns) for h in (h1, h3)]
            dh1 = nl.ndarray((P, columns), dtype=x.dtype, buffer=nl.sbuf)
            dh3 = nl.ndarray((P, columns), dtype=x.dtype, buffer=nl.sbuf)
            a = nl.ndarray((P, columns), dtype=x.dtype, buffer=nl.sbuf)
            for start in range(0, columns, BANK):
                width = min(BANK, columns - start)
                da = _multiply(dyT, weights[0], dim, start, width)
                part = slice(start, start + width)
                _swiglu_backward(dh1[:, part], dh3[:, part], a[:, part], da, h1_tile[:, part], h3_tile[:, part])
            for buffer, values in zip(scratch, (dh1, a, dh3), strict=True):
                if buffer is not None:
                    _scatter(buffer, index, values, first, columns)
            if need_x:
                dh1T, dh3T = _transposed(dh1, columns), _transposed(dh3, columns)

                def part(start, width, dh1T=dh1T, dh3T=dh3T, weights=weights, columns=columns):
                    return _multiply(dh1T, weights[1], columns, start, width, dh3T, weights[2])

                _store_rows(grad_x, index, total, first == 0, first + columns == hidden, part)

    _for_slots(slots, buffers, chunk, group, allocate, load, gather, tile)
    results = []
    if need_x:
        _zero_rows_of_no_expert([grad_x], rows, slots)
        results.append(grad_x)
    dh1, a, dh3 = scratch
    if need_w1:
        results.append(_outer_products(dh1, x, (num_experts, hidden, dim), rows, slots))
    if need_w2:
        results.append(_outer_products(grad_y, a, (num_experts, dim, hidden), rows, slots))
    if need_w3:
        results.append(_outer_products(dh3, x, (num_experts, hidden, dim), rows, slots))
    return tuple(results)


def _check(x, w1, w2, w3, rows, slots):
    dim, hidden = w1.shape[2], w1.shape[1]
    assert x.dtype in SIZE_OF, f"x is {x.dtype}, not one of {list(SIZE_OF)}"
    assert x.shape[1] == dim and w3.shape == w1.shape, f"x {x.shape}, w1 {w1.shape}, w3 {w3.shape}"
    assert w2.shape == (w1.shape[0], dim, hidden), f"w2 {w2.shape}, w1 {w1.shape}"
    assert w1.dtype == x.dtype and w2.dtype == x.dtype and w3.dtype == x.dtype, (
        f"x {x.dtype}, w1 {w1.dtype}, w2 {w2.dtype}, w3 {w3.dtype}"
    )
    assert rows.shape[0] == slots.shape[0] == _num_cores() and rows.shape[2] == P, (
        f"rows {rows.shape} and slots {slots.shape} for {_num_cores()} cores"
    )
    assert slots.shape[2] == SLOT_COLUMNS and slots.shape[1] > EXTRA_SLOTS, f"slots {slots.shape}"
    largest = max(x.shape[0] * max(dim, hidden), w1.shape[0] * dim * hidden)
    assert largest < 2**31, f"an element offset of {largest} does not fit 31 bits"


# -- schedule -------------------------------------------------------------------------------------------


def _plan_forward(dim, hidden, size, save):
    """See ``_plan``; ``size`` is the bytes of an element."""

    def weights(columns):  # w1T, w3T, w2T
        return size * (2 * _blocks(dim) * columns + _blocks(columns) * dim)

    def tile(columns):  # xT; pieces of x and y; a, aT, h1, h3; silu
        saved = 2 * columns if save else 0
        pieces = 2 * min(PIECE, dim)
        return size * (_up(dim) + pieces + columns + _up(columns) + saved) + 2 * BANK * 4

    def staging(columns):  # rows of a weight before their transposition
        return 2 * size * min(PIECE, max(dim, columns))

    return _plan(dim, hidden, weights, tile, staging)


def _plan_backward(dim, hidden, size, need_x):
    """See ``_plan``; ``size`` is the bytes of an element."""

    def weights(columns):  # w2; w1, w3
        return size * (_blocks(dim) * columns + (2 * _blocks(columns) * dim if need_x else 0))

    def tile(columns):  # grad_y transposed; pieces of grad_y and grad_x; h1, h3, dh1, dh3, a, dh1T, dh3T; silu, slope
        pieces = 2 * min(PIECE, dim)
        return size * (_up(dim) + pieces + 5 * columns + 2 * _up(columns)) + 4 * BANK * 4

    def staging(columns):
        return 0

    return _plan(dim, hidden, weights, tile, staging)


def _plan(dim, hidden, weights, tile, staging):
    """Fit weights and tiles into SBUF: two experts and two tiles if possible, else less.

    Args:
        weights, tile, staging: bytes per partition of one expert's weights, of one tile and of a load in progress,
            for a number of columns of F.

    Returns:
        How many experts' weights are there at a time (2, 1, or 0 where one does not fit), columns of F that are
        there at a time, and tiles that one iteration takes (2 or 1).
    """
    for buffers, group in ((2, 2), (2, 1), (1, 2), (1, 1)):
        if buffers * weights(hidden) + group * tile(hidden) + staging(hidden) <= SBUF_BYTES:
            return buffers, hidden, group
    # Chunks of F for every tile, as wide as two of them fit, and an fp32 sum over the chunks.
    columns = hidden
    while columns > P:
        columns = _up((columns + 1) // 2)
        if 2 * weights(columns) + tile(columns) + staging(columns) + dim * 4 <= SBUF_BYTES:
            return 0, columns, 1
    columns = min(P, hidden)
    needed = weights(columns) + tile(columns) + staging(columns) + dim * 4
    assert needed <= SBUF_BYTES, f"D {dim} needs {needed} bytes per partition of SBUF, there are {SBUF_BYTES}"
    return 0, columns, 1


def _for_slots(slots, buffers, chunk, group, allocate, load, gather, tile):
    """Run every tile of every slot; the weights of the next slot load while this one computes.

    Where two tiles fit, the first two of a slot are gathered before those weights, which would hold them up.
    """
    num_slots = slots.shape[1] - EXTRA_SLOTS

    def gather_heads(slot, ahead):
        if group == 1:
            return []
        first = _slot(slots, slot, ahead)[:, HEAD : HEAD + 1]
        return [gather(first, 0), gather(first, 1)]

    def run(weights, slot, ahead, heads):
        info = _slot(slots, slot, ahead)
        for gathered in heads:
            tile(weights, slot, ahead, gathered)

        def pair(at):
            tile(weights, slot, ahead, gather(at, 0))
            tile(weights, slot, ahead, gather(at, 1))

        def single(at):
            tile(weights, slot, ahead, gather(at, 0))

        first = _register(info, FROM if heads else FIRST)
        if heads:
            twos = _register(info, TWOS)
            nl.fori_loop(first, twos, pair, step=2)
            first = twos
        nl.fori_loop(first, _register(info, END), single)

    if buffers == 0:

        def stream(slot):
            run(None, slot, 0, gather_heads(slot, 0))

        nl.fori_loop(0, num_slots, stream)
        return
    current = allocate(chunk)
    if buffers == 1:

        def one(slot):
            heads = gather_heads(slot, 0)
            load(current, slot, 0, 0, chunk)
            run(current, slot, 0, heads)

        nl.fori_loop(0, num_slots, one)
        return
    following = allocate(chunk)
    load(current, None, 0, 0, chunk)

    def two(slot):
        heads = gather_heads(slot, 0)
        load(following, slot, 1, 0, chunk)
        run(current, slot, 0, heads)
        heads = gather_heads(slot, 1)
        load(current, slot, 2, 0, chunk)
        run(following, slot, 1, heads)

    nl.fori_loop(0, num_slots, two, step=2)


def _slot(slots, slot, ahead):
    """The numbers of slot ``slot + ahead`` of this core: (1, 8) int32 @ SBUF. ``slot`` None means 0."""
    _, count, columns = slots.shape
    info = nl.ndarray((1, columns), dtype=nl.int32, buffer=nl.sbuf)
    offset = (_core() * count + ahead) * columns
    pattern = [[columns, 1], [1, columns]]
    if slot is None:
        nisa.dma_copy(dst=info, src=slots.ap(pattern, offset=offset))
    else:
        nisa.dma_copy(dst=info, src=slots.ap(pattern, offset=offset, scalar_offset=slot, indirect_dim=1))
    return info


def _register(info, column):
    register = nisa.register_alloc()
    nisa.register_load(register, info[:, column : column + 1])
    return register


def _load_index(rows, at, plus):
    """Rows of tile ``at + plus`` of this core: (P, 1) int32 @ SBUF."""
    _, num_tiles, _ = rows.shape
    index = nl.ndarray((P, 1), dtype=nl.int32, buffer=nl.sbuf)
    offset = (_core() * num_tiles + plus) * P
    nisa.dma_copy(dst=index, src=rows.ap([[1, P], [1, 1]], offset=offset, scalar_offset=at, indirect_dim=1))
    return index


def _zero_rows_of_no_expert(results, rows, slots):
    """Zeros for the rows after the last expert's, which no slot covers."""
    info = _slot(slots, None, slots.shape[1] - 1)
    first, last = _register(info, FIRST), _register(info, END)
    widest = max([result.shape[1] for result in results])
    zeros = nl.ndarray((P, widest), dtype=results[0].dtype, buffer=nl.sbuf)
    nisa.memset(dst=zeros, value=0.0)

    def body(at):
        index = _load_index(rows, at, 0)
        for result in results:
            _scatter(result, index, zeros[:, : result.shape[1]])

    nl.fori_loop(first, last, body)


# -- tiles ----------------------------------------------------------------------------------------------


def _gather(source, index, first, columns):
    """Columns of the rows ``index`` of [R, N] @ HBM, zeros where the index is -1: (P, columns) @ SBUF."""
    tile = nl.ndarray((P, columns), dtype=source.dtype, buffer=nl.sbuf)
    nisa.memset(dst=tile, value=0.0, engine=nisa.gpsimd_engine)
    width = source.shape[1]
    rows = source.ap([[width, P], [1, columns]], offset=first, vector_offset=index, indirect_dim=0)
    nisa.dma_copy(dst=tile, src=rows, oob_mode=nisa.oob_mode.skip)
    return tile


def _scatter(result, index, tile, first=0, columns=None):
    """Write (P, columns) @ SBUF to the rows ``index`` of [R, N] @ HBM; -1 writes nothing."""
    width = result.shape[1]
    columns = width if columns is None else columns
    rows = result.ap([[width, P], [1, columns]], offset=first, vector_offset=index, indirect_dim=0)
    nisa.dma_copy(dst=rows, src=tile, oob_mode=nisa.oob_mode.skip)


def _gather_transposed(source, index):
    """The rows ``index`` of [R, N] @ HBM as (P, blocks of N, P rows) @ SBUF, zeros where the index is -1."""
    width = source.shape[1]
    result = nl.ndarray((P, _blocks(width), P), dtype=source.dtype, buffer=nl.sbuf)
    for first in range(0, width, PIECE):
        columns = min(PIECE, width - first)
        tile = _gather(source, index, first, columns)
        _transpose_blocks(result[:, first // P : first // P + _blocks(columns), :], tile, P, columns)
    return result


def _transposed(tile, columns):
    """(P rows, columns) @ SBUF as (P, blocks of columns, P rows) @ SBUF: columns on the partitions."""
    result = nl.ndarray((P, _blocks(columns), P), dtype=tile.dtype, buffer=nl.sbuf)
    _transpose_blocks(result, tile, P, columns)
    return result


def _transpose_blocks(dst, src, num_rows, columns):
    """dst (P, blocks, num_rows) = the transposes of the 128-column blocks of src (num_rows, columns), both @ SBUF.

    Four transposes share a PSUM bank and leave it in one copy, on the Vector and the Scalar engine in turn.
    """
    for group, first in enumerate(range(0, _blocks(columns), 4)):
        blocks = range(first, min(first + 4, _blocks(columns)))
        # An even number of columns: the Tensor engine writes to multiples of 4 bytes, 16-bit blocks as well.
        bank = nl.ndarray((P, 4, num_rows + num_rows % 2), dtype=src.dtype, buffer=nl.psum)
        full = 0
        for block in blocks:
            width = min(P, columns - block * P)
            nisa.nc_transpose(dst=bank[:width, block - first, :num_rows], data=src[:, block * P : block * P + width])
            full += width == P
        engine = nisa.vector_engine if group % 2 == 0 else nisa.scalar_engine
        if full:
            nisa.tensor_copy(dst=dst[:, first : first + full, :], src=bank[:, :full, :num_rows], engine=engine)
        if full < len(blocks):
            width = columns - (first + full) * P
            nisa.tensor_copy(dst=dst[:width, first + full, :], src=bank[:width, full, :num_rows], engine=engine)


def _multiply(leftT, right, depth, start, width, leftT2=None, right2=None):
    """left @ right[:, start : start + width] in fp32: (P rows, width) @ PSUM.

    leftT (P, blocks of depth, P rows) and right (P, blocks of depth, columns) have the contraction on the
    partitions, in blocks of 128. A second pair of the same depth is added.
    """
    out = nl.ndarray((P, width), dtype=nl.float32, buffer=nl.psum)
    for a, b in ((leftT, right), (leftT2, right2)):
        if a is not None:
            for block in range(_blocks(depth)):
                k = min(P, depth - block * P)
                nisa.nc_matmul(dst=out, stationary=a[:k, block, :], moving=b[:k, block, start : start + width])
    return out


def _store_rows(result, index, total, is_first, is_last, part):
    """Write ``part(start, width)`` (P, width) @ PSUM, bank by bank, to the rows ``index`` of [R, N] @ HBM.

    With ``total``, (P, N) fp32 @ SBUF, it is the sum over chunks of F, of which the first starts it and the last
    writes it.
    """
    for first in range(0, result.shape[1], PIECE):
        columns = min(PIECE, result.shape[1] - first)
        tile = nl.ndarray((P, columns), dtype=result.dtype, buffer=nl.sbuf)
        for start in range(0, columns, BANK):
            width = min(BANK, columns - start)
            values = part(first + start, width)
            rounded = tile[:, start : start + width]
            # The engines take turns, so that neither holds up the tensor engine.
            engine = nisa.vector_engine if (start // BANK) % 2 == 0 else nisa.scalar_engine
            if total is None:
                nisa.tensor_copy(dst=rounded, src=values, engine=engine)
                continue
            sums = total[:, first + start : first + start + width]
            if is_first:
                nisa.tensor_copy(dst=sums, src=values, engine=engine)
            else:
                nisa.tensor_tensor(dst=rounded if is_last else sums, data1=sums, data2=values, op=nl.add)
        if is_last:
            _scatter(result, index, tile, first, columns)


def _swiglu_backward(dh1, dh3, a, da, h1, h3):
    """Gradients of a = silu(h1) * h3 for one bank, in fp32: dh1, dh3 and a itself, each rounded once."""
    silu = nl.ndarray(da.shape, dtype=nl.float32, buffer=nl.sbuf)
    slope = nl.ndarray(da.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=silu, op=nl.silu, data=h1)
    nisa.activation(dst=slope, op=nl.silu_dx, data=h1)
    nisa.tensor_tensor(dst=dh3, data1=da, data2=silu, op=nl.multiply)
    nisa.tensor_tensor(dst=a, data1=silu, data2=h3, op=nl.multiply)
    nisa.tensor_tensor(dst=slope, data1=slope, data2=h3, op=nl.multiply)
    nisa.tensor_tensor(dst=dh1, data1=da, data2=slope, op=nl.multiply)


# -- weights --------------------------------------------------------------------------------------------


def _load_blocks(buffer, weight, info, first_row, num_rows, first, columns):
    """Part of [M, N] of the slot's expert, rows on the partitions: buffer (P, blocks of rows, columns) @ SBUF."""
    _, _, width = weight.shape
    full, rest = num_rows // P, num_rows % P
    offset = first_row * width + first
    expert = info[:, EXPERT : EXPERT + 1]
    if full:
        pattern = [[width, P], [P * width, full], [1, columns]]
        source = weight.ap(pattern, offset=offset, scalar_offset=expert, indirect_dim=0)
        nisa.dma_copy(dst=buffer[:, :full, :], src=source)
    if rest:
        pattern = [[width, rest], [1, columns]]
        source = weight.ap(pattern, offset=offset + full * P * width, scalar_offset=expert, indirect_dim=0)
        nisa.dma_copy(dst=buffer[:rest, full, :], src=source)


def _expert_of_partitions(slots, slot, ahead):
    """The slot's expert on every partition: (P, 1) fp32 @ SBUF, as an operand of index arithmetic."""
    _, count, columns = slots.shape
    expert = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
    offset = (_core() * count + ahead) * columns + EXPERT
    if slot is None:
        source = slots.ap([[0, P], [1, 1]], offset=offset)
    else:
        source = slots.ap([[0, P], [1, 1]], offset=offset, scalar_offset=slot, indirect_dim=1)
    nisa.dma_copy(dst=expert, src=source)
    return expert


def _load_transposed(buffer, weight, info, expert, first_row, num_rows, first, columns):
    """Part of [M, N] of the slot's expert, columns on the partitions: buffer (P, blocks of columns, rows) @ SBUF.

    The DMA transposes where it can: 16-bit elements in whole blocks. Elsewhere the tensor engine does.
    """
    num_experts, height, width = weight.shape
    whole = num_rows % P == 0 and columns % P == 0
    # Row numbers are computed in fp32, which is exact for integers up to 2**24.
    if SIZE_OF[weight.dtype] == 2 and whole and num_experts * height <= 2**24:
        blocks = num_rows // P
        rows = nl.ndarray((P, blocks), dtype=nl.int32, buffer=nl.sbuf)
        nisa.iota(dst=rows, pattern=[[P, blocks]], offset=first_row, channel_multiplier=1)
        start = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=start, data=expert, op0=nl.multiply, operand0=float(height))
        index = nl.ndarray((P, blocks), dtype=nl.uint32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=index, data=rows, op0=nl.add, operand0=start)
        flat = weight.reshape((num_experts * height, width))
        for block in range(_blocks(columns)):
            source = flat.ap([[width, num_rows], [1, P]], offset=first + block * P, vector_offset=index, indirect_dim=0)
            nisa.dma_transpose(dst=buffer[:, block, :], src=source)
        return
    for row in range(0, num_rows, P):
        count = min(P, num_rows - row)
        for start in range(0, columns, PIECE):
            piece = min(PIECE, columns - start)
            stage = nl.ndarray((count, piece), dtype=weight.dtype, buffer=nl.sbuf)
            source = weight.ap(
                [[width, count], [1, piece]],
                offset=(first_row + row) * width + first + start,
                scalar_offset=info[:, EXPERT : EXPERT + 1],
                indirect_dim=0,
            )
            nisa.dma_copy(dst=stage, src=source)
            blocks = buffer[:, start // P : start // P + _blocks(piece), row : row + count]
            _transpose_blocks(blocks, stage, count, piece)


def _outer_products(left, right, shape, rows, slots):
    """Of each expert, left^T right over its rows: [E, M, N] @ HBM for left [R, M] and right [R, N]."""
    _, num_left, num_right = shape
    result = nl.ndarray(shape, dtype=left.dtype, buffer=nl.shared_hbm)
    columns = min(num_right, ACCUMULATOR_COLUMNS)
    blocks = min(_blocks(num_left), max(1, ACCUMULATOR_BYTES // (columns * 4)))

    def run(slot, ahead):
        # The writes have numbers of their own, so that the next iteration may read its numbers before they are done.
        info, target = _slot(slots, slot, ahead), _slot(slots, slot, ahead)
        for first_left in range(0, num_left, blocks * P):
            for first_right in range(0, num_right, columns):
                left_part = (left, first_left, min(blocks * P, num_left - first_left))
                right_part = (right, first_right, min(columns, num_right - first_right))
                _outer_product(result, left_part, right_part, rows, info, target)

    def two(slot):
        # The second has its own buffers, which load while the first computes.
        run(slot, 0)
        run(slot, 1)

    nl.fori_loop(0, slots.shape[1] - EXTRA_SLOTS, two, step=2)
    return result


def _outer_product(result, left_part, right_part, rows, info, target):
    """One chunk of one expert's outer product, accumulated over its tiles and written once.

    ``left_part`` and ``right_part`` are (tensor, first column, columns); ``info`` and ``target`` hold the numbers of
    the slot, for reading and for writing.
    """
    left, first_left, num_left = left_part
    right, first_right, num_right = right_part
    accumulator = nl.ndarray((P, _blocks(num_left), num_right), dtype=nl.float32, buffer=nl.sbuf)

    def visit(at, num_tiles, is_first):
        tiles = []
        for plus in range(num_tiles):
            index = _load_index(rows, at, plus)
            tiles.append((_gather(left, index, first_left, num_left), _gather(right, index, first_right, num_right)))
        for block in range(_blocks(num_left)):
            m = min(P, num_left - block * P)
            for start in range(0, num_right, BANK):
                width = min(BANK, num_right - start)
                part = nl.ndarray((m, width), dtype=nl.float32, buffer=nl.psum)
                for left_tile, right_tile in tiles:
                    nisa.nc_matmul(
                        dst=part,
                        stationary=left_tile[:, block * P : block * P + m],
                        moving=right_tile[:, start : start + width],
                    )
                sums = accumulator[:m, block, start : start + width]
                if is_first:
                    engine = nisa.vector_engine if (block + start // BANK) % 2 == 0 else nisa.scalar_engine
                    nisa.tensor_copy(dst=sums, src=part, engine=engine)
                else:
                    nisa.tensor_tensor(dst=sums, data1=sums, data2=part, op=nl.add)

    def quad(at):
        visit(at, 4, False)

    def pair(at):
        visit(at, 2, False)

    def single(at):
        visit(at, 1, False)

    # The first tiles set the accumulator, so that it needs no zeros and an expert without rows gets some.
    visit(info[:, HEAD : HEAD + 1], 2, True)
    quads, twos = _register(info, QUADS), _register(info, TWOS)
    nl.fori_loop(_register(info, FROM), quads, quad, step=4)
    nl.fori_loop(quads, twos, pair, step=2)
    nl.fori_loop(twos, _register(info, END), single)

    _, _, width = result.shape
    for block in range(_blocks(num_left)):
        m = min(P, num_left - block * P)
        values = nl.ndarray((m, num_right), dtype=result.dtype, buffer=nl.sbuf)
        engine = nisa.vector_engine if block % 2 == 0 else nisa.scalar_engine
        nisa.tensor_copy(dst=values, src=accumulator[:m, block, :], engine=engine)
        place = result.ap(
            [[width, m], [1, num_right]],
            offset=(first_left + block * P) * width + first_right,
            scalar_offset=target[:, RESULT : RESULT + 1],
            indirect_dim=0,
        )
        nisa.dma_copy(dst=place, src=values, oob_mode=nisa.oob_mode.skip)


# -- arithmetic -----------------------------------------------------------------------------------------


def _blocks(size):
    """Blocks of 128 that cover ``size``."""
    return (size + P - 1) // P


def _up(size):
    """``size`` rounded up to blocks."""
    return _blocks(size) * P


def _num_cores():
    return nl.num_programs(0) if nl.program_ndim() != 0 else 1


def _core():
    return nl.program_id(0) if nl.program_ndim() != 0 else 0
