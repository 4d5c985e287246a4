"""The cost model: constants, bytes worked out by hand, published measurements, schedule and shape-only runs."""

import json

import ml_dtypes
import numpy as np
import pytest
import torch

from trn_kernels import emulator

emulator.install()

import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

from trn_kernels.emulator import cost  # noqa: E402
from trn_kernels.kernels.grouped_experts import grouped_experts, grouped_experts_backward  # noqa: E402
from trn_kernels.kernels.rope import rope  # noqa: E402
from trn_kernels.ops.grouped_experts import routing_tables  # noqa: E402

BF16 = ml_dtypes.bfloat16


def sbuf(*shape, dtype=nl.bfloat16):
    return nl.ndarray(shape, dtype)


def psum(*shape, dtype=nl.float32):
    return nl.ndarray(shape, dtype, nl.psum)


def profile(kernel, *args):
    return emulator.profile(kernel, shape_only=True)(*args)


def only(kernel) -> cost.Cost:
    (event,) = profile(kernel).cores[0].events
    return event.cost


CYCLES = {
    # instruction: engine, cycles (docstrings of nki.isa in SDK 2.26)
    "tensor_tensor fp32 in SBUF": (
        lambda: nisa.tensor_tensor(*(sbuf(128, 512, dtype=nl.float32) for _ in range(3)), op=nl.add),
        "vector",
        1024,
    ),
    "tensor_tensor with one input in PSUM": (
        lambda: nisa.tensor_tensor(sbuf(128, 512), sbuf(128, 512), psum(128, 512), op=nl.add),
        "vector",
        512,
    ),
    "tensor_tensor bf16": (
        lambda: nisa.tensor_tensor(*(sbuf(128, 512) for _ in range(3)), op=nl.multiply),
        "vector",
        512,
    ),
    "tensor_tensor on GpSimd": (
        lambda: nisa.tensor_tensor(*(sbuf(128, 512) for _ in range(3)), op=nl.multiply, engine=nisa.gpsimd_engine),
        "gpsimd",
        1024,
    ),
    "a small one takes the issue interval": (lambda: nisa.memset(sbuf(128, 2), 1.0), "vector", 64),
    "tensor_copy fp32": (
        lambda: nisa.tensor_copy(sbuf(128, 512, dtype=nl.float32), sbuf(128, 512, dtype=nl.float32)),
        "vector",
        512,
    ),
    "tensor_copy bf16 in SBUF": (lambda: nisa.tensor_copy(sbuf(128, 512), sbuf(128, 512)), "vector", 128),
    "activation": (lambda: nisa.activation(sbuf(128, 512), nl.exp, sbuf(128, 512)), "scalar", 512),
    "iota": (lambda: nisa.iota(sbuf(128, 512, dtype=nl.int32), [[1, 512]]), "gpsimd", 662),
    "matmul bf16": (lambda: nisa.nc_matmul(psum(128, 512), sbuf(128, 128), sbuf(128, 512)), "tensor", 512),
    "matmul fp32": (
        lambda: nisa.nc_matmul(psum(128, 512), sbuf(128, 128, dtype=nl.float32), sbuf(128, 512, dtype=nl.float32)),
        "tensor",
        2048,
    ),
    "matmul fp32 by zeros and ones": (
        lambda: nisa.nc_matmul(
            psum(128, 512),
            sbuf(128, 128, dtype=nl.float32),
            sbuf(128, 512, dtype=nl.float32),
            is_stationary_onezero=True,
        ),
        "tensor",
        1024,
    ),
    "transpose": (lambda: nisa.nc_transpose(psum(128, 128, dtype=nl.bfloat16), sbuf(128, 128)), "tensor", 128),
}


@pytest.mark.parametrize("case", CYCLES)
def test_cycles_are_the_documented_ones(case):
    kernel, engine, cycles = CYCLES[case]
    got = only(lambda: kernel() and None)
    assert got.engine == engine
    assert got.ns == pytest.approx(cycles / cost.GHZ[engine])


# The documents give no formula for these.
NO_COST = {"nc_n_gather", "nonzero_with_count", "select_reduce", "tensor_partition_reduce"}


def test_every_instruction_has_a_cost_or_is_refused():
    for name in emulator.INSTRUCTIONS:
        if name in NO_COST:
            with pytest.raises(NotImplementedError, match=f"nisa.{name} has no cost in the model"):
                cost.cost_of(name)
        else:
            assert callable(cost.cost_of(name))


@pytest.mark.parametrize("size, measured", [(1024, 259), (4096, 354)])
def test_dma_goes_through_the_published_bandwidths(size, measured):
    """AWS measured these with descriptors of 1 and 4 KiB; on-chip copies, so that HBM does not limit."""

    def kernel():
        nisa.dma_copy(sbuf(128, size // 2), sbuf(128, size // 2))

    got = only(kernel)
    assert got.descriptors == {size: 128}
    assert 128 * size / got.ns == pytest.approx(measured, rel=1e-6)


def test_back_to_back_matmuls_are_at_the_peak():
    """Measured on trn2: 77.2 of 78.6 TFLOPS for 2048 matmuls of 128 x 128 x 512, 98 %; the model has no losses."""

    def kernel():
        a, b, out = sbuf(128, 128), sbuf(128, 512), psum(128, 512)
        for _ in range(64):
            nisa.nc_matmul(out, a, b)

    report = profile(kernel)
    flops = report.cores[0].total("flops")
    assert flops == report.cores[0].total("issued") == 64 * 2 * 128 * 128 * 512
    assert flops / report.scheduled_ns / 1000 == pytest.approx(78.6, rel=1e-2)


def test_undersized_matmuls_issue_more_than_they_use():
    def kernel():
        nisa.nc_matmul(psum(64, 256), sbuf(32, 64), sbuf(32, 256))

    core = profile(kernel).cores[0]
    assert core.total("flops") * 8 == core.total("issued")


@pytest.mark.parametrize("lnc", [1, 2])
def test_bytes_of_rope_by_hand(lnc):
    batch, seq, heads, head_dim = 2, 300, (40, 5), 64
    query, key = (np.empty((batch, seq, n, head_dim), BF16) for n in heads)
    table = np.empty((seq, 2 * head_dim), np.float32)
    cores = profile(rope[lnc], query, key, table).cores
    assert sum(core.total("read") for core in cores) == query.nbytes + key.nbytes + table.nbytes
    assert sum(core.total("written") for core in cores) == query.nbytes + key.nbytes


def test_bytes_of_the_experts_by_hand():
    counts, dim, hidden = [300, 0, 129, 260], 256, 128
    num_rows, num_experts = sum(counts), len(counts)
    rows, slots = (t.numpy() for t in routing_tables(torch.tensor(counts), num_rows, 2))
    x, h = np.empty((num_rows, dim), BF16), np.empty((num_rows, hidden), BF16)
    w1, w2 = np.empty((num_experts, hidden, dim), BF16), np.empty((num_experts, dim, hidden), BF16)
    arguments = x, w1, w2, w1, rows, slots, True
    report = profile(grouped_experts[2], *arguments)
    # Both cores load the empty slot after their last: expert 0 once more each.
    weights = 3 * (w1.nbytes + 2 * w1.nbytes // num_experts)
    tables = sum(core.total("read") for core in report.cores) - x.nbytes - weights
    assert 0 < tables < 0.02 * weights
    assert sum(core.total("written") for core in report.cores) == x.nbytes + 2 * h.nbytes

    # Shape-only and full runs agree: routing is counted truly.
    full = emulator.profile(grouped_experts[2])(*(np.nan_to_num(a) if a is x else a for a in arguments))
    assert full.to_dict() == report.to_dict()
    backward = profile(grouped_experts_backward[2], x, x, w1, w2, w1, h, h, rows, slots)
    written = x.nbytes + 3 * h.nbytes + 3 * w1.nbytes  # grad x, the scratch of three, grad w1, w2, w3
    assert sum(core.total("written") for core in backward.cores) == written


def test_qwen3_shapes_stay_within_sbuf_and_psum():
    dim, hidden, counts = 2048, 768, [256] * 8
    rows, slots = (t.numpy() for t in routing_tables(torch.tensor(counts), 2048, 2))
    x, h = np.empty((2048, dim), BF16), np.empty((2048, hidden), BF16)
    w1, w2 = np.empty((8, hidden, dim), BF16), np.empty((8, dim, hidden), BF16)
    chip = emulator.arch.TRN2
    for report in (
        profile(grouped_experts[2], x, w1, w2, w1, rows, slots, True),
        profile(grouped_experts_backward[2], x, x, w1, w2, w1, h, h, rows, slots),
    ):
        for core in report.cores:
            assert 100_000 < core.sbuf <= chip.sbuf_usable_bytes and core.psum <= chip.psum_bytes
            assert any("24576 B" in label for label in core.live["sbuf"])


def test_high_water_follows_the_values():
    def kernel():
        for _ in range(4):  # each is dead before the next begins
            tile = sbuf(128, 1024, dtype=nl.float32)
            nisa.memset(tile, 1.0)
            nisa.tensor_copy(tile, tile)
        both = [sbuf(128, 1024, dtype=nl.float32) for _ in range(2)]
        for tile in both:
            nisa.memset(tile, 1.0)
        nisa.tensor_tensor(both[0], both[0], both[1], nl.add)
        nisa.memset(tile, 1.0)  # never read, so it does not stay

    core = profile(kernel).cores[0]
    assert core.sbuf == 2 * 4096 and len(core.live["sbuf"]) == 2


def test_a_kernel_that_does_not_fit_can_be_profiled_on_demand():
    def kernel():
        tiles = [sbuf(128, 27000, dtype=nl.float32) for _ in range(2)]
        for tile in tiles:
            nisa.memset(tile, 1.0)
        nisa.tensor_tensor(tiles[0], *tiles, nl.add)

    with pytest.raises(emulator.NKIError, match="216000 bytes of sbuf per partition"):
        profile(kernel)
    with emulator.unchecked("capacity"):
        assert profile(kernel).cores[0].sbuf == 216000


def test_the_schedule_knows_dependencies_and_buffers():
    def chain(buffers):
        def kernel(x):
            tiles = [sbuf(128, 2048) for _ in range(buffers)]
            for i in range(8):
                tile = tiles[i % buffers]
                nisa.dma_copy(tile, x)
                nisa.activation(tile, nl.exp, tile)

        return profile(kernel, np.empty((128, 2048), BF16))

    one, two = chain(1), chain(2)
    assert one.overlapped_ns == two.overlapped_ns and one.serial_ns == two.serial_ns
    # One buffer serialises loads and computation, two let them overlap.
    assert one.overlapped_ns < two.scheduled_ns < one.scheduled_ns
    load, compute = (event.cost.ns for event in one.cores[0].events[:2])
    assert one.scheduled_ns == pytest.approx(8 * (load + 2000 + compute))


def test_iterations_of_a_device_loop_share_their_buffers():
    def kernel(x):
        def body(i):
            tile = sbuf(128, 2048)
            nisa.dma_copy(tile, x)
            nisa.activation(sbuf(128, 2048), nl.exp, tile)

        nl.fori_loop(0, 8, body)

    def unrolled(x):
        for _ in range(8):
            tile = sbuf(128, 2048)
            nisa.dma_copy(tile, x)
            nisa.activation(sbuf(128, 2048), nl.exp, tile)

    x = np.empty((128, 2048), BF16)
    assert profile(kernel, x).scheduled_ns > 1.5 * profile(unrolled, x).scheduled_ns
    assert profile(kernel, x).cores[0].sbuf == 2 * 4096


def test_a_copy_where_a_mask_says_waits_for_what_it_keeps():
    def kernel(x):
        tile, mask = sbuf(128, 512), nl.ndarray((128, 512), nl.uint8)
        nisa.dma_copy(tile, x)
        nisa.memset(mask, 1)
        nisa.tensor_copy_predicated(tile, sbuf(128, 512), mask)

    load, _, copy = profile(kernel, np.empty((128, 512), BF16)).cores[0].events
    assert copy.start >= load.start + load.cost.ns + 2000


def test_without_overlap_every_load_waits():
    def kernel(x):
        for _ in range(3):
            tile = sbuf(128, 512)
            nisa.dma_copy(tile, x)
            nisa.activation(tile, nl.exp, tile)

    report = profile(kernel, np.empty((128, 512), BF16))
    assert report.serial_ns == pytest.approx(sum(report.cores[0].busy_ns().values()) + 3 * 2000)
    assert report.serial_ns >= report.scheduled_ns


def test_double_row_multiplies_two_rows_in_a_cycle():
    def matmul(mode, *pairs):
        def kernel():
            a, b = (nl.ndarray((128, *pairs, n), nl.float8_e4m3) for n in (128, 512))
            nisa.nc_matmul(psum(128, 512), a, b, perf_mode=mode)

        return kernel

    single, double = only(matmul(nisa.matmul_perf_mode.none)), only(matmul(nisa.matmul_perf_mode.double_row, 2))
    assert double.flops == 2 * single.flops == 2 * 256 * 128 * 512
    assert double.ns == single.ns and double.issued == double.flops
    report = profile(matmul(nisa.matmul_perf_mode.double_row, 2))
    assert report.pe_bound_ns == pytest.approx(report.overlapped_ns)


def test_a_transpose_is_no_multiplication():
    def kernel():
        nisa.nc_matmul(psum(128, 128, dtype=nl.bfloat16), sbuf(128, 128), sbuf(128, 128), is_transpose=True)

    report = profile(kernel)  # the identity is made of floats: not looked at
    assert report.pe_bound_ns == 0 and report.overlapped_ns > 0


def test_a_reduction_counts_what_it_reads():
    assert only(lambda: nisa.tensor_reduce(sbuf(128, 1), nl.add, sbuf(128, 1000), axis=1)).elements == 128_000


def test_a_reduction_in_parts_is_profiled_without_floats():
    def kernel():
        CMD = nisa.reduce_cmd
        data, total = sbuf(128, 8, dtype=nl.float32), nl.ndarray((128, 1), nl.float32)
        nisa.activation(sbuf(128, 8), nl.exp, data, reduce_op=nl.add, reduce_cmd=CMD.reset_reduce)
        counted = nl.ndarray((128, 8), nl.int32)
        nisa.activation(counted, nl.exp, data, reduce_op=nl.add, reduce_cmd=CMD.reduce, reduce_res=total)

    assert len(profile(kernel).cores[0].events) == 2


def test_forms_of_the_report(tmp_path):
    query, key = np.empty((1, 256, 4, 64), BF16), np.empty((1, 256, 1, 64), BF16)
    report = emulator.profile(rope[2])(query, key, np.ones((256, 128), np.float32))
    text = str(report)
    assert "by the model (not measured)" in text and "2 core(s) of trn2" in text
    figures = json.loads(report.to_json())
    assert figures["backend"] == "model" and figures["hbm_bytes"] == report.hbm_bytes
    assert report.hbm_bound_ns <= report.overlapped_ns <= min(report.scheduled_ns, report.serial_ns)
    assert report.results[0].shape == query.shape
    report.save_roofline(tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")
    report.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {"core 0 (model)", "core 1 (model)"}
    assert {e["tid"] for e in events} >= {"dma", "vector", "gpsimd"}
    for engine in ("vector", "dma"):  # an engine does one thing at a time
        spans = sorted((e["ts"], e["dur"]) for e in events if e["pid"] == "core 0 (model)" and e["tid"] == engine)
        assert all(a + d <= b + 1e-9 for (a, d), (b, _) in zip(spans, spans[1:], strict=False))


def test_a_roofline_shows_kernels_of_one_number_of_cores(tmp_path):
    def copy(x):
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        nisa.dma_copy(out, x)
        return out

    query, key = np.empty((1, 256, 4, 64), BF16), np.empty((1, 256, 1, 64), BF16)
    one, two = (profile(rope[lnc], query, key, np.empty((256, 128), np.float32)) for lnc in (1, 2))
    with pytest.raises(ValueError, match=r"\[1, 2\] cores"):
        emulator.plots.roofline({"one": one, "two": two}, tmp_path / "both.png")
    with pytest.raises(ValueError, match="copy computes nothing"):
        profile(copy, query).save_roofline(tmp_path / "copy.png")
