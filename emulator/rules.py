"""What every rule of the emulator says, where it comes from and since when; and what is not modelled.

``python -m trn_kernels.emulator rules`` prints ``docs/emulator-rules.md`` from this and from the messages in the
source; a test compares the two, and demands an entry here and a wrong kernel in the tests for every rule.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

# Pages of the Neuron documentation, below nki/.
_APS = "deep-dives/nki-aps"
_ARCH = "guides/architecture/trainium2_arch"
_TILING = "get-started/about/tiling-overview"
_INDEX = "get-started/about/indexing-overview"
_LNC = "get-started/about/lnc"
_LOOPS = "deep-dives/nki-dynamic-loops"
_NOTES = "release notes"
_SHARED = "api/nki.api.shared"
_SIM = "guides/nki_simulator"
_GUIDE = "get-started/nki-language-guide"
_OURS = "this emulator"

# rule: (what it demands, source, first NKI version that says so; "-" for rules of the hardware or of the emulator).
RULES: dict[str, tuple[str, str, str]] = {
    "accumulate": ("accumulate is None, True or False, and not True for a transpose", "isa.nc_matmul", "0.3"),
    "accumulate-foreign": ("a matmul adds to what matmuls wrote only", "isa.nc_matmul", "0.3"),
    "accumulate-mixed": ("one matmul adds to all of its destination or overwrites all", "isa.nc_matmul", "-"),
    "accumulate-unset": ("a sum in PSUM starts with a matmul that overwrites", "isa.nc_matmul", "0.3"),
    "accumulator-unset": ("reduction registers are set before they are continued or read", "isa.activation", "-"),
    "address": ("an address is (partition, byte) on the chip", "language.ndarray", "0.2"),
    "address-overlap": ("of tensors whose addresses share bytes, one at a time holds a value", "language.ndarray", "-"),
    "alias": ("in place means the same elements in the same order", _APS, "-"),
    "ap": ("an access pattern stays in its tensor and steps over whole partitions", _APS, "0.2"),
    "ap-dtype": ("dtype= divides the bytes of a partition", _APS, "0.2"),
    "ap-offset": ("an explicit offset needs a view that starts at 0: the documents disagree on others", _APS, "0.2"),
    "argument": ("arguments are CPU arrays in native byte order, of dtypes both sides have", _SIM, "0.3"),
    "barrier-cores": ("a barrier names all cores of the launch", "isa.core_barrier", "0.2"),
    "bitvec-dtype": ("bit operators act on integers of one width", _SHARED, "0.2"),
    "bn-aggr": ("bn_aggr reads triples", "isa.bn_aggr", "0.2"),
    "bn-stats": ("bn_stats reads up to 512 elements per partition", "isa.bn_stats", "0.2"),
    "both-psum": ("two operands are not both in PSUM", "isa.tensor_tensor", "0.2"),
    "buffer": ("each operand is in a memory that the engine reaches", _ARCH, "0.3"),
    "capacity": ("the values that live at a time fit the usable bytes of a partition", _ARCH, "-"),
    "column": ("a scalar operand is a number or one element per partition", "isa.tensor_scalar", "0.2"),
    "column-dtype": ("a tile as scalar operand is fp32 where the engine demands it", "isa.tensor_scalar", "0.2"),
    "core-meeting": ("cores meet at the same barriers and exchanges", "isa.core_barrier", "0.2"),
    "core-race": ("cores do not touch what the other writes without meeting in between", _LNC, "-"),
    "dge-mode": ("the descriptor mode can do what the transfer needs", "isa.dma_copy", "0.2"),
    "dma-compute": ("a DMA adds up to 16 sources, unscaled; by index exactly two", "isa.dma_compute", "0.3"),
    "double-row": ("double_row contracts [K, 2, free] of float8 without column tiles", "isa.nc_matmul", "0.2"),
    "dst-overlap": ("a destination names no element twice", _APS, "-"),
    "dtype": ("the dtypes exist on the target and suit the instruction", _SHARED, "0.2"),
    "elements-differ": ("operands have equal numbers of elements; nothing broadcasts", _TILING, "0.2"),
    "engine": ("the engine can run the instruction", "isa.engine", "0.3"),
    "free-dims": ("an access pattern has up to 4 free dimensions", _APS, "-"),
    "free-size": (
        "an instruction covers up to 64 K elements per partition of SBUF, 4 K of PSUM",
        _ARCH,
        "-",
    ),
    "gpsimd-psum": ("GpSimd does not reach PSUM", _ARCH, "-"),
    "immediate": ("a constant is a number that the dtype holds", "isa.memset", "0.3"),
    "index": ("an index or slice stays in its tensor", _INDEX, "0.2"),
    "index-operand": ("run-time indices are integers in SBUF of the documented width", _APS, "0.2"),
    "indirect": ("run-time addressing is used where and how it exists", _APS, "0.2"),
    "indirect-range": ("a run-time index is inside, unless oob_mode.skip", "isa.dma_copy", "0.2"),
    "int-power": ("an integer power has no negative exponent", _OURS, "-"),
    "integer": ("sizes, offsets and ranks are integers", _GUIDE, "0.2"),
    "iota": ("a pattern has 1 to 4 [step, count] and its values fit int32", "isa.iota", "0.2"),
    "lnc": ("a launch has 1 or 2 cores, and what needs two has two", _LNC, "0.2"),
    "local-gather": ("16 partitions per group, up to 4096 indices, 1 to 32 elements each", "isa.local_gather", "0.2"),
    "loop-body": ("the body of a device loop returns what the loop takes", _LOOPS, "0.6"),
    "loop-bound": ("loop bounds are ints or registers", _LOOPS, "0.2"),
    "loop-divergence": ("both cores run every device loop equally often", _LOOPS, "-"),
    "loop-no-reorder": ("no device loop inside no_reorder", _LOOPS, "0.3"),
    "loop-step": ("the step of a device loop is a positive int", _LOOPS, "0.2"),
    "matmul-contraction": ("stationary and moving have equal partitions", "isa.nc_matmul", "0.2"),
    "matmul-identity": ("a transpose has the identity as moving operand", "isa.nc_matmul", "0.2"),
    "matmul-moving": ("moving has up to 512 free elements", "isa.nc_matmul", "0.2"),
    "matmul-onezero": ("what is said to hold 0 and 1 holds nothing else", "isa.nc_matmul", "0.3"),
    "matmul-shape": ("the result is [stationary free, moving free]", "isa.nc_matmul", "0.2"),
    "matmul-stationary": ("stationary has up to 128 free elements, or the columns of its tile", "isa.nc_matmul", "0.2"),
    "matmul-tile": ("tiles of the array are 32, 64 or 128, at multiples, on their partitions", "isa.nc_matmul", "0.2"),
    "never-written": ("what nothing wrote may be moved and computed along, not used", _SIM, "-"),
    "no-device": ("a kernel runs in nki.simulate, or with NKI_SIMULATOR=1", _SIM, "0.3"),
    "no-kernel": ("NKI calls belong in a kernel that runs, and kernels do not nest launches", _GUIDE, "0.2"),
    "not-implemented": ("the emulator lacks this name, and says so", _OURS, "-"),
    "not-supported": ("documented as not supported yet", "isa.tensor_scalar_reduce", "0.3"),
    "on-chip-rank": ("on-chip tensors have at least 2 dimensions", _INDEX, "0.2"),
    "oob-mode": ("oob_mode is a member of its enumeration", _NOTES, "0.3"),
    "op": ("the operator exists for the instruction", _SHARED, "0.2"),
    "operand": ("operands are tensors or registers", _GUIDE, "0.2"),
    "output": ("a kernel returns tensors in shared HBM", _NOTES, "0.3"),
    "output-unwritten": ("every element of an output is written", _SIM, "-"),
    "partition-limit": ("a tensor has up to 128 partitions", _ARCH, "0.6"),
    "partition-step": ("the partitions of a view are a range", _APS, "-"),
    "partitions-differ": ("operands have equal partitions", _TILING, "0.2"),
    "perf-mode": ("perf_mode is a member of its enumeration", "isa.nc_matmul", "0.2"),
    "precise-fp": ("no bytes are reinterpreted while floats are stored as fp32 (NKI_PRECISE_FP=0)", _SIM, "0.4"),
    "predicate-dtype": ("predicates are integers of the documented widths", "isa.tensor_copy_predicated", "0.2"),
    "program-axis": ("the launch grid has one axis", _LNC, "0.2"),
    "psum-alignment": ("the Tensor engine writes PSUM at multiples of 4 bytes", "compiler", "-"),
    "psum-bank": ("a result of the Tensor engine stays in one bank of 2 KiB", "isa.nc_matmul", "0.2"),
    "psum-loop": ("PSUM carries nothing from one iteration of a device loop to the next", _LOOPS, "0.2"),
    "range-select": ("the fill is the lowest fp32, indices are exact in fp32", "isa.range_select", "0.3"),
    "read-only": ("a read-only argument is not written", _OURS, "-"),
    "reduce-axis": ("a reduction is over the last free dimensions", "isa.tensor_reduce", "0.3"),
    "reduce-cmd": ("the instruction has this reduce_cmd, with what it needs", "isa.activation", "0.2"),
    "register-element": ("a register loads and stores one 32-bit integer", "isa.register_load", "0.2"),
    "register-frozen": ("the index of a device loop is not written", _LOOPS, "0.2"),
    "register-range": ("a register holds 32 bits", _ARCH, "-"),
    "register-unset": ("a register is written before it is read", "isa.register_alloc", "0.2"),
    "register-value": ("the value of a register steers no Python but `while register:`", _LOOPS, "0.2"),
    "reshape": ("a reshape keeps elements, partitions and contiguity", "language.NkiTensor", "0.5"),
    "scatter-unique": ("indices of a scatter that adds are unique", "isa.dma_compute", "0.3"),
    "search-size": ("searches read 8 to 16384 elements per partition", "isa.max8", "0.2"),
    "sendrecv-rank": ("sendrecv names the other core", "isa.sendrecv", "0.2"),
    "sendrecv-size": ("gpsimd_dma moves little, of a multiple of 16 partitions", "isa.sendrecv", "0.3"),
    "shape": ("a shape is a tuple of sizes", _GUIDE, "0.2"),
    "shape-only": ("in a shape-only profile no integer made of floats steers a loop", _OURS, "-"),
    "shared-constant": ("a shared constant is the same on both cores", "language.shared_constant", "0.3"),
    "shared-hbm": ("both cores allocate the same tensors in shared HBM", _LNC, "0.2"),
    "shift": ("a shift is less than the width", _OURS, "-"),
    "shuffle-mask": ("a mask has 32 partitions that src has, or 255", "isa.nc_stream_shuffle", "0.2"),
    "signature": ("the arguments fit the instruction", "isa", "0.3"),
    "start-partition": ("more than 64 partitions start at 0, 33 to 64 at 0 or 64, up to 32 at 32 k", _APS, "-"),
    "stride": ("a step of a free dimension fits int16", _APS, "-"),
    "target": ("the target has this feature; trn2 is the one there is", _ARCH, "-"),
    "tensor-value": ("the elements of a tensor steer no Python; only instructions compute with them", _GUIDE, "0.2"),
    "transpose-axes": ("a DMA transposes by (1, 0), (2, 1, 0) or (3, 1, 2, 0)", "isa.dma_transpose", "0.3"),
    "transpose-gather": ("limits of the transpose with indices", "isa.dma_transpose", "0.4"),
    "transpose-hwdge": ("limits of the transpose by the DGE hardware", "isa.dma_transpose", "0.6"),
    "transpose-shape": ("dst has the transposed shape, with its rank", "isa.dma_transpose", "0.4"),
    "transpose-size": ("PE transposes up to 128 x 128, Vector 32 x 32", "isa.nc_transpose", "0.2"),
    "view": ("a view exists without a copy and leaves the partitions alone", "language.NkiTensor", "0.5"),
}

NOT_MODELLED = """\
- Time: what an instruction costs is a model (see `emulator/cost.py`), and the engines run one after the other.
- Order within a core: the compiler orders instructions by their data; here the program's order always holds. Two
  cores are ordered by `core_barrier` and `sendrecv` for everything, on the device only for what depends on them.
- The truth of a tensor: `if x:` asks whether there is one, and is refused of a single element picked out of a tile.
- The Python in the body of a device loop: the compiler runs it once, here every iteration does. A body that counts
  in a Python variable, or a tile that is read after the loop in which it was allocated, differs on the device.
- Races that leave equal bits: cores that write the same values to the same elements are accepted.
- Placement in SBUF and PSUM: what lives at a time is added up, without alignment, gaps or banks, so that an allocator
  may need more than was counted here. Values are those of whole tensors, by the order of the program: the compiler
  may reorder and spill, so that a kernel that is a little above the limit here can fit there.
- Duplicate indices of a scatter by `dma_copy`: the last row stays; on the device the order is not defined.
- Approximations: activation functions are those of NumPy; sums have NumPy's order. Outside the documented input
  ranges of `log`, `sqrt`, `rsqrt`, `reciprocal` and `arctan` the device is undefined, here it is not.
- What fp32 beyond the range of fp8 becomes, and what NaN becomes as an integer (0 here), no document says.
- Stochastic rounding, targets other than trn2, `nki.collectives`, random numbers.
- The Python of a kernel: here all of Python runs. `python -m trn_kernels.emulator check` reads the source for
  what the compiler refuses.
"""

_HEAD = """\
# Rules of the emulator

Printed by `python -m trn_kernels.emulator rules`; a test compares it with the source. Sources are pages of the AWS
Neuron documentation below `nki/` (`isa.x` is `api/generated/nki.isa.x`); "since" is the first NKI version that
states the rule, "-" for one of the hardware or of the emulator. Every error reads
`file:line: nisa.instruction: message [rule]`; in the messages below `{}` stands for a value.
Every rule has a wrong kernel and its corrected twin in `tests/emulator`.

| rule | what it demands | source | since | messages |
|---|---|---|---|---|
"""


def messages() -> dict[str, list[str]]:
    """The shapes of the messages of every rule, from the calls of ``NKIError`` in the source."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in Path(__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "NKIError":
                found[node.args[0].value].add(_shape(node.args[1]))
    return {rule: sorted(found[rule]) for rule in sorted(found)}


def _shape(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_shape(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return _shape(node.left) + _shape(node.right)
    return "{}"


def table() -> str:
    """``docs/emulator-rules.md``."""
    rows = []
    for rule, shapes in messages().items():
        what, source, since = RULES[rule]
        text = "<br>".join(shape.replace("|", "\\|") for shape in shapes)
        rows.append(f"| `{rule}` | {what} | {source} | {since} | {text} |")
    return _HEAD + "\n".join(rows) + "\n\n## What is not modelled\n\n" + NOT_MODELLED
