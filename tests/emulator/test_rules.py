"""One wrong little kernel per rule, refused with that rule, and the same kernel corrected, accepted."""

import ast
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from trn_kernels import emulator
from trn_kernels.emulator import rules, table

emulator.install()

import nki  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402


def sb(*shape, dtype=nl.float32):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)


def ps(*shape, dtype=nl.float32):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.psum)


def hbm(*shape, dtype=nl.float32):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.hbm)


def filled(value, *shape, dtype=nl.float32):
    tile = sb(*shape, dtype=dtype)
    nisa.memset(tile, value)
    return tile


def shared(*shape):
    """A tensor in HBM, filled."""
    tensor = hbm(*shape)
    nisa.dma_copy(tensor, filled(1.0, *shape))
    return tensor


def identity(n, dtype=nl.float32):
    """1 where row - column is 0."""
    difference, tile = sb(n, n), sb(n, n, dtype=dtype)
    nisa.iota(difference, [[-1, n]], channel_multiplier=1)
    nisa.tensor_scalar(tile, difference, nl.equal, 0.0)
    return tile


def run(body, *args, lnc=None):
    return nki.simulate(nki.jit(body)[lnc] if lnc else body)(*args)


ONES = np.ones((2, 3), np.float32)
FROZEN = np.ones((2, 3), np.float32)
FROZEN.flags.writeable = False
# name: (rule, wrong, right, words of the error: the value and the limit). Kernels of no argument; what needs a
# launch of its own stands below the table.
CASES = {}


def case(name, rule, wrong, right, *says):
    assert name not in CASES
    CASES[name] = (rule, wrong, right, says)


def pair(name, rule, use, wrong, right, *says):
    """A case whose kernels differ in one value: ``use(value)``."""
    case(name, rule, lambda: use(wrong), lambda: use(right), *says)


# -- tensors --------------------------------------------------------------------------------------------
case("129 partitions", "partition-limit", lambda: sb(129, 4), lambda: sb(128, 4), "129", "128")
case("1-D tile", "on-chip-rank", lambda: sb(64), lambda: sb(64, 1), "(64,)", "2 dimensions")
case("tile reshaped to 1-D", "on-chip-rank", lambda: sb(64, 1).reshape((64,)), lambda: sb(64, 1).reshape((64, 1)))
case("tile above SBUF", "capacity", lambda: sb(1, 53183), lambda: sb(1, 53182), "212732", "212728")
case("tile above PSUM", "capacity", lambda: ps(1, 4097), lambda: ps(1, 4096), "16388", "16384")


def live_together(columns, tiles):
    """All tiles are written before any is read."""
    for tile in [filled(1.0, 65, columns) for _ in range(tiles)]:  # 65 partitions: nothing fits beside one
        nisa.tensor_copy(tile, tile)


# 4 x 53182 = 212728 bytes per partition are usable; five tiles of a quarter hold values at a time, or four.
pair("live values above SBUF", "capacity", lambda n: live_together(13295, n), 5, 4, "265900", "212728", "5 tensors")


def beside(partitions, tiles):
    """Tiles of few partitions lie beside each other: 4 of 32, 2 of 64."""
    for tile in [filled(1.0, partitions, 53116) for _ in range(tiles)]:
        nisa.tensor_copy(tile, tile)


case("live quarters above SBUF", "capacity", lambda: beside(32, 5), lambda: beside(32, 4), "265580")
case("live halves above SBUF", "capacity", lambda: beside(33, 3), lambda: beside(64, 2), "318696")


def in_psum(banks):
    """Every bank holds a product until all are done."""
    a, products = filled(1.0, 128, 128), [ps(128, 512) for _ in range(banks)]
    for product in products:
        nisa.nc_matmul(product[:, 0:128], a, a)
    for product in products:
        nisa.tensor_copy(a, product[:, 0:128])


pair("live values above PSUM", "capacity", in_psum, 9, 8, "18432", "16384")


def at(address, *shape, dtype=nl.float32):
    tile = nl.ndarray(shape, dtype, nl.sbuf, address=address)
    nisa.memset(tile, 1.0)
    return tile


def two_at(second):
    """The first of two tiles is read after the second is written."""
    first = at((0, 64), 32, 16)
    other = at(second, 32, 16)
    nisa.tensor_copy(first, first)
    nisa.tensor_copy(other, other)


pair("addresses share bytes", "address-overlap", two_at, (0, 124), (0, 128), "(0, 124)", "(0, 64)")
pair("addresses share partitions", "address-overlap", two_at, (31, 64), (32, 64), "(31, 64)")


def renewed(rest):
    """A part of the first tile is written again, and then the rest of it is read, or the part."""
    first, result = at((0, 0), 32, 16), sb(32, 16)
    nisa.tensor_copy(result[:, 0:8], first[:, 0:8])
    nisa.tensor_copy(result, at((0, 0), 32, 16))
    nisa.memset(first[:, 0:8], 3.0)
    nisa.tensor_copy(result[:, 0:8], first[:, 8:16] if rest else first[:, 0:8])


pair("a part written again", "address-overlap", renewed, True, False, "(0, 0)")


def renewed_large(rest):
    first, result = filled(1.0, 65, 40000), sb(65, 8)
    nisa.tensor_copy(result, first[:, 0:8])
    nisa.tensor_copy(result, filled(2.0, 65, 20000)[:, 0:8])
    nisa.memset(first[:, 0:8], 3.0)
    nisa.tensor_copy(result, first[:, 8:16] if rest else first[:, 0:8])


pair("a part written again above SBUF", "capacity", renewed_large, True, False, "240000")


def reuse(late):
    """The address is used again before, or after, the last read of what was there."""
    first, result = at((0, 0), 32, 16), sb(32, 16)
    if not late:
        nisa.tensor_copy(result, first)
    second = at((0, 0), 32, 16)
    nisa.tensor_tensor(result, second, first if late else result, nl.add)


pair("address used again too early", "address-overlap", reuse, True, False)
pair(
    "address of a tensor in HBM",
    "address",
    lambda b: nl.ndarray((2, 2), nl.float32, b, address=(0, 0)),
    nl.hbm,
    nl.sbuf,
)
pair("address is a number", "address", lambda a: at(a, 2, 2), 64, (0, 64), "64")
pair("address before the partitions", "address", lambda a: at(a, 2, 2), (-1, 0), (0, 0), "from partition -1")
pair("address after the partitions", "address", lambda a: at(a, 2, 2), (127, 0), (126, 0), "127", "128")
pair("address before the bytes", "address", lambda a: at(a, 2, 2), (0, -4), (0, 0), "byte -4")
pair("address after SBUF", "address", lambda a: at(a, 2, 2), (0, 212724), (0, 212720), "8 bytes", "212724", "212728")
pair(
    "address after PSUM",
    "address",
    lambda byte: nl.ndarray((2, 2), nl.float32, nl.psum, address=(0, byte)),
    16380,
    16376,
    "16384",
)


def used(use):
    """Python does something with a tensor."""
    use(sb(2, 2))


def assigned(tile):
    tile[0:1] = 1.0


pair("element as a condition", "tensor-value", used, lambda t: 1 if t[0:1, 1:2] else 0, lambda t: 1 if t else 0)
pair("tensor equal to a number", "tensor-value", used, lambda t: t == 0, lambda t: t == None)  # noqa: E711
pair("tensor unequal to a tensor", "tensor-value", used, lambda t: t != t[0:1], lambda t: t != None)  # noqa: E711
pair("tensor in a list", "tensor-value", used, lambda t: t in [sb(2, 2)], lambda t: t in [t, sb(2, 2)])
pair("tensor less than a number", "tensor-value", used, lambda t: t < 1, lambda t: t.shape < (3,))
pair("tensor as a bound", "tensor-value", used, range, lambda t: range(t.shape[0]))
pair("tensor as a float", "tensor-value", used, float, lambda t: float(t.shape[0]))
pair("number in a tensor", "tensor-value", used, lambda t: 1 in t, lambda t: 1 in t.shape)
pair("sum of tensors", "tensor-value", used, lambda t: t + t, lambda t: nisa.tensor_tensor(sb(2, 2), t, t, nl.add))
pair("number minus a tensor", "tensor-value", used, lambda t: 1 - t, lambda t: 1 - t.shape[0])
pair("negated tensor", "tensor-value", used, lambda t: -t, lambda t: -t.shape[0])
pair("assignment to a tensor", "tensor-value", used, assigned, lambda t: nisa.memset(t[0:1], 1.0), "instruction")
pair("value beyond all floats", "immediate", lambda v: nisa.memset(sb(2, 2), v), 10**400, 10**4, "1329 bits")
pair(
    "operand beyond all floats",
    "immediate",
    lambda v: nisa.tensor_scalar(sb(2, 2), filled(1, 2, 2), nl.add, v),
    -(10**400),
    -(10**4),
    "1329 bits",
)
pair(
    "axis by name",
    "reduce-axis",
    lambda a: nisa.tensor_reduce(sb(2, 1), nl.add, filled(1, 2, 2, 2), a),
    (1, "x"),
    (1, 2),
)
pair(
    "axis counted twice",
    "reduce-axis",
    lambda a: nisa.tensor_reduce(sb(2, 1), nl.add, filled(1, 2, 2, 2), a),
    (2, 2),
    (2, 1),
)
pair(
    "scale that is no list",
    "dma-compute",
    lambda c: nisa.dma_compute(hbm(2, 2), [shared(2, 2)], nl.add, scales=c),
    2.0,
    [1.0],
)
pair(
    "axes that are no tuple",
    "transpose-axes",
    lambda a: nisa.dma_transpose(sb(2, 2), filled(1, 2, 2), axes=a),
    3,
    (1, 0),
)
pair(
    "tile of the array that is no pair",
    "matmul-tile",
    lambda tile: nisa.nc_matmul(ps(2, 2), filled(1, 2, 2), filled(1, 2, 2), tile_position=tile[0], tile_size=tile[1]),
    (5, 32),
    ((0, 0), (32, 32)),
    "tile_position",
)
pair(
    "print of a number", "operand", lambda f: nl.device_print("v", f(filled(1, 2, 2))), lambda t: 3, lambda t: t, "int"
)
pair(
    "print of a register",
    "operand",
    lambda f: nl.device_print("v", f()),
    lambda: nisa.register_alloc(3),
    lambda: filled(1, 2, 2),
)
pair("permutation that is a number", "signature", lambda d: hbm(2, 4).permute(d), 0, (1, 0), "permute")
pair("shape in two arguments", "signature", lambda s: sb(2, 4).reshape(*s), (2, 4), ((2, 4),), "reshape")
pair("size that is a number", "signature", lambda s: sb(2, 4).reshape_dim(1, s), 4, (2, 2), "reshape_dim")
pair("body that is no function", "loop-body", lambda f: nl.fori_loop(0, 4, f), None, lambda i: None, "NoneType")


def of_register(use):
    """Python computes with a register."""
    use(nisa.register_alloc(3))


for name, use in {
    "negated": lambda r: -r,
    "shifted": lambda r: r << 1,
    "halved": lambda r: r / 2,
    "as a divisor": lambda r: 5 % r,
    "as an exponent": lambda r: 2**r,
    "masked": lambda r: r & 1,
}.items():
    pair(f"register {name}", "register-value", of_register, use, lambda r: nisa.register_move(r, 1), "fori_loop")
for name, keyword in (("index", "index_offset"), ("padding", "padding_val")):
    pair(
        f"{name} of nonzero beyond int32",
        "immediate",
        lambda v, keyword=keyword: nisa.nonzero_with_count(sb(2, 5, dtype=nl.int32), filled(1, 2, 4), **{keyword: v}),
        2**31,
        2**31 - 5,
        "int32",
    )
pair("negative size", "shape", lambda n: hbm(4, n), -1, 1, "(4, -1)")
case("shape is a number", "shape", lambda: nl.ndarray(4, nl.float32, nl.hbm), lambda: hbm(4))
pair("size is a float", "integer", lambda n: hbm(n), 4.0, 4, "4.0")
pair("float64", "dtype", lambda d: sb(2, 2, dtype=d), "float64", nl.float32, "float64")
pair("int64", "dtype", lambda d: sb(2, 2, dtype=d), np.int64, np.int32, "int64")
pair("dtype of trn3", "dtype", lambda d: sb(2, 2, dtype=d), nl.float8_e4m3fn, nl.float8_e4m3, "float8_e4m3fn")
pair("no dtype", "dtype", lambda d: sb(2, 2, dtype=d), nl.add, nl.float32, "nl.add")
pair("buffer by name", "buffer", lambda b: nl.ndarray((2, 2), nl.float32, b), "sbuf", nl.sbuf, "'sbuf'")
case("index outside", "index", lambda: sb(4, 8)[:, 8], lambda: sb(4, 8)[:, 7], "index 8")
case("slice outside", "index", lambda: hbm(8)[4:9], lambda: hbm(8)[4:8], "[4, 9)")
case("too many indices", "index", lambda: hbm(4, 4)[0, 0, 0], lambda: hbm(4, 4)[0, 0], "3 indices")
case("index by an array", "index", lambda: hbm(4)[np.arange(2)], lambda: hbm(4)[0:2], "ndarray")
pair("ds of a float", "integer", lambda n: hbm(4)[nl.ds(0, n)], 2.0, 2, "2.0")
case("step of partitions", "partition-step", lambda: sb(8, 2)[::2], lambda: sb(8, 2)[0:4], "step 2")
case(
    "reshape to other size", "reshape", lambda: hbm(4, 4).reshape((5, 3)), lambda: hbm(4, 4).reshape((8, 2)), "16", "15"
)
case("reshape of partitions", "reshape", lambda: sb(4, 4).reshape((2, 8)), lambda: sb(4, 4).reshape((4, 2, 2)), "2")
case(
    "reshape of holes",
    "reshape",
    lambda: sb(4, 4, 4)[:, :, 0:2].reshape((4, 8)),
    lambda: sb(4, 4, 4)[:, 0:2].reshape((4, 8)),
    "not contiguous",
)
pair("partition step of a pattern", "ap", lambda s: sb(4, 8).ap([[s, 4], [1, 8]]), 4, 8, "step 4", "8")
pair(
    "pattern leaves a partition", "ap", lambda n: nisa.memset(sb(4, 8).ap([[8, 4], [1, n]]), 0), 9, 8, "0 to 8", "of 8"
)
pair(
    "pattern leaves the tensor",
    "ap",
    lambda n: nisa.dma_copy(sb(4, 8), hbm(4, 8).ap([[8, n], [1, 8]])),
    5,
    4,
    "element 39",
    "32",
)
pair("negative stride", "ap", lambda s: hbm(8).ap([[s, 8]], offset=0), -1, 1, ">= 0")
pair("offset of a view", "ap-offset", lambda o: hbm(8)[2:].ap([[1, 2]], offset=o), 2, None, "starts at 2")
pair(
    "bytes do not divide", "ap-dtype", lambda n: sb(2, n, dtype=nl.int8).ap([[1, 2], [1, 1]], dtype=nl.int32), 5, 4, "5"
)

# -- operands -------------------------------------------------------------------------------------------
case("array as operand", "operand", lambda: nisa.memset(ONES, 0), lambda: nisa.memset(sb(2, 3), 0), "dst", "ndarray")
case("compute on HBM", "buffer", lambda: nisa.memset(hbm(2, 3), 0), lambda: nisa.memset(sb(2, 3), 0), "private_hbm")
pair("32 partitions from 16", "start-partition", lambda p: nisa.memset(sb(128, 1)[p : p + 32], 0), 16, 32, "from 16")
pair(
    "33 partitions from 32",
    "start-partition",
    lambda p: nisa.memset(sb(128, 1)[p : p + 33], 0),
    32,
    64,
    "33 partitions",
)
pair(
    "65 partitions from 32", "start-partition", lambda p: nisa.memset(sb(128, 1)[p : p + 65], 0), 32, 0, "65 partitions"
)
case(
    "65 partitions from 64 by a pattern",
    "start-partition",
    lambda: nisa.memset(ps(128, 2).ap([[2, 64], [1, 2]], offset=64), 0),
    lambda: nisa.memset(ps(128, 2).ap([[2, 64], [1, 2]], offset=128), 0),
    "from 32",
)
case(
    "five free dimensions",
    "free-dims",
    lambda: nisa.memset(sb(1, 2, 2, 2, 2, 2), 0),
    lambda: nisa.memset(sb(1, 2, 2, 2, 2), 0),
    "5 free",
    "limit is 4",
)
case(
    "65537 elements per partition",
    "free-size",
    lambda: nisa.memset(sb(1, 65537, dtype=nl.uint8), 0),
    lambda: nisa.memset(sb(1, 65536, dtype=nl.uint8), 0),
    "65537",
    "65536",
)
case(
    "4097 elements of PSUM per partition",
    "free-size",
    lambda: nisa.memset(ps(1, 4098, dtype=nl.bfloat16)[:, :4097], 0),
    lambda: nisa.memset(ps(1, 4098, dtype=nl.bfloat16)[:, :4096], 0),
    "4097",
    "4096",
)


def repeated(columns):
    """A pattern that repeats what it reads from PSUM, as nki-library's layer norm does, may be longer."""
    few = ps(1, columns, dtype=nl.bfloat16)
    nisa.memset(few[:, : columns // 2], 1.0)
    nisa.memset(few[:, columns // 2 :], 1.0)
    nisa.tensor_copy(sb(1, 2, columns, dtype=nl.bfloat16), few.ap([[columns, 1], [0, 2], [1, columns]]))


pair("4098 elements of PSUM, each twice", "free-size", repeated, 4098, 4096, "4098", "4096")
pair(
    "long step",
    "stride",
    lambda s: nisa.memset(sb(1, 2, s, dtype=nl.bfloat16)[:, :, 0:5], 0),
    32768,
    32767,
    "32768",
    "32767",
)
case(
    "partitions differ",
    "partitions-differ",
    lambda: nisa.tensor_copy(sb(4, 2), sb(1, 2)),
    lambda: nisa.tensor_copy(sb(4, 2), sb(4, 2)),
    "1 partitions",
    "4",
)
case(
    "operands do not broadcast",
    "elements-differ",
    lambda: nisa.tensor_tensor(sb(4, 3, 2), sb(4, 3, 2), sb(4, 2), nl.add),
    lambda: nisa.tensor_tensor(sb(4, 3, 2), sb(4, 3, 2), sb(4, 2).ap([[2, 4], [0, 3], [1, 2]]), nl.add),
    "data2",
    "2 elements",
    "6",
)
case(
    "DMA of other size",
    "elements-differ",
    lambda: nisa.dma_copy(sb(4, 3), hbm(4, 2)),
    lambda: nisa.dma_copy(sb(4, 3), hbm(2, 6)),
    "8 elements",
    "12",
)
case(
    "reduction into too little",
    "elements-differ",
    lambda: nisa.tensor_reduce(sb(4, 2), nl.add, sb(4, 3, 2), axis=2),
    lambda: nisa.tensor_reduce(sb(4, 3), nl.add, sb(4, 3, 2), axis=2),
    "3 results",
)
case(
    "pattern of iota too short",
    "elements-differ",
    lambda: nisa.iota(sb(4, 8), [[1, 7]]),
    lambda: nisa.iota(sb(4, 8), [[1, 8]]),
    "7",
    "8",
)
case(
    "transpose of other shape",
    "elements-differ",
    lambda: nisa.nc_transpose(ps(4, 8), sb(4, 8)),
    lambda: nisa.nc_transpose(ps(8, 4), sb(4, 8)),
    "(8, 4)",
)
case(
    "overlapping results",
    "dst-overlap",
    lambda: nisa.memset(sb(1, 8).ap([[8, 1], [1, 4], [1, 4]]), 0),
    lambda: nisa.memset(sb(1, 8).ap([[8, 1], [4, 2], [1, 4]]), 0),
    "(8, 1, 1)",
)
case(
    "DMA into a sink",
    "dst-overlap",
    lambda: nisa.dma_copy(hbm(8).ap([[0, 4], [1, 8]]), sb(4, 8)),
    lambda: nisa.dma_copy(hbm(32).ap([[8, 4], [1, 8]]), sb(4, 8)),
    "(0, 1)",
)
case(
    "matmul into a sink",
    "dst-overlap",
    lambda: nisa.nc_matmul(ps(4, 1).ap([[1, 4], [0, 8]]), sb(4, 4), sb(4, 8)),
    lambda: nisa.nc_matmul(ps(4, 8), sb(4, 4), sb(4, 8)),
)


def shifted(to):
    tile = sb(4, 8)
    nisa.tensor_copy(tile[:, to : to + 4], tile[:, 0:4])


def shifted_dma(to):
    rows = hbm(8, 8)
    nisa.dma_copy(rows[to : to + 4], rows[0:4])


def shifted_by_index(to):
    tile = sb(4, 8)
    at = filled(to, 1, 1, dtype=nl.int32)
    nisa.tensor_copy(tile.ap([[8, 4], [1, 4]], scalar_offset=at, indirect_dim=1), tile[:, 0:4])


def reduced(into_itself):
    tile = sb(4, 3, 4)
    nisa.tensor_reduce(tile[:, 0, 0:3] if into_itself else sb(4, 3), nl.add, tile, axis=2)


def transposed(in_place):
    tile = sb(8, 8)
    nisa.nc_transpose(tile if in_place else sb(8, 8), tile)


def accumulated(in_place):
    sums = sb(4, 2)
    sink = sums.ap([[2, 4], [0, 8]])
    source = sink if in_place else sums.ap([[2, 4], [0, 8]], offset=1)
    nisa.tensor_tensor(sink, source, sb(4, 8), nl.add)


def reversed_order(same):
    tile = sb(4, 2, 3)
    nisa.tensor_copy(tile if same else tile.ap([[6, 4], [1, 3], [3, 2]]), tile)


pair("overlap of dst and src", "alias", shifted, 2, 4, "overlaps src")
pair("overlap in another order", "alias", reversed_order, False, True, "overlaps src")
pair("sink in place", "alias", accumulated, True, False, "overlaps data1")
pair("overlap of a DMA", "alias", shifted_dma, 3, 4, "overlaps src")
pair("overlap through an index", "alias", shifted_by_index, 3, 4, "overlaps src")
pair("transpose in place", "alias", transposed, True, False, "in place")
pair("reduction over its own data", "alias", reduced, True, False, "overlaps data")
case(
    "operand is a list",
    "column",
    lambda: nisa.tensor_scalar(sb(4, 2), sb(4, 2), nl.add, [1.0]),
    lambda: nisa.tensor_scalar(sb(4, 2), sb(4, 2), nl.add, 1.0),
    "list",
)
pair(
    "operand of one partition",
    "column",
    lambda n: nisa.tensor_scalar(sb(4, 2), sb(4, 2), nl.add, sb(n, 1)),
    1,
    4,
    "(1, 1)",
    "(4, 1)",
)
pair(
    "operand of two columns",
    "column",
    lambda n: nisa.activation(sb(4, 2), nl.exp, sb(4, 2), scale=sb(4, n)),
    2,
    1,
    "(4, 2)",
)
pair("bool operand", "column", lambda v: nisa.tensor_scalar(sb(4, 2), sb(4, 2), nl.add, v), True, 1, "bool")
pair(
    "int32 operand",
    "column-dtype",
    lambda d: nisa.tensor_scalar(sb(4, 2, dtype=nl.int32), sb(4, 2, dtype=nl.int32), nl.add, sb(4, 1, dtype=d)),
    nl.int32,
    nl.float32,
    "operand0",
    "int32",
)
pair(
    "bf16 scale",
    "column-dtype",
    lambda d: nisa.activation(sb(4, 2), nl.exp, sb(4, 2), scale=sb(4, 1, dtype=d)),
    nl.bfloat16,
    nl.float32,
    "scale",
)
pair(
    "bf16 operand0",
    "column-dtype",
    lambda d: nisa.tensor_scalar_reduce(sb(4, 2), sb(4, 2), nl.add, sb(4, 1, dtype=d), nl.add),
    nl.bfloat16,
    nl.float32,
    "operand0",
)

# -- engines --------------------------------------------------------------------------------------------
pair(
    "Tensor engine copies",
    "engine",
    lambda e: nisa.tensor_copy(sb(2, 2), sb(2, 2), engine=e),
    nisa.tensor_engine,
    nisa.scalar_engine,
    "tensor",
)
pair("engine by number", "engine", lambda e: nisa.memset(sb(2, 2), 0, engine=e), 5, nisa.engine.vector, "5")
pair(
    "Scalar engine on two tensors",
    "engine",
    lambda e: nisa.tensor_tensor(sb(2, 2), sb(2, 2), sb(2, 2), nl.add, engine=e),
    nisa.scalar_engine,
    nisa.gpsimd_engine,
    "scalar",
)
pair(
    "Scalar engine subtracts",
    "engine",
    lambda op: nisa.tensor_scalar(sb(2, 2), sb(2, 2), op, 1.0, engine=nisa.scalar_engine),
    nl.subtract,
    nl.add,
    "subtract",
)
pair(
    "GpSimd multiplies by a scalar",
    "engine",
    lambda op: nisa.tensor_scalar(sb(2, 2), sb(2, 2), op, 1.0, engine=nisa.gpsimd_engine),
    nl.multiply,
    nl.rsqrt,
    "multiply",
)
pair(
    "power on the Vector engine",
    "engine",
    lambda e: nisa.tensor_tensor(sb(2, 2), sb(2, 2), sb(2, 2), nl.power, engine=e),
    nisa.vector_engine,
    nisa.gpsimd_engine,
    "power",
)
pair(
    "Vector engine starts a DMA",
    "engine",
    lambda e: nisa.dma_copy(sb(2, 2), hbm(2, 2), dge_mode=nisa.dge_mode.hwdge, engine=e),
    nisa.vector_engine,
    nisa.engine.sync,
    "vector",
)
pair(
    "GpSimd on PSUM",
    "gpsimd-psum",
    lambda e: nisa.tensor_copy(sb(2, 2), ps(2, 2), engine=e),
    nisa.gpsimd_engine,
    nisa.vector_engine,
    "PSUM",
)
pair(
    "power on PSUM", "gpsimd-psum", lambda t: nisa.tensor_tensor(sb(2, 2), t(2, 2), sb(2, 2), nl.power), ps, sb, "PSUM"
)
pair("iota into PSUM", "buffer", lambda t: nisa.iota(t(2, 2), [[1, 2]]), ps, sb, "psum")
pair(
    "both in PSUM",
    "both-psum",
    lambda t: nisa.tensor_tensor(sb(2, 2), ps(2, 2), t(2, 2), nl.add),
    ps,
    sb,
    "data1 and data2",
)
pair(
    "data and operand1 in PSUM",
    "both-psum",
    lambda t: nisa.scalar_tensor_tensor(sb(2, 2), ps(2, 2), nl.add, 1.0, nl.add, t(2, 2)),
    ps,
    sb,
    "operand1",
)

# -- operators, immediates ------------------------------------------------------------------------------
pair(
    "activation as ALU operator",
    "op",
    lambda op: nisa.tensor_tensor(sb(2, 2), sb(2, 2), sb(2, 2), op),
    nl.exp,
    nl.add,
    "nl.exp",
)
pair("operator by name", "op", lambda op: nisa.tensor_scalar(sb(2, 2), sb(2, 2), op, 1.0), "add", nl.add, "'add'")
pair("ALU operator as activation", "op", lambda op: nisa.activation(sb(2, 2), op, sb(2, 2)), nl.add, nl.exp, "nl.add")
pair(
    "one operand for two tensors",
    "op",
    lambda op: nisa.tensor_tensor(sb(2, 2), sb(2, 2), sb(2, 2), op),
    nl.abs,
    nl.maximum,
    "nl.abs",
)
pair(
    "one operand as op1",
    "op",
    lambda op: nisa.scalar_tensor_tensor(sb(2, 2), sb(2, 2), nl.add, 1.0, op, sb(2, 2)),
    nl.abs,
    nl.add,
    "nl.abs",
)
pair(
    "reverse of one operand",
    "op",
    lambda r: nisa.tensor_scalar(sb(2, 2), sb(2, 2), nl.abs, 0.0, reverse0=r),
    True,
    False,
    "reverse0",
)
pair(
    "reverse of one operand and a tensor",
    "op",
    lambda r: nisa.scalar_tensor_tensor(sb(2, 2), sb(2, 2), nl.abs, 0.0, nl.add, sb(2, 2), reverse0=r),
    True,
    False,
    "reverse0",
)
pair(
    "operand1 without op1",
    "op",
    lambda op: nisa.tensor_scalar(sb(2, 2), sb(2, 2), nl.add, 1.0, op1=op, operand1=1.0),
    None,
    nl.add,
    "op1",
)
pair(
    "bit and arithmetic operators mix",
    "op",
    lambda op: nisa.tensor_scalar(
        sb(2, 2, dtype=nl.int32), sb(2, 2, dtype=nl.int32), nl.left_shift, 1, op1=op, operand1=1
    ),
    nl.add,
    nl.bitwise_or,
    "mix",
)
pair(
    "bit operator with a tensor",
    "op",
    lambda op: nisa.scalar_tensor_tensor(
        sb(2, 2, dtype=nl.int32), sb(2, 2, dtype=nl.int32), op, 1, nl.add, sb(2, 2, dtype=nl.int32)
    ),
    nl.bitwise_or,
    nl.add,
    "nl.bitwise_or",
)
pair(
    "no reduction", "op", lambda op: nisa.tensor_reduce(sb(2, 1), op, sb(2, 2), axis=1), nl.less, nl.maximum, "nl.less"
)
pair(
    "negated bits",
    "op",
    lambda n: nisa.tensor_reduce(sb(2, 1, dtype=nl.int32), nl.bitwise_or, sb(2, 2, dtype=nl.int32), axis=1, negate=n),
    True,
    False,
    "negate",
)
pair(
    "bits of floats",
    "bitvec-dtype",
    lambda d: nisa.tensor_tensor(sb(2, 2, dtype=d), sb(2, 2, dtype=d), sb(2, 2, dtype=d), nl.bitwise_and),
    nl.float32,
    nl.int32,
    "float32",
)
pair(
    "bits of other width",
    "bitvec-dtype",
    lambda d: nisa.tensor_tensor(sb(2, 2, dtype=d), sb(2, 2, dtype=nl.int16), sb(2, 2, dtype=nl.int16), nl.bitwise_and),
    nl.int32,
    nl.uint16,
    "4 bytes",
)
pair(
    "float among bits",
    "bitvec-dtype",
    lambda v: nisa.tensor_scalar(sb(2, 2, dtype=nl.int32), sb(2, 2, dtype=nl.int32), nl.bitwise_and, v),
    1.0,
    1,
    "1.0",
)
pair(
    "integer of too many bits",
    "bitvec-dtype",
    lambda v: nisa.tensor_scalar(sb(2, 2, dtype=nl.uint8), sb(2, 2, dtype=nl.uint8), nl.bitwise_and, v),
    256,
    255,
    "256",
    "8 bits",
)
pair(
    "shift by the whole width",
    "shift",
    lambda v: nisa.tensor_scalar(sb(2, 2, dtype=nl.int16), sb(2, 2, dtype=nl.int16), nl.left_shift, v),
    16,
    15,
    "by 16",
    "16 bits",
)
pair(
    "negative integer power",
    "int-power",
    lambda v: nisa.tensor_tensor(
        sb(2, 2, dtype=nl.int32), filled(3, 2, 2, dtype=nl.int32), filled(v, 2, 2, dtype=nl.int32), nl.power
    ),
    -1,
    2,
    "-1",
)
pair("float into integers", "immediate", lambda v: nisa.memset(sb(2, 2, dtype=nl.int32), v), 2.0, 2, "2.0", "int32")
pair(
    "value outside the dtype", "immediate", lambda v: nisa.memset(sb(2, 2, dtype=nl.uint8), v), 256, 255, "256", "uint8"
)
pair(
    "negative value into unsigned",
    "immediate",
    lambda v: nisa.memset(sb(2, 2, dtype=nl.uint32), v),
    -1,
    2**32 - 1,
    "-1",
)
pair(
    "integer that fp32 does not hold",
    "immediate",
    lambda v: nisa.memset(sb(2, 2, dtype=nl.int32), v),
    2**24 + 1,
    2**24,
    "16777217",
    "fp32",
)
pair(
    "value that overflows fp8",
    "immediate",
    lambda v: nisa.memset(sb(2, 2, dtype=nl.float8_e4m3), v),
    300.0,
    240.0,
    "300.0",
)
pair("2 into bool", "immediate", lambda v: nisa.memset(sb(2, 2, dtype=nl.bool_), v), 2, True, "2")
pair("complex value", "immediate", lambda v: nisa.memset(sb(2, 2), v), 1j, 1.0, "complex")
pair("True into floats", "immediate", lambda v: nisa.memset(sb(2, 2), v), True, 1, "bool")
pair(
    "reduction over the partitions",
    "reduce-axis",
    lambda a: nisa.tensor_reduce(sb(4, 1), nl.add, sb(4, 2), axis=a),
    0,
    1,
    "axis 0",
)
pair(
    "reduction of a middle axis",
    "reduce-axis",
    lambda a: nisa.tensor_reduce(sb(4, 3), nl.add, sb(4, 3, 3), axis=a),
    1,
    2,
    "axis 1",
)
pair(
    "reduction over nothing",
    "reduce-axis",
    lambda a: nisa.tensor_reduce(sb(4, 1), nl.add, sb(4, 1), axis=a),
    (),
    (1,),
    "axis ()",
)
pair(
    "iota of five dimensions",
    "iota",
    lambda n: nisa.iota(sb(2, 8), [[1, 2]] * 3 + [[0, 1]] * n),
    2,
    1,
    "5 dimensions",
    "4",
)
pair(
    "iota above int32",
    "iota",
    lambda o: nisa.iota(sb(1, 2, dtype=nl.int32), [[1, 2]], offset=o),
    2**31 - 1,
    2**31 - 2,
    "2147483648",
)
pair(
    "iota below int32 in a middle term",
    "iota",
    lambda m: nisa.iota(sb(2, 2, dtype=nl.int32), [[1, 2]], offset=-(2**31), channel_multiplier=m),
    -1,
    1,
    "-2147483649",
)
pair("iota without counts", "iota", lambda p: nisa.iota(sb(2, 2), p), [1, 2], [[1, 2]], "[1, 2]")
pair("iota of no values", "iota", lambda n: nisa.iota(sb(2, n), [[1, n]]), 0, 1, "positive")
pair("iota of a float step", "integer", lambda s: nisa.iota(sb(2, 2), [[s, 2]]), 0.5, 1, "0.5")
case(
    "unknown argument",
    "signature",
    lambda: nisa.scalar_tensor_tensor(sb(2, 2), sb(2, 2), nl.add, 1.0, nl.add, sb(2, 2), mask=None),
    lambda: nisa.scalar_tensor_tensor(sb(2, 2), sb(2, 2), nl.add, 1.0, nl.add, sb(2, 2), name=None),
    "'mask'",
)
pair(
    "a kind that no check expects",
    "signature",
    lambda a: nisa.tensor_reduce(sb(2, 1), nl.add, filled(1, 2, 2), a),
    [[1]],
    [1],
    "nisa.tensor_reduce",
    "unhashable",
)
case("missing argument", "signature", lambda: nisa.memset(sb(2, 2)), lambda: nisa.memset(sb(2, 2), 0), "'value'")

# -- DMA ------------------------------------------------------------------------------------------------
pair("DMA from PSUM", "buffer", lambda t: nisa.dma_copy(hbm(2, 2), t(2, 2)), ps, sb, "src is in PSUM")
pair("DMA into PSUM", "buffer", lambda t: nisa.dma_copy(t(2, 2), hbm(2, 2)), ps, sb, "dst is in PSUM")
pair(
    "hwdge converts",
    "dtype",
    lambda d: nisa.dma_copy(sb(2, 2, dtype=d), hbm(2, 2), dge_mode=nisa.dge_mode.hwdge),
    nl.bfloat16,
    nl.float32,
    "bfloat16",
)
pair(
    "dge_mode by name",
    "dge-mode",
    lambda m: nisa.dma_copy(sb(2, 2), hbm(2, 2), dge_mode=m),
    "swdge",
    nisa.dge_mode.swdge,
    "'swdge'",
)
pair(
    "engine without hwdge",
    "dge-mode",
    lambda m: nisa.dma_copy(sb(2, 2), hbm(2, 2), dge_mode=m, engine=nisa.scalar_engine),
    nisa.dge_mode.swdge,
    nisa.dge_mode.hwdge,
    "swdge",
)
pair(
    "oob_mode by name",
    "oob-mode",
    lambda m: nisa.dma_copy(sb(2, 2), hbm(2, 2), oob_mode=m),
    "skip",
    nisa.oob_mode.skip,
    "'skip'",
)


def gathered(index=0, mode=nisa.dge_mode.unknown, dtype=nl.int32, dim=0, shape=(2, 1), table=hbm, view=slice(0, 4)):
    at = filled(index, *shape, dtype=dtype)
    pattern = table(4, 3)[view].ap([[3, 2], [1, 2]], vector_offset=at, indirect_dim=dim)
    nisa.dma_copy(sb(2, 2), pattern, dge_mode=mode)


def moved(index=0, mode=nisa.dge_mode.unknown, table=hbm, dim=0, shape=(1, 1), dtype=None, both=False):
    rows = table(4, 4)
    at = filled(index, *shape, dtype=nl.int32)
    vector = at if both else None
    window = rows.ap([[4, 1], [1, 2]], scalar_offset=at, vector_offset=vector, indirect_dim=dim, dtype=dtype)
    nisa.dma_copy(sb(1, 2, dtype=dtype or nl.float32), window, dge_mode=mode)


def scattered(count):
    at, other = filled(0, 2, 1, dtype=nl.int32), filled(0, count, 1, dtype=nl.int32)
    source = hbm(4, 3).ap([[3, 2], [1, 3]], vector_offset=at)
    target = hbm(4, 3 if count == 2 else 2).ap([[3, count], [1, 3 if count == 2 else 2]], vector_offset=other)
    nisa.dma_copy(target, source)


pair("gather outside", "indirect-range", gathered, 4, 3, "index 4", "4 rows")
pair("window moved outside", "indirect-range", moved, 4, 3, "index 4")
pair("hwdge gathers", "dge-mode", lambda m: gathered(mode=m), nisa.dge_mode.hwdge, nisa.dge_mode.swdge, "swdge")
pair(
    "static descriptors move", "dge-mode", lambda m: moved(mode=m), nisa.dge_mode.none, nisa.dge_mode.hwdge, "run-time"
)
pair("int16 indices", "index-operand", lambda d: gathered(dtype=d), nl.int16, nl.uint32, "int16")
pair(
    "indices in HBM",
    "index-operand",
    lambda memory: hbm(4, 3).ap([[3, 2], [1, 3]], vector_offset=memory(2, 1, dtype=nl.int32)),
    hbm,
    sb,
    "SBUF",
)
pair(
    "number as index",
    "index-operand",
    lambda v: hbm(4, 3).ap([[3, 1], [1, 3]], scalar_offset=v),
    1,
    None,
    "scalar_offset",
    "1",
)
pair("gather of columns", "indirect", lambda d: gathered(dim=d), 1, 0, "dim 1")
pair("gather from SBUF", "indirect", lambda t: gathered(table=t), sb, hbm, "HBM")
pair("indices in a row", "indirect", lambda s: gathered(shape=s), (1, 2), (2, 1), "(1, 2)")
pair(
    "gather from a part of a tensor",
    "indirect",
    lambda v: gathered(view=v),
    (slice(0, 4), slice(0, 2)),
    slice(0, 4),
    "part",
)
pair("two indices for a window", "indirect", lambda s: moved(shape=s), (1, 2), (1, 1), "(1, 2)")
pair("scalar and vector offset", "indirect", lambda b: moved(both=b), True, False, "exclude")
pair("index moves partitions", "indirect", lambda d: moved(table=sb, dim=d), 0, 1, "partitions")
pair("no such dimension", "indirect", lambda d: moved(dim=d), 2, 1, "indirect_dim 2")
pair("index of another dtype", "indirect", lambda d: moved(dtype=d), nl.bfloat16, nl.int32, "bfloat16")
pair("gather and scatter of other lengths", "indirect", scattered, 3, 2, "2 rows", "3")
case(
    "view of a run-time address",
    "indirect",
    lambda: hbm(4, 3).ap([[3, 1], [1, 3]], scalar_offset=sb(1, 1, dtype=nl.int32))[0],
    lambda: hbm(4, 3).ap([[3, 1], [1, 3]])[0],
    "indexing",
)
case(
    "run-time address of an addition",
    "indirect",
    lambda: nisa.tensor_scalar(
        sb(4, 2),
        sb(4, 3).ap([[3, 4], [1, 2]], scalar_offset=filled(0, 1, 1, dtype=nl.int32), indirect_dim=1),
        nl.add,
        1.0,
    ),
    lambda: nisa.tensor_copy(
        sb(4, 2), sb(4, 3).ap([[3, 4], [1, 2]], scalar_offset=filled(0, 1, 1, dtype=nl.int32), indirect_dim=1)
    ),
    "run-time address",
)

# -- Tensor engine --------------------------------------------------------------------------------------
pair("matmul into SBUF", "buffer", lambda t: nisa.nc_matmul(t(4, 8), sb(2, 4), sb(2, 8)), sb, ps, "dst must be in PSUM")
pair(
    "matmul from PSUM",
    "buffer",
    lambda t: nisa.nc_matmul(ps(4, 8), sb(2, 4), t(2, 8)),
    ps,
    sb,
    "moving must be in SBUF",
)
pair(
    "contractions differ", "matmul-contraction", lambda k: nisa.nc_matmul(ps(4, 8), sb(2, 4), sb(k, 8)), 3, 2, "3", "2"
)
pair(
    "129 stationary columns",
    "matmul-stationary",
    lambda m: nisa.nc_matmul(ps(128, 8), sb(2, m), sb(2, 8)),
    129,
    128,
    "129",
    "128",
)
pair(
    "513 moving columns",
    "matmul-moving",
    lambda n: nisa.nc_matmul(ps(4, 512), sb(2, 4), sb(2, n)),
    513,
    512,
    "513",
    "512",
)
pair(
    "result of other shape",
    "matmul-shape",
    lambda n: nisa.nc_matmul(ps(n, 8), sb(2, 4), sb(2, 8)),
    5,
    4,
    "(5, 8)",
    "(4, 8)",
)
pair(
    "result over two banks",
    "psum-bank",
    lambda c: nisa.nc_matmul(ps(4, 1024)[:, c : c + 512], sb(2, 4), sb(2, 512)),
    1,
    512,
    "2048",
)
pair(
    "result at an address over two banks",
    "psum-bank",
    lambda byte: nisa.nc_matmul(
        nl.ndarray((4, 64), nl.float32, nl.psum, address=(0, byte)), filled(1, 2, 4), filled(1, 2, 64)
    ),
    1800,
    1792,
    "1800 to 2055",
)
pair(
    "transpose over two banks",
    "psum-bank",
    lambda c: nisa.nc_transpose(ps(4, 1024)[:, c : c + 4], sb(4, 4)),
    510,
    512,
    "2048",
)
pair(
    "transpose to an odd bf16 column",
    "psum-alignment",
    lambda c: nisa.nc_transpose(ps(4, 9, dtype=nl.bfloat16)[:, c : c + 4], sb(4, 4, dtype=nl.bfloat16)),
    1,
    2,
    "byte 2",
    "4",
)
pair(
    "matmul of integers",
    "dtype",
    lambda d: nisa.nc_matmul(ps(4, 8), sb(2, 4, dtype=d), sb(2, 8, dtype=d)),
    nl.int32,
    nl.bfloat16,
    "int32",
)
pair(
    "fp32 by bf16",
    "dtype",
    lambda d: nisa.nc_matmul(ps(4, 8), sb(2, 4), sb(2, 8, dtype=d)),
    nl.bfloat16,
    nl.float32,
    "bfloat16",
)
pair(
    "bf16 result",
    "dtype",
    lambda d: nisa.nc_matmul(ps(4, 8, dtype=d), sb(2, 4), sb(2, 8)),
    nl.bfloat16,
    nl.float32,
    "bfloat16",
)
pair(
    "accumulate by number",
    "accumulate",
    lambda a: nisa.nc_matmul(ps(4, 8), sb(2, 4), sb(2, 8), accumulate=a),
    1,
    False,
    "1",
)
pair(
    "transpose accumulates",
    "accumulate",
    lambda a: nisa.nc_matmul(ps(4, 8), sb(8, 4), identity(8), is_transpose=True, accumulate=a),
    True,
    None,
    "add",
)
pair(
    "transpose without identity",
    "matmul-identity",
    lambda t: nisa.nc_matmul(ps(8, 8), sb(8, 8), t(8), is_transpose=True),
    lambda n: filled(1, n, n),
    identity,
    "moving",
)
pair(
    "twos that are said to be ones",
    "matmul-onezero",
    lambda v: nisa.nc_matmul(ps(8, 8), filled(v, 8, 8), filled(2, 8, 8), is_stationary_onezero=True),
    2,
    1,
    "is_stationary_onezero",
)
pair(
    "matmul transposes to another dtype",
    "dtype",
    lambda d: nisa.nc_matmul(
        ps(4, 8, dtype=d), sb(8, 4, dtype=nl.bfloat16), identity(8, nl.bfloat16), is_transpose=True
    ),
    nl.float32,
    nl.bfloat16,
    "keeps",
)
pair(
    "transpose to another dtype",
    "dtype",
    lambda d: nisa.nc_transpose(ps(4, 4, dtype=d), sb(4, 4, dtype=nl.bfloat16)),
    nl.float32,
    nl.bfloat16,
    "keeps",
)
pair(
    "Vector transpose to another dtype",
    "dtype",
    lambda d: nisa.nc_transpose(sb(4, 4, dtype=d), sb(4, 4, dtype=nl.bfloat16)),
    nl.float32,
    nl.bfloat16,
    "keeps",
)
pair(
    "transpose of fp8",
    "dtype",
    lambda d: nisa.nc_transpose(ps(4, 4, dtype=d), sb(4, 4, dtype=d)),
    nl.float8_e4m3,
    nl.bfloat16,
    "float8_e4m3",
    "2 or 4",
)
pair(
    "transpose of 33 on the Vector engine",
    "transpose-size",
    lambda n: nisa.nc_transpose(sb(4, n), sb(n, 4)),
    33,
    32,
    "33",
    "32 x 32",
)
pair(
    "transpose of 129",
    "transpose-size",
    lambda n: nisa.nc_transpose(ps(128, 128), sb(128, n)),
    129,
    128,
    "129",
    "128 x 128",
)
pair(
    "Scalar engine transposes",
    "engine",
    lambda e: nisa.nc_transpose(sb(4, 4), sb(4, 4), engine=e),
    nisa.scalar_engine,
    nisa.vector_engine,
    "scalar",
)
pair(
    "Tensor engine transposes into SBUF",
    "buffer",
    lambda t: nisa.nc_transpose(t(4, 4), sb(4, 4), engine=nisa.tensor_engine),
    sb,
    ps,
    "SBUF into PSUM",
)
case("instruction that is missing", "not-implemented", lambda: nisa.topk(1, 2, 3, 4), lambda: None, "topk")
case("function that is missing", "not-implemented", lambda: nl.load(hbm(2, 2)), lambda: nl.ds(0, 1), "nl.load")
case("instruction of trn3", "target", lambda: nisa.quantize_mx(sb(2, 2), sb(2, 2), sb(2, 2)), lambda: None, "trn3")
case("operator of trn3", "target", lambda: nl.abs_max(1, 2), lambda: None, "nl.abs_max")
case("view of trn3", "target", lambda: shared(2, 2).indirect(sb(2, 1)), lambda: shared(2, 2)[0:1], "tensor.indirect")
case(
    "priority of trn3",
    "target",
    lambda: nisa.dma_copy(sb(2, 2), hbm(2, 2), priority=1),
    lambda: nisa.dma_copy(sb(2, 2), hbm(2, 2)),
    "priority=1",
)

# -- accumulation ---------------------------------------------------------------------------------------


def summed(first=False, second=None, part=slice(0, 8), between=None):
    """A sum of two matmuls, the first of which writes a part."""
    group = ps(4, 8)
    nisa.nc_matmul(group[:, part], filled(1.0, 2, 4), filled(1.0, 2, 8)[:, part], accumulate=first)
    if between is not None:
        between(group)
    nisa.nc_matmul(group, filled(1.0, 2, 4), filled(1.0, 2, 8), accumulate=second)


pair("sum that nobody started", "accumulate-unset", lambda a: summed(first=a), True, False, "no matmul has started")
pair("sum of a part", "accumulate-mixed", lambda p: summed(part=p), slice(0, 4), slice(0, 8), "in part")
case(
    "sum that another engine wrote",
    "accumulate-foreign",
    lambda: summed(between=lambda group: nisa.memset(group, 0.0)),
    lambda: summed(between=lambda group: nisa.memset(group, 0.0), second=False),
    "another engine",
)
case(
    "tile of rows below its data",
    "matmul-tile",
    lambda: nisa.nc_matmul(ps(4, 8), sb(64, 4), sb(64, 8), tile_position=(0, 0), tile_size=(32, 128)),
    lambda: nisa.nc_matmul(ps(4, 8), sb(64, 4), sb(64, 8), tile_position=(0, 0), tile_size=(64, 128)),
    "64 partitions",
    "32 rows",
)
for _name, _wrong, _right, _says in (
    ("tile without position", ((), (32, 32)), ((0, 0), (32, 32)), "both are pairs"),
    ("tile of 16", ((0, 0), (16, 32)), ((0, 0), (32, 32)), "32, 64 and 128"),
    ("tile between positions", ((0, 16), (32, 32)), ((0, 0), (32, 32)), "multiple of 32"),
    ("tile of other rows", ((32, 0), (32, 32)), ((0, 0), (32, 32)), "row 32"),
    ("tile of other columns", ((0, 32), (32, 32)), ((0, 0), (32, 32)), "column 32"),
):
    pair(
        _name,
        "matmul-tile",
        lambda t: nisa.nc_matmul(ps(4, 8), sb(2, 4), sb(2, 8), tile_position=t[0], tile_size=t[1]),
        _wrong,
        _right,
        _says,
    )
pair(
    "unknown mode of the Tensor engine",
    "perf-mode",
    lambda m: nisa.nc_matmul(ps(4, 8), sb(2, 4), sb(2, 8), perf_mode=m),
    "quadruple",
    "none",
    "quadruple",
)


def double(shape=(2, 2, 4), dtype=nl.float8_e4m3, mode=nisa.matmul_perf_mode.double_row, **tile):
    nisa.nc_matmul(ps(4, 8), sb(*shape, dtype=dtype), sb(shape[0], 2, 8, dtype=dtype), perf_mode=mode, **tile)


pair("double_row of bf16", "double-row", lambda d: double(dtype=d), nl.bfloat16, nl.float8_e5m2, "bfloat16")
pair("double_row of one row", "double-row", lambda s: double(shape=s), (2, 1, 8), (2, 2, 4), "(2, 1, 8)")
pair(
    "double_row of a column tile",
    "double-row",
    lambda c: double(tile_position=(0, 0), tile_size=(128, c)),
    64,
    128,
    "column tiles",
)

# -- reductions -----------------------------------------------------------------------------------------
CMD = nisa.reduce_cmd


def reduced_activation(cmd=CMD.reset_reduce, op=nl.add, first=None, shape=(2, 1), dtype=nl.float32):
    if first is not None:
        nisa.activation(sb(2, 2), nl.exp, sb(2, 2), reduce_op=op, reduce_cmd=first)
    result = sb(*shape, dtype=dtype)
    nisa.activation(sb(2, 2), nl.exp, sb(2, 2), reduce_op=op, reduce_cmd=cmd, reduce_res=result)


pair("activation loads a sum", "reduce-cmd", lambda c: reduced_activation(cmd=c), CMD.load_reduce, CMD.reset_reduce)
pair("activation multiplies up", "op", lambda o: reduced_activation(op=o), nl.multiply, nl.add, "nl.multiply")
pair("activation without operator", "op", lambda o: reduced_activation(op=o), None, nl.add, "needs a reduce_op")
pair("sum of two columns", "column", lambda s: reduced_activation(shape=s), (2, 2), (2, 1), "(2, 2)")
pair("sum as integer", "dtype", lambda d: reduced_activation(dtype=d), nl.int32, nl.bfloat16, "int32")
pair(
    "sum that was never reset",
    "accumulator-unset",
    lambda first: reduced_activation(cmd=CMD.reduce, first=first),
    None,
    CMD.reset,
    "scalar engine",
)


def scalar_reduced(op0=nl.add, operand=1.0, op=nl.add, reverse=False, cmd=CMD.reset_reduce, init=None):
    nisa.tensor_scalar_reduce(sb(2, 2), sb(2, 2), op0, operand, op, sb(2, 1), reverse, cmd, init)


pair("reverse0 that NKI lacks", "not-supported", lambda r: scalar_reduced(reverse=r), True, False, "reverse0")
pair("initial value without load", "reduce-cmd", lambda i: scalar_reduced(init=i), 1.0, None, "load_reduce")
pair("load without initial value", "reduce-cmd", lambda i: scalar_reduced(cmd=CMD.load_reduce, init=i), None, 1.0)
pair("Vector engine resets only", "reduce-cmd", lambda c: scalar_reduced(cmd=c), CMD.reset, CMD.reset_reduce)
pair("bits of a reduction", "op", lambda o: scalar_reduced(op0=o), nl.bitwise_and, nl.abs, "bitwise_and")
pair("reduction by comparison", "op", lambda o: scalar_reduced(op=o), nl.less, nl.minimum, "nl.less")
pair(
    "partitions reduced to two",
    "elements-differ",
    lambda n: nisa.tensor_partition_reduce(sb(n, 4), nl.add, sb(8, 4)),
    2,
    1,
    "(2, 4)",
)
pair(
    "product over partitions",
    "op",
    lambda o: nisa.tensor_partition_reduce(sb(1, 4), o, sb(8, 4)),
    nl.multiply,
    nl.maximum,
    "nl.multiply",
)
pair("statistics of 513", "bn-stats", lambda n: nisa.bn_stats(sb(2, 6), sb(2, n)), 513, 512, "513", "512")
pair("statistics of five", "elements-differ", lambda n: nisa.bn_stats(sb(2, n), sb(2, 8)), 5, 6, "(2, 6)")
pair("pairs of statistics", "bn-aggr", lambda n: nisa.bn_aggr(sb(2, 2), sb(2, n)), 8, 9, "8 elements")
pair("three means", "elements-differ", lambda n: nisa.bn_aggr(sb(2, n), sb(2, 9)), 3, 2, "(2, 2)")
pair(
    "scan of bits",
    "op",
    lambda o: nisa.tensor_tensor_scan(sb(2, 4), sb(2, 4), sb(2, 4), 0.0, o, nl.add),
    nl.bitwise_and,
    nl.multiply,
    "bitwise_and",
)
pair(
    "reciprocal of other size",
    "elements-differ",
    lambda n: nisa.reciprocal(sb(2, 4), sb(2, n)),
    3,
    4,
    "3 elements",
)

# -- selections -----------------------------------------------------------------------------------------
pair(
    "fp32 predicate",
    "predicate-dtype",
    lambda d: nisa.tensor_copy_predicated(sb(2, 4), sb(2, 4), sb(2, 4, dtype=d)),
    nl.float32,
    nl.uint8,
    "float32",
)
pair(
    "uint32 predicate of select_reduce",
    "predicate-dtype",
    lambda d: nisa.select_reduce(sb(2, 4), sb(2, 4, dtype=d), sb(2, 4), 0.0),
    nl.uint32,
    nl.int16,
    "uint32",
)
pair(
    "predicated copy converts",
    "dtype",
    lambda d: nisa.tensor_copy_predicated(sb(2, 4), sb(2, 4, dtype=d), sb(2, 4, dtype=nl.uint8)),
    nl.bfloat16,
    nl.float32,
    "bfloat16",
)
pair(
    "int32 selected and reduced",
    "dtype",
    lambda d: nisa.select_reduce(sb(2, 4), sb(2, 4, dtype=nl.uint8), sb(2, 4, dtype=d), 0.0),
    nl.int32,
    nl.bfloat16,
    "int32",
)


FP32_MIN = float(np.finfo(np.float32).min)


def ranged(op=nl.less, fill=FP32_MIN, start=0, bound=nl.float32, tile=nl.float32):
    bounds = sb(2, 1, dtype=bound), sb(2, 1)
    nisa.range_select(sb(2, 4), sb(2, 4, dtype=tile), op, nl.greater, *bounds, range_start=start, on_false_value=fill)


pair("range of another fill", "range-select", lambda f: ranged(fill=f), -1e9, FP32_MIN, "-1000000000.0")
pair("range beyond fp32", "range-select", lambda s: ranged(start=s), 2**24, 2**24 - 4, "2**24")
pair("range of unequal", "op", lambda o: ranged(op=o), nl.not_equal, nl.equal, "nl.not_equal")
pair("int32 bound", "column-dtype", lambda d: ranged(bound=d), nl.int32, nl.float32, "bound0")
pair("range of integers", "dtype", lambda d: ranged(tile=d), nl.int32, nl.bfloat16, "int32")


def affine(pattern=((1, 4),), op=nl.less, value=0.0, buffer=sb):
    nisa.affine_select(sb(2, 4), pattern, 1, buffer(2, 4), value, op)


pair("affine selection from PSUM", "buffer", lambda b: affine(buffer=b), ps, sb, "psum")
pair("affine selection by addition", "op", lambda o: affine(op=o), nl.add, nl.not_equal, "nl.add")
pair("affine selection of text", "immediate", lambda v: affine(value=v), "0", 0.0, "str")
pair("affine pattern too short", "elements-differ", lambda p: affine(p), ((1, 3),), ((2, 4),), "3 values")
pair("max8 of 7", "search-size", lambda n: nisa.max8(sb(2, 8), sb(2, n)), 7, 8, "7 elements")
pair("max8 into 7", "elements-differ", lambda n: nisa.max8(sb(2, n), sb(2, 9)), 7, 8, "7 elements")


def found(dtype=nl.uint32, values=8, partitions=2):
    nisa.nc_find_index8(sb(2, 8, dtype=dtype), sb(2, 9), sb(partitions, values))


pair("int32 places", "dtype", lambda d: found(dtype=d), nl.int32, nl.uint16, "int32")
pair("seven values", "elements-differ", lambda n: found(values=n), 7, 8, "7 elements")
pair("values of other partitions", "partitions-differ", lambda n: found(partitions=n), 3, 2, "3 partitions")
pair(
    "replaced by text",
    "immediate",
    lambda v: nisa.nc_match_replace8(sb(2, 9), sb(2, 9), sb(2, 8), v),
    "-inf",
    float("-inf"),
    "str",
)
pair(
    "no room for the count",
    "elements-differ",
    lambda n: nisa.nonzero_with_count(sb(16, n, dtype=nl.int32), sb(16, 4)),
    4,
    5,
    "one more",
)
pair(
    "places as floats",
    "dtype",
    lambda d: nisa.nonzero_with_count(sb(16, 5, dtype=d), sb(16, 4)),
    nl.float32,
    nl.int32,
    "float32",
)

# -- shuffles and gathers -------------------------------------------------------------------------------
pair(
    "mask of 31",
    "shuffle-mask",
    lambda n: nisa.nc_stream_shuffle(sb(32, 2), sb(32, 2), [0] * n),
    31,
    32,
    "32 partitions",
)
pair(
    "mask of partition 32",
    "shuffle-mask",
    lambda p: nisa.nc_stream_shuffle(sb(32, 2), sb(32, 2), [p] * 32),
    32,
    255,
    "partition 32",
)
pair(
    "mask beyond src",
    "shuffle-mask",
    lambda p: nisa.nc_stream_shuffle(sb(32, 2), sb(1, 2), [p] * 32),
    1,
    0,
    "which has 1",
)
pair(
    "shuffle of 64 from 32",
    "start-partition",
    lambda p: nisa.nc_stream_shuffle(sb(128, 2)[p : p + 32], sb(64, 2), [0] * 32),
    32,
    64,
    "multiple of 64",
)
pair(
    "gather by int32",
    "index-operand",
    lambda d: nisa.nc_n_gather(sb(2, 3), sb(2, 8), filled(0, 2, 3, dtype=d)),
    nl.int32,
    nl.uint32,
    "int32",
)
pair(
    "gather outside a partition",
    "indirect-range",
    lambda i: nisa.nc_n_gather(sb(2, 3), sb(2, 8), filled(i, 2, 3, dtype=nl.uint32)),
    8,
    7,
    "index 8",
)


def local(index=nl.uint16, partitions=16, elements=1, valid=None, size=32):
    ids = filled(0, partitions, 2, dtype=index)
    nisa.local_gather(sb(partitions, size), sb(partitions, 64), ids, elements, valid)


pair("local gather by uint32", "index-operand", lambda d: local(index=d), nl.uint32, nl.uint16, "uint32")
pair("local gather of 8 partitions", "local-gather", lambda p: local(partitions=p), 8, 16, "got 8")
pair("local gather of 3 elements", "local-gather", lambda n: local(elements=n[0], size=n[1]), (3, 96), (2, 64), "not 3")
pair("local gather of 33 indices", "local-gather", lambda n: local(valid=n, size=n), 33, 32, "33 indices")
pair("local gather into too little", "elements-differ", lambda n: local(size=n), 31, 32, "dst has 31")

# -- more DMA -------------------------------------------------------------------------------------------
pair("transpose by other axes", "transpose-axes", lambda a: nisa.dma_transpose(sb(4, 3), hbm(3, 4), a), (0, 1), (1, 0))
case(
    "transpose of lower rank",
    "transpose-shape",
    lambda: nisa.dma_transpose(sb(4, 3), hbm(3, 1, 4)),
    lambda: nisa.dma_transpose(sb(4, 1, 3), hbm(3, 1, 4)),
    "(4, 1, 3)",
)
pair(
    "DMA transposes bytes",
    "dtype",
    lambda d: nisa.dma_transpose(sb(4, 3, dtype=d), hbm(3, 4, dtype=d)),
    nl.uint8,
    nl.uint16,
    "uint8",
)
pair(
    "hwdge transposes 15 rows",
    "transpose-hwdge",
    lambda n: nisa.dma_transpose(
        sb(8, n, dtype=nl.bfloat16), hbm(n, 8, dtype=nl.bfloat16), dge_mode=nisa.dge_mode.hwdge
    ),
    15,
    16,
    "(15, 8)",
)


def gather_transposed(dtype=nl.bfloat16, index=nl.uint32, rows=16, count=16, mode=nisa.dge_mode.swdge):
    at = filled(0, rows, 1, dtype=index)
    table = hbm(20, 8, dtype=dtype)
    src = table.ap([[8, count], [1, 8]], vector_offset=at)
    nisa.dma_transpose(sb(8, count, dtype=dtype), src, dge_mode=mode)


pair(
    "software transposes without indices",
    "dge-mode",
    lambda m: nisa.dma_transpose(sb(8, 16, dtype=nl.bfloat16), hbm(16, 8, dtype=nl.bfloat16), dge_mode=m),
    nisa.dge_mode.swdge,
    nisa.dge_mode.none,
    "swdge",
)
pair("gather transposes fp32", "transpose-gather", lambda d: gather_transposed(d), nl.float32, nl.float16, "2 bytes")
pair("gather transposes by int32", "transpose-gather", lambda d: gather_transposed(index=d), nl.int32, nl.uint32)
pair("gather transposes 8 rows", "transpose-gather", lambda n: gather_transposed(count=n), 8, 16, "multiple of 16")
pair(
    "gather transposes in hardware",
    "dge-mode",
    lambda m: gather_transposed(mode=m),
    nisa.dge_mode.hwdge,
    nisa.dge_mode.unknown,
    "hwdge",
)


def added(op=nl.add, scales=None, count=2):
    nisa.dma_compute(sb(2, 4), [sb(2, 4) for _ in range(count)], op, scales)


pair("DMA multiplies", "dma-compute", lambda o: added(op=o), nl.multiply, nl.add, "nl.multiply")
pair("DMA scales", "dma-compute", lambda s: added(scales=s), (1.0, 2.0), (1.0, 1.0), "2.0")
pair("DMA adds 17", "dma-compute", lambda n: added(count=n), 17, 16, "16")


def scatter_added(index=(0, 1), unique=True):
    at = sb(2, 1, dtype=nl.int32)
    for p, row in enumerate(index):
        nisa.memset(at[0:1] if p == 0 else at, row) if p == 0 or row == index[0] else nisa.iota(at, [[0, 1]], 0, 1)
    rows = hbm(4, 8).ap([[8, 2], [1, 8]], vector_offset=at)
    nisa.dma_compute(rows, [rows, sb(2, 8)], nl.add, unique_indices=unique)


pair("DMA adds to one row twice", "scatter-unique", lambda i: scatter_added(i), (0, 0), (0, 1), "equal")
pair("DMA adds to rows that repeat", "dma-compute", lambda u: scatter_added(unique=u), False, True, "unique_indices")

# -- views ----------------------------------------------------------------------------------------------
case("partitions permuted", "view", lambda: sb(4, 2, 3).permute((1, 0, 2)), lambda: sb(4, 2, 3).permute((0, 2, 1)))
pair("broadcast of two", "view", lambda n: sb(4, n).broadcast(1, 3), 2, 1, "must be 1")
pair("no such dimension to select", "view", lambda d: hbm(4, 2).select(d, 0), 2, 1, "dimension 2")
pair("dimension of two squeezed", "view", lambda n: sb(4, n, 3).squeeze_dim(1), 2, 1, "must be 1")
pair("dimension split unevenly", "view", lambda n: sb(4, n).reshape_dim(1, (4, -1)), 6, 8, "(4, -1)")
case(
    "holes flattened",
    "view",
    lambda: sb(4, 2, 4)[:, :, 0:2].flatten_dims(1, 2),
    lambda: sb(4, 2, 4)[:, 0:2].flatten_dims(1, 2),
    "not one run",
)
pair("names that differ", "view", lambda n: sb(4, 6).rearrange(("p", "f"), ("p", n)), "g", "f", "rearrange")
pair("view of a half", "view", lambda n: sb(4, n, dtype=nl.bfloat16).view(nl.float32), 3, 4, "3 elements")
pair("partition expanded", "view", lambda d: sb(4, 2).expand_dim(d), 0, 1, "expand_dim 0")

# -- what nothing wrote ---------------------------------------------------------------------------------


def summed_up(fill=slice(0, 4)):
    tile = sb(2, 4)
    nisa.memset(tile[:, fill], 1.0)
    nisa.tensor_reduce(sb(2, 1), nl.add, tile, axis=1)


def computed_on(used=slice(0, 2)):
    tile, other = sb(2, 4), sb(2, 4)
    nisa.memset(tile[:, 0:2], 1.0)
    nisa.tensor_scalar(other, tile, nl.add, 1.0)
    nisa.tensor_copy(tile, other)
    nisa.tensor_reduce(sb(2, 1), nl.add, tile[:, used], axis=1)


def multiplied(rows=slice(0, 8)):
    tile = sb(8, 4)
    nisa.memset(tile if rows == slice(0, 8) else tile[rows], 1.0)
    nisa.nc_matmul(ps(4, 4), tile, filled(1.0, 8, 4))


pair("part of a tile read", "never-written", summed_up, slice(0, 3), slice(0, 4), "2 of 8", "(0, 3)")
pair(
    "unwritten part carried on", "never-written", computed_on, slice(0, 3), slice(0, 2), "2 of 6", "unwritten elements"
)
pair("unwritten rows contracted", "never-written", multiplied, slice(0, 4), slice(0, 8), "16 of 32")


def gathered_on_chip(gather, used):
    """Of a tile of which one half is written, and so one half of what is gathered; indices count 0, 1, 2, ..."""
    tile, got = sb(16, 4), sb(16, 4)
    nisa.memset(tile[:, 0:2], 1.0)
    if gather is nisa.nc_n_gather:
        ids = sb(16, 4, dtype=nl.uint32)
        nisa.iota(ids, [[1, 4]])
        gather(got, tile, ids)
    else:  # four indices of a group, down the partitions
        ids = sb(16, 1, dtype=nl.uint16)
        nisa.iota(ids, [[0, 1]], channel_multiplier=1)
        gather(got, tile, ids, num_valid_indices=4)
    nisa.tensor_reduce(sb(16, 1), nl.add, got[:, used], axis=1)


for gather in (nisa.nc_n_gather, nisa.local_gather):
    pair(
        f"{gather.__name__} of what nothing wrote",
        "never-written",
        lambda used, gather=gather: gathered_on_chip(gather, used),
        slice(0, 3),
        slice(0, 2),
        "unwritten elements",
    )
case(
    "index that nothing wrote",
    "never-written",
    lambda: nisa.dma_copy(sb(1, 4), shared(4, 4).ap([[4, 1], [1, 4]], scalar_offset=sb(1, 1, dtype=nl.int32))),
    lambda: nisa.dma_copy(sb(1, 4), shared(4, 4).ap([[4, 1], [1, 4]], scalar_offset=filled(0, 1, 1, dtype=nl.int32))),
    "nothing has written it",
)
case(
    "gather of a row that nothing wrote",
    "never-written",
    lambda: nisa.dma_copy(sb(2, 4), hbm(4, 4).ap([[4, 2], [1, 4]], vector_offset=filled(1, 2, 1, dtype=nl.int32))),
    lambda: nisa.dma_copy(sb(2, 4), shared(4, 4).ap([[4, 2], [1, 4]], vector_offset=filled(1, 2, 1, dtype=nl.int32))),
    "nothing has written it",
)

# -- launches -------------------------------------------------------------------------------------------
pair("second axis", "program-axis", lambda a: (nl.program_id(a), nl.num_programs(a)), 1, 0, "axis 1")
case(
    "simulate inside a kernel",
    "no-kernel",
    lambda: run(lambda: None),
    lambda: nki.jit(lambda: None)(),
    "inside a kernel",
)
pair("kernel on two cores inside one", "lnc", lambda n: nki.jit(lambda: None)[n](), 2, 1, "[2]", "1 cores")
case("three cores", "lnc", lambda: nki.jit(lambda: None)[3], lambda: nki.jit(lambda: None)[2], "3")
pair("cores as float", "integer", lambda n: nki.jit(lambda: None)[n], 2.0, 2, "2.0")


@pytest.mark.parametrize("name", CASES)
def test_wrong_kernel_is_refused_and_its_twin_accepted(refused, name):
    rule, wrong, right, says = CASES[name]
    # Most of these kernels read tiles that they never fill.
    with emulator.unchecked() if rule == "never-written" else emulator.unchecked("never-written"):
        refused(rule, wrong, says=says)
        run(lambda: [right()].clear())


# -- rules that need arguments, results or two cores ----------------------------------------------------


def _copy(x):
    out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    nisa.dma_copy(out, x)
    return out


def _write(x):
    nisa.dma_copy(x, filled(0.0, *x.shape))


def _unequal_shapes():
    nl.ndarray((2 + nl.program_id(), 2), nl.float32, nl.shared_hbm)


def _unequal_counts():
    for _ in range(1 + nl.program_id()):
        nl.ndarray((2, 2), nl.float32, nl.shared_hbm)


def _equal():
    nl.ndarray((2, 2), nl.float32, nl.shared_hbm)


def _outside():
    return nl.ndarray((2, 2), nl.float32)


def _imprecise(body):
    os.environ["NKI_PRECISE_FP"] = "0"
    try:
        run(lambda: [body()].clear())
    finally:
        os.environ.pop("NKI_PRECISE_FP")
        run(_equal)


def _with_target(name):
    before = os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE")
    os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"] = name
    try:
        run(_equal)
    finally:
        os.environ.pop("NEURON_PLATFORM_TARGET_OVERRIDE")
        if before is not None:
            os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"] = before


def _partly(rows):
    out = nl.ndarray((2, 3), nl.float32, nl.shared_hbm)
    nisa.dma_copy(out[0:rows], filled(1.0, 2, 3)[0:rows])
    return out


def _unequal_constants():
    nl.shared_constant(np.full((2, 2), nl.program_id(), np.float32))


def _equal_constants():
    nl.shared_constant(np.ones((2, 2), np.float32))


def _meet(first=lambda: None, second=lambda: None):
    """What each core does; the first of them runs first."""

    def kernel():
        tile = filled(1.0, 2, 2)
        (second if nl.program_id() else first)()
        return [tile].clear()

    return kernel


def _barrier(cores=(0, 1), data=None):
    nisa.core_barrier(shared_hbm() if data is None else data(), cores)


def shared_hbm():
    return nl.ndarray((2, 2), nl.float32, nl.shared_hbm)


def _exchange(to=None, pipe=0, shape=(16, 2), engine=nisa.dma_engine.dma, dtype=nl.float32):
    other = 1 - nl.program_id() if to is None else to
    nisa.sendrecv(filled(1.0, *shape, dtype=dtype), sb(*shape, dtype=dtype), other, other, pipe, engine)


def _both(body):
    return _meet(body, body)


def _loop(inside):
    with nl.no_reorder():
        if inside:
            nl.fori_loop(0, 2, lambda i: None)
    if not inside:
        nl.fori_loop(0, 2, lambda i: None)


def _race(writes, barrier=False, read=None):
    """Core c writes rows writes[c]; then it may read rows read[c]."""

    def kernel():
        out = nl.ndarray((8, 4), nl.float32, nl.shared_hbm)
        core = nl.program_id()
        rows = writes[core]
        nisa.dma_copy(out[rows], filled(float(core), 8, 4)[0 : rows.stop - rows.start])
        if barrier:
            nisa.core_barrier(out, (0, 1))
        if read is not None:
            nisa.dma_copy(sb(8, 4)[0 : read[core].stop - read[core].start], out[read[core]])

    return kernel


HALVES = (slice(0, 4), slice(4, 8))
OVERLAP = (slice(0, 5), slice(4, 8))
# name: (rule, wrong call, right call); here the calls launch.
LAUNCHES = {
    "writes a read-only argument": ("read-only", lambda: run(_write, FROZEN), lambda: run(_write, ONES.copy())),
    "big-endian argument": ("argument", lambda: run(_copy, ONES.astype(">f4")), lambda: run(_copy, ONES.astype("=f4"))),
    "float64 argument": ("dtype", lambda: run(_copy, np.ones(2)), lambda: run(_copy, np.ones(2, np.float32))),
    "int64 argument": ("dtype", lambda: run(_copy, np.arange(2)), lambda: run(_copy, np.arange(2, dtype=np.int32))),
    "returns SBUF": ("output", lambda: run(lambda: sb(2, 2)), lambda: run(_copy, ONES)),
    "returns private HBM": ("output", lambda: run(lambda: hbm(2, 2)), lambda: run(_copy, ONES)),
    "returns a number": ("output", lambda: run(lambda: 3), lambda: run(lambda: None)),
    "cores allocate other shapes": ("shared-hbm", lambda: run(_unequal_shapes, lnc=2), lambda: run(_equal, lnc=2)),
    "cores allocate other numbers": ("shared-hbm", lambda: run(_unequal_counts, lnc=2), lambda: run(_equal, lnc=2)),
    "outside a kernel": ("no-kernel", _outside, lambda: run(lambda: [_outside()].clear())),
    "kernel called without a device": ("no-device", lambda: nki.jit(_equal)(), lambda: run(_equal)),
    "output written in part": ("output-unwritten", lambda: run(_partly, 1), lambda: run(_partly, 2)),
    "constants of the cores differ": (
        "shared-constant",
        lambda: run(_unequal_constants, lnc=2),
        lambda: run(_equal_constants, lnc=2),
    ),
    "barrier on one core": (
        "core-meeting",
        lambda: run(_meet(_barrier, shared_hbm), lnc=2),
        lambda: run(_both(_barrier), lnc=2),
    ),
    "barrier on the other core": (
        "core-meeting",
        lambda: run(_meet(shared_hbm, _barrier), lnc=2),
        lambda: run(_both(_barrier), lnc=2),
    ),
    "pipes differ": (
        "core-meeting",
        lambda: run(_both(lambda: _exchange(pipe=nl.program_id())), lnc=2),
        lambda: run(_both(_exchange), lnc=2),
    ),
    "barrier of a core that is not there": (
        "barrier-cores",
        lambda: run(_barrier),
        lambda: run(lambda: _barrier(0)),
    ),
    "barrier of one core of two": (
        "barrier-cores",
        lambda: run(_both(lambda: _barrier((0,))), lnc=2),
        lambda: run(_both(lambda: _barrier([0, 1])), lnc=2),
    ),
    "barrier over private memory": (
        "buffer",
        lambda: run(_both(lambda: _barrier(data=lambda: hbm(2, 2))), lnc=2),
        lambda: run(_both(_barrier), lnc=2),
    ),
    "exchange on one core": ("lnc", lambda: run(_exchange), lambda: run(_both(_exchange), lnc=2)),
    "exchange with itself": (
        "sendrecv-rank",
        lambda: run(_both(lambda: _exchange(to=nl.program_id())), lnc=2),
        lambda: run(_both(_exchange), lnc=2),
    ),
    "exchange of 1028 bytes by GpSimd": (
        "sendrecv-size",
        lambda: run(_both(lambda: _exchange(shape=(16, 257), engine=nisa.dma_engine.gpsimd_dma)), lnc=2),
        lambda: run(_both(lambda: _exchange(shape=(16, 256), engine=nisa.dma_engine.gpsimd_dma)), lnc=2),
    ),
    "loop in no_reorder": ("loop-no-reorder", lambda: run(lambda: _loop(True)), lambda: run(lambda: _loop(False))),
    "cores write the same": ("core-race", lambda: run(_race(OVERLAP), lnc=2), lambda: run(_race(HALVES), lnc=2)),
    "core reads what the other writes": (
        "core-race",
        lambda: run(_race(HALVES, read=HALVES[::-1]), lnc=2),
        lambda: run(_race(HALVES, read=HALVES[::-1], barrier=True), lnc=2),
    ),
    "bytes of floats stored as fp32": (
        "precise-fp",
        lambda: _imprecise(lambda: sb(2, 4, dtype=nl.bfloat16).view(nl.int16)),
        lambda: _imprecise(lambda: sb(2, 4, dtype=nl.float32).view(nl.int16)),
    ),
    "floats steer a shape-only run": ("shape-only", lambda: _steered(nl.float32), lambda: _steered(nl.int32)),
    "unknown target": ("target", lambda: _with_target("trn9"), lambda: _with_target("trn2")),
}


def _steered(dtype):
    def kernel():
        counts, total = filled(1, 1, 3, dtype=dtype), sb(1, 1, dtype=nl.int32)
        nisa.tensor_reduce(total, nl.add, counts, axis=1)
        nl.fori_loop(0, nisa.register_alloc(total), lambda i: nisa.memset(sb(1, 1), 0.0))

    emulator.profile(kernel, shape_only=True)()


@pytest.mark.parametrize("name", LAUNCHES)
def test_wrong_launch_is_refused_and_its_twin_accepted(name):
    rule, wrong, right = LAUNCHES[name]
    with pytest.raises(emulator.NKIError) as caught:
        wrong()
    assert caught.value.rule == rule, str(caught.value)
    right()


# -- the table and the text -----------------------------------------------------------------------------


def first_arguments(function, folder):
    """The rules of all calls ``function("rule", ...)`` in the source files of a folder."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == function:
                yield f"{path.name}:{node.lineno}", node.args[0]


def test_every_rule_has_a_negative_test():
    rules = set()
    for where, rule in first_arguments("NKIError", Path(emulator.__file__).parent):
        assert isinstance(rule, ast.Constant), f"{where}: the rule is not a literal"
        rules.add(rule.value)
    in_tables = {rule for rule, *_ in [*CASES.values(), *LAUNCHES.values()]}
    elsewhere = {
        rule.value for _, rule in first_arguments("refused", Path(__file__).parent) if isinstance(rule, ast.Constant)
    }
    assert in_tables <= rules and elsewhere <= rules
    assert rules <= in_tables | elsewhere, f"no negative test: {sorted(rules - in_tables - elsewhere)}"


def test_the_table_in_the_docs_is_the_one_of_the_source():
    file = Path(emulator.__file__).parents[1] / "docs" / "emulator-rules.md"
    assert set(rules.messages()) == set(rules.RULES), "emulator/rules.py says nothing of a rule, or too much"
    assert len(rules.RULES) >= 60
    assert file.read_text() == rules.table(), "python -m trn_kernels.emulator rules > docs/emulator-rules.md"


def test_the_error_names_line_instruction_value_limit_and_rule():
    def kernel():
        tile = sb(128, 4)
        nisa.memset(tile[16:48], 0.0)

    with pytest.raises(emulator.NKIError) as caught:
        nki.simulate(kernel)()
    error = caught.value
    line = kernel.__code__.co_firstlineno + 2
    assert error.instruction == "memset" and error.location == f"{__file__}:{line}"
    assert str(error) == (
        f"{__file__}:{line}: nisa.memset: dst has 32 partitions from 16; more than 64 start at 0, 33 to 64 at 0 or "
        "64, up to 32 at a multiple of 32 [start-partition]"
    )


def test_every_instruction_is_in_the_table_with_its_page():
    assert {"dma_copy", "memset", "nc_matmul"} < set(emulator.INSTRUCTIONS)
    for name, entry in emulator.INSTRUCTIONS.items():
        assert getattr(nisa, name).__wrapped__ is entry.execute
        assert entry.page.endswith(f"nki.isa.{name}.html")


def test_a_type_error_of_the_kernel_itself_stays_a_type_error():
    with pytest.raises(TypeError, match="unsupported operand"):
        nki.simulate(lambda: nisa.memset(sb(2, 2), 1 + "1"))()


def test_an_error_of_python_in_a_check_is_the_cause_and_one_after_the_checks_stays():
    @table.instruction(lambda dst, value: int(value))
    def stops(dst, value):
        return 1 + "1"

    del emulator.INSTRUCTIONS["stops"]
    with pytest.raises(emulator.NKIError, match=r"nisa\.stops: .*invalid literal.*\[signature\]") as caught:
        nki.simulate(lambda: stops(sb(2, 2), "x"))()
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(TypeError, match="unsupported operand"):
        nki.simulate(lambda: stops(sb(2, 2), 1))()


def test_bf16_is_a_dtype_by_any_name():
    def kernel():
        for dtype in ("bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16), nl.bfloat16):
            assert sb(2, 2, dtype=dtype).dtype == nl.bfloat16 == "bfloat16"
        assert sb(2, 2, dtype="float8e4").dtype == nl.float8_e4m3

    nki.simulate(kernel)()
