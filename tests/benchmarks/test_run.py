"""The benchmarks: figures pinned, nobody's backend but the one that ran, the report, errors."""

import dataclasses
import importlib
import math
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import trn_kernels
from trn_kernels import emulator
from trn_kernels.benchmarks import grouped_experts, measure, nki_library, report, results, rope, run, steps
from trn_kernels.emulator import cost, interop
from trn_kernels.ops.grouped_experts import grouped_experts_reference

emulator.install()  # `import nki` works before a kernel runs
DOCS = Path(trn_kernels.__file__).parent / "docs" / "benchmarks"
TOLERANCE = 1.03
"""A kernel's modelled cost may be this many times the committed figure."""
RUN = results.Run("2026-01-01T00:00:00Z", "0123456789", "none", "pytest")
FP32, BF16 = torch.float32, torch.bfloat16
A3B = "Qwen3-30B-A3B"


@pytest.fixture(scope="module")
def model():
    return measure.Model()


def pinned_cases():
    """Some of every kernel that take seconds together."""
    for table in (FP32, BF16):
        for gathered in (False, True):
            yield rope.ours(A3B, 4096, table, gathered, "forward", 2)
    yield rope.ours(A3B, 4096, FP32, False, "backward", 2)
    yield rope.ours(A3B, 4096, FP32, False, "forward", 1)
    yield grouped_experts.ours(grouped_experts.reduced(1024), "forward", 2)
    yield grouped_experts.ours(grouped_experts.SMALL, "forward", 2)
    yield grouped_experts.ours(grouped_experts.SMALL, "backward", 2)


# -- committed figures ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", list(pinned_cases()), ids=run.describe)
def test_modelled_cost_is_no_worse_than_committed(model, case):
    """After a change that is meant to cost more: make the report again, see README."""
    now = results.row(RUN, case, model.measure(case))
    committed = [row for row in results.read(DOCS / "results.csv") if results.key(row) == results.key(now)]
    assert committed, f"{results.key(now)} is not in the committed results"
    for column in ("time_us", "overlapped_us", "hbm_bytes", "issued_flops", "sbuf_bytes"):
        then = float(committed[-1][column])
        assert float(now[column]) <= TOLERANCE * then, f"{column} is {now[column]}, was {then}"
    assert float(now["min_bytes"]) == float(committed[-1]["min_bytes"])


def test_the_committed_report_shows_the_committed_results():
    rows = results.last_run(DOCS / "results.csv")
    text = (DOCS / "report.md").read_text()
    assert text.startswith("\n".join(["# Benchmarks", "", *report.table(rows), ""]))
    assert "\n".join(report.target_table(rows)) in text
    for plot in re.findall(r"!\[.*\]\((.*)\)", text):
        assert (DOCS / plot).stat().st_size > 10_000


def test_constants_of_the_model():
    """trainium2_arch: 2.9 TB/s for 8 cores, a systolic array of 128 x 128 at 2.4 GHz."""
    assert cost.HBM_GB_PER_S == 362.5
    assert pytest.approx(78.64, abs=0.01) == cost.PE_TFLOPS


@pytest.mark.parametrize(
    "table, gathered, least",
    [
        # 36 heads of 128 in bf16, in and out, and 256 columns of the table.
        (FP32, False, 1024 * (2 * 36 * 128 * 2 + 256 * 4)),
        (BF16, False, 1024 * (2 * 36 * 128 * 2 + 256 * 2)),
        (FP32, True, 1024 * (2 * 36 * 128 * 2 + 256 * 4 + 4)),
    ],
)
@pytest.mark.parametrize("lnc", [1, 2])
def test_rope_moves_the_minimum(model, table, gathered, least, lnc):
    case = rope.ours(A3B, 1024, table, gathered, "forward", lnc)
    assert case.min_bytes == least
    assert case.bound_ns == pytest.approx(least / (362.5 * lnc))
    assert model.measure(case).hbm_bytes == least


def test_the_bound_of_experts():
    problem = grouped_experts.reduced(4096, "balanced")
    rows, weights = 4096 * 4, 64 * 3 * 2048 * 768
    case = grouped_experts.ours(problem, "forward", 2)
    assert case.min_bytes == 2 * (2 * rows * 2048 + weights + 2 * rows * 768)
    assert case.flops == 6 * rows * 2048 * 768
    assert case.bound_ns == pytest.approx(case.min_bytes / 725)  # the weights, few rows share them
    larger = grouped_experts.ours(grouped_experts.reduced(16384, "balanced"), "backward", 2)
    assert larger.flops == 12 * 4 * rows * 2048 * 768
    assert larger.bound_ns == pytest.approx(larger.flops / (2 * 78643.2))
    one = grouped_experts.reduced(4096, "one expert")
    assert one.min_bytes("inference") == 2 * (2 * rows * 2048 + 3 * 2048 * 768)  # weights of the others are not needed


@pytest.mark.parametrize("routing", ["balanced", "random", "skewed", "one expert"])
def test_routings(routing):
    problem = grouped_experts.reduced(4096, routing)
    counts = problem.counts()
    assert counts.shape == (64,) and counts.sum() == problem.rows
    if routing in ("random", "skewed"):
        assert counts.max() <= 4096  # a token takes an expert once
        assert (counts.max() / counts.float().mean() > 3) == (routing == "skewed")


def test_both_is_forward_and_backward(model):
    parts = [model.measure(grouped_experts.ours(grouped_experts.SMALL, d, 2)) for d in ("forward", "backward")]
    both = model.measure(grouped_experts.ours(grouped_experts.SMALL, "both", 2))
    assert both.time_ns == sum(part.time_ns for part in parts)
    assert both.hbm_bytes == sum(part.hbm_bytes for part in parts)
    assert both.sbuf_bytes == max(part.sbuf_bytes for part in parts)
    assert both.busy_ns == {e: sum(part.busy_ns[e] for part in parts) for e in both.busy_ns}


# -- the launch and the competitors ---------------------------------------------------------------------


@pytest.mark.parametrize("lnc", [1, 2])
def test_a_launch_is_the_operators(monkeypatch, lnc):
    """What is profiled is what the operator launches: same kernel, grid and arguments."""
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", str(lnc))
    nki = importlib.import_module("nki")
    seen, simulate = [], nki.simulate

    def spy(kernel):
        def call(*args, **kwargs):
            seen.append((kernel, args, kwargs))
            return simulate(kernel)(*args, **kwargs)

        return call

    x, w1, w2, w3 = torch.randn(20, 16), torch.randn(3, 8, 16), torch.randn(3, 16, 8), torch.randn(3, 8, 16)
    arguments = (x, w1, w2, w3, torch.tensor([5, 0, 15]), True)
    launch = measure.launch_of(torch.ops.trn_kernels.grouped_experts, *arguments, lnc=lnc)
    assert nki.simulate is simulate and os.environ["NEURON_LOGICAL_NC_CONFIG"] == str(lnc)
    monkeypatch.setattr(nki, "simulate", spy)
    torch.ops.trn_kernels.grouped_experts(*arguments)
    ((kernel, args, kwargs),) = seen
    assert (launch.kernel.func, launch.kernel.lnc) == (kernel.func, kernel.lnc) and kernel.lnc == lnc
    assert launch.kwargs == kwargs and len(launch.args) == len(args)
    for ours, theirs in zip(launch.args, args, strict=True):
        assert np.array_equal(ours, theirs)


def test_an_operator_that_launches_nothing():
    with pytest.raises(RuntimeError, match="launched no kernel"):
        measure.launch_of(torch.ops.trn_kernels.rope, *(torch.empty(1, 0, 2, 8),) * 2, torch.empty(4, 16), None, lnc=1)


class Copies(TorchDispatchMode):
    """Bytes read and written by the copies of an operator."""

    total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            self.total += 2 * result.nbytes
        return result


@pytest.mark.parametrize("lnc", [1, 2])
def test_the_published_operator_copies_what_ours_does_not(monkeypatch, lnc):
    """The copies that are counted are those that ``ops.rope_hf`` makes around its kernel, and they are copies."""
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", str(lnc))
    query, key, table = torch.randn(2, 256, 3, 8), torch.randn(2, 256, 1, 8), torch.randn(256, 16)
    counted = 0
    for x in (query, key):
        assert np.array_equal(emulator.simulate(rope.copy_kernel()[lnc])(x.numpy()), x.transpose(1, 2).numpy())
        counted += 2 * emulator.profile(rope.copy_kernel()[lnc], shape_only=True)(x.numpy()).hbm_bytes
    with Copies() as copies:
        # The body of the operator: through the dispatcher a mode sees the operator alone.
        importlib.import_module("trn_kernels.ops.rope")._run_rope_hf(lambda q, k, *_: (q, k), query, key, table, False)
    # The one key head needs no copy, a permutation of one head is none; the model counts its bytes all the same.
    assert copies.total == counted - 2 * 2 * key.nbytes


def test_the_published_operator_moves_2_8_times_the_bytes(model):
    (published,) = rope.published(A3B, 4096, "forward", 2)
    ours = rope.ours(A3B, 4096, FP32, False, "forward", 2)
    assert (published.shape, published.min_bytes) == (ours.shape, ours.min_bytes)
    tensors, table = 4096 * 36 * 128 * 2, 4096 * 256 * 4
    assert model.measure(published).hbm_bytes == 6 * tensors + table
    assert 6 * tensors + table >= 2.8 * model.measure(ours).hbm_bytes


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 700), min_size=1, max_size=6), st.sampled_from([1, 7, 256]))
def test_block_tables(counts, block):
    counts = np.array([*counts, 1])  # at least one row
    ids, experts = nki_library.block_tables(counts, block)
    assert len(ids) == block * len(experts)
    # Enough blocks for every routing of so many rows: all experts but one have a block of a single row.
    others = min(len(counts) - 1, counts.sum() - 1)
    assert len(experts) >= others + math.ceil((counts.sum() - others) / block)
    owner = np.arange(len(counts)).repeat(counts)
    there = ids >= 0
    assert sorted(ids[there]) == list(range(counts.sum()))
    assert np.array_equal(owner[ids[there]], experts.repeat(block)[there])


@pytest.mark.skipif(not os.environ.get("NKILIB_SRC"), reason="NKILIB_SRC names no checkout of aws-neuron/nki-library")
@pytest.mark.parametrize("kernel", [name for name, of in grouped_experts.NKILIB.items() if of != "backward"])
def test_nki_library_computes_the_same_no_closer(kernel):
    """The task that is compared is the same one, and our error against fp64 is no larger."""
    problem = grouped_experts.Problem("test", 4, 2, 160, "balanced", dim=512, hidden=256)
    generator = torch.Generator().manual_seed(0)
    x, w1, w2, w3 = (torch.randn(t.shape, generator=generator) * 0.1 for t in problem.tensors().values())
    x, w1, w2, w3 = ((t * 10 if t is x else t).to(BF16) for t in (x, w1, w2, w3))
    values = {
        "hidden_states": x,
        "gate_up_proj_weight": torch.stack([w1, w3], 1).permute(0, 3, 1, 2).contiguous(),
        "down_proj_weight": w2.transpose(1, 2).contiguous(),
        "expert_affinities_masked": torch.ones(problem.rows * problem.num_experts, 1, dtype=BF16),
    }
    function, arguments = grouped_experts.nkilib_arguments(problem, kernel)
    found = emulator.simulate(function[2])(**arguments | {k: interop.to_numpy(v) for k, v in values.items()})
    found = found[0] if isinstance(found, (tuple, list)) else found
    truth = grouped_experts_reference(*(t.double() for t in (x, w1, w2, w3)), problem.counts())
    ours = trn_kernels.ops.grouped_experts(x, w1, w2, w3, problem.counts())
    error, theirs = (
        float((torch.from_numpy(np.asarray(y, np.float64)) - truth).norm() / truth.norm())
        for y in (interop.to_numpy(ours), found)
    )
    assert theirs < 0.02 and error <= theirs


def test_torchs_grouped_matmul_is_the_same():
    problem = grouped_experts.FOR_CPU
    problem = dataclasses.replace(problem, tokens=9, dim=32, hidden=16)
    inputs = [torch.randn(t.shape) * 0.3 for t in problem.tensors().values()]
    torch.testing.assert_close(
        grouped_experts.grouped_matmul(*inputs, problem.counts()),
        grouped_experts_reference(*inputs, problem.counts()),
    )


# -- backends -------------------------------------------------------------------------------------------


def quick(result, counts=()):
    """A case whose call returns ``result``."""
    return measure.Case("rope", "test", "forward", "any", 2, 1000, call=lambda device: lambda: result, counts=counts)


def test_a_row_carries_the_backend_that_ran():
    assert "backend" not in {f.name for kind in (measure.ModelFigures, measure.WallFigures, measure.Case)
                             for f in dataclasses.fields(kind)}  # fmt: skip
    figures = measure.CPU().measure(quick(torch.ones(2)))
    assert figures.device == "cpu" and results.row(RUN, quick(None), figures)["backend"] == "cpu"
    assert results.row(RUN, quick(None), figures)["target"] == "cpu"


@pytest.mark.parametrize("result, where", [(torch.ones(2, device="meta"), "meta"), (None, "no device")])
def test_results_of_no_backend_are_refused(result, where):
    with pytest.raises(RuntimeError, match=f"results are on {where}"):
        measure.CPU().measure(quick(result))


def test_results_on_two_devices_are_refused():
    with pytest.raises(RuntimeError, match="results are on cpu, meta"):
        measure.CPU().measure(quick([torch.ones(2), (torch.ones(2, device="meta"),)]))


def test_the_device_without_a_device(capsys):
    with pytest.raises(RuntimeError, match="backend trn2: torch_neuronx is not installed"):
        measure.make_backends(["trn2"])
    with pytest.raises(SystemExit) as stopped:
        run.main(["--backend", "trn2", "--backend", "model"])
    assert stopped.value.code == 2
    assert "backend trn2: torch_neuronx is not installed" in capsys.readouterr().err
    assert [backend.name for backend in measure.make_backends(["auto"])] == ["model", "cpu"]


STANDINS = {
    "torch_neuronx/__init__.py": """
        import torch
        def nki_op(name, fn=None, mutates_args={}):
            return torch.library.custom_op(name, fn, mutates_args=mutates_args)
        class Caller:
            def __init__(self, kernel, grid=()):
                self.kernel, self.grid = kernel, grid
            def __getitem__(self, grid):
                return Caller(self.kernel, tuple(grid))
            def __call__(self, **arguments):
                print(self.kernel.__name__, self.grid, {k: getattr(v, "device", v) for k, v in arguments.items()})
                return torch.empty_like(arguments["x"])
        wrap_nki = Caller
        """,
    "torch_neuronx/utils.py": "def get_logical_neuron_cores():\n    return '2'\n",
    "nki/__init__.py": "",
    "nki/isa.py": "",
}

DEVICE = """
    import sys, types, torch, torch_neuronx
    torch.utils.backend_registration._setup_privateuseone_for_python_backend("neuron")
    synchronized = []
    torch.neuron.device_count = lambda: 1
    torch.neuron.synchronize = lambda: synchronized.append(1)
    from torch._subclasses import FakeTensorMode
    from trn_kernels.benchmarks import measure, results, run
    from trn_kernels.ops import neuron
        """


def on_a_device(tmp_path, code: str) -> str:
    """Run with stand-ins of torch_neuronx, of nki and of a device of which tensors are fake."""
    for name, text in STANDINS.items():
        path = tmp_path / "packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    program = f"import sys; sys.path.insert(0, {str(tmp_path / 'packages')!r})\n" + textwrap.dedent(DEVICE)
    done = subprocess.run(
        [sys.executable, "-c", program + textwrap.dedent(code)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_device_backend(tmp_path):
    out = on_a_device(
        tmp_path,
        """
        import dataclasses
        launched = {}
        neuron.launches = lambda: dict(launched)
        def case(device, counts=()):
            def call():
                launched["rope", "neuron"] = launched.get(("rope", "neuron"), 0) + 1
                return torch.empty(2, device=device), torch.empty(2, device=device)
            def make(asked):
                assert asked == "neuron"
                return call
            return measure.Case("rope", "trn_kernels", "forward", "any", 2, 1000, call=make, counts=counts)
        print([b.name for b in measure.make_backends(["auto"])])
        (backend,) = measure.make_backends(["trn2"])
        print([backend.can(dataclasses.replace(case("neuron"), lnc=lnc)) for lnc in (1, 2)])
        about = results.Run("today", "commit", "versions", "command")
        with FakeTensorMode():
            figures = backend.measure(case("neuron", ("rope",)))
            # first, second, warm-up, runs; the queued ones with a single synchronisation
            print(len(synchronized), launched, len(figures.runs_ns))
            row = results.row(about, case("neuron"), figures)
            print(row["backend"], row["target"], row["runs"])
            assert float(row["fastest_us"]) <= float(row["time_us"]) <= float(row["slowest_us"])
            for bad in (case("cpu"), case("neuron", ("rope", "rope_backward"))):
                try:
                    backend.measure(bad)
                except RuntimeError as error:
                    print(error)
        # A competitor's kernel, without an operator.
        import numpy as np
        def theirs(x, rows, block_size):
            pass
        with FakeTensorMode(allow_non_fake_inputs=True):
            arrays = {"x": np.ones((2, 3), np.float32), "rows": np.arange(2, dtype=np.int32), "block_size": 256}
            print(measure.device_call(theirs, arrays, 2, "neuron")().device.type)
        """,
    )
    assert out.splitlines() == [
        "['cpu', 'trn2']",
        "[False, True]",
        "28 {('rope', 'neuron'): 47} 20",
        "trn2 trn2 20",
        "rope by trn_kernels: results are on cpu, not on neuron",
        "rope by trn_kernels: rope_backward did not run on the device",
        "theirs (2,) {'x': device(type='neuron', index=0), 'rows': device(type='neuron', index=0), 'block_size': 256}",
        "neuron",
    ]


def test_the_command_on_a_device(tmp_path):
    """All of it: operators on device tensors, the model in a process without the real nki, one report."""
    out = on_a_device(
        tmp_path,
        """
        count = iter(range(1000000))
        neuron.launches = lambda: {(op, "neuron"): next(count) for op in ("rope", "rope_backward", "grouped_experts")}
        with FakeTensorMode():
            only = ["--only", "rope both"]
            run.main(["--backend", "trn2", "--backend", "model", *only, "--out", "out"])
        """,
    )
    rows = results.read(tmp_path / "out" / "results.csv")
    assert [row["backend"] for row in rows] == ["model", "trn2"]
    text = (tmp_path / "out" / "report.md").read_text()
    assert "neuron-explorer capture" in text and "neuron-explorer capture" in out
    assert "## On the device" in text and "compile, ms" in text
    assert len(re.findall(r"\| (model|trn2) \|", text)) == 2


# -- the command and the report -------------------------------------------------------------------------


def test_the_report(tmp_path, capsys):
    out = ["--out", str(tmp_path)]
    run.main(["--backend", "model", "--only", "small layer", *out])
    run.main(["--backend", "model", "--only", "rope forward, trn_kernels", "--only", "S 2048", *out])
    assert "[  1/1] model rope forward" in capsys.readouterr().out  # progress
    rows = results.read(tmp_path / "results.csv")  # the second run is appended
    assert [(row["op"], row["backend"], row["target"]) for row in rows] == [
        ("grouped_experts", "model", "trn2"),
        ("grouped_experts", "model", "trn2"),
        ("rope", "model", "trn2"),
    ]
    assert all(row["command"].startswith("python benchmarks/run.py --backend model") for row in rows)
    assert all(row["date"].endswith("Z") and row["commit"] and "torch" in row["versions"] for row in rows)
    report.write(tmp_path, rows)
    lines = (tmp_path / "report.md").read_text().splitlines()
    assert lines[:2] == ["# Benchmarks", ""]
    names = ("kernel", "shape", "backend", "time", "bound", "ratio", "bytes over minimum", "limiting engine")
    at = [lines[2].index(f"| {name}") for name in names]
    assert at == sorted(at)
    table = [line for line in lines[4:] if line.startswith("|")][:3]
    assert lines[4:7] == table and all("| model |" in line for line in table)
    for plot in ("time", "bytes", "engines", "roofline", "scaling"):
        assert f"({plot}.png)" in "\n".join(lines)
        assert (tmp_path / f"{plot}.png").read_bytes().startswith(b"\x89PNG")
    before = (tmp_path / "report.md").read_text()
    run.main(["--redraw", *out])
    assert (tmp_path / "report.md").read_text() != before  # of the last run alone
    (tmp_path / "results.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match="other columns"):
        results.append(tmp_path / "results.csv", rows)


def test_cpu_rows_are_relative(tmp_path):
    case = dataclasses.replace(quick(torch.ones(2)), devices=("cpu",))
    rows = [
        results.row(RUN, dataclasses.replace(case, implementation=name), measure.WallFigures("cpu", 9, 1, (ns,), ns))
        for name, ns in (("loop", 4000), ("grouped", 6000))
    ]
    table = report.table(rows)
    assert "| cpu | 4.0 |  |  | 1.00 of loop |" in table[2] and "| cpu | 6.0 |  |  | 1.50 of loop |" in table[3]
    report.write(tmp_path, rows)  # no plot has anything to show
    assert not list(tmp_path.glob("*.png"))


def test_targets():
    """Each is judged on its own side of the limit, and what was not measured is said to be so."""
    assert report.Target("a", 1.5, 1.5).reached and not report.Target("a", 1.5, 1.51).reached
    assert report.Target("a", 2.8, 2.9, most=False).reached and not report.Target("a", 2.8, 2.7, most=False).reached
    assert all(target.reached is None for target in report.targets([]))
    assert "not measured" in report.target_table([])[2]


def test_what_the_command_refuses(capsys, tmp_path):
    folders = {}
    for name, text in (("empty", ",".join(results.COLUMNS) + "\n"), ("foreign", "a,b\n")):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        (folders[name] / "results.csv").write_text(text)
    for arguments, message in (
        (["--only", "no such case"], "no case contains that"),
        (["--only", "no such case", "--list"], "no case contains that"),
        (["--redraw"], "--redraw needs --out"),
        (["--redraw", "--out", str(folders["empty"])], "has none"),
        (["--out", str(folders["foreign"])], "other columns"),
        (["--out", str(folders["foreign"] / "results.csv")], "is not a folder"),
        (["--backend", "model", "--only", "PyTorch loop"], "none of the 2 cases runs on model"),
        (["--backend", "gpu"], "invalid choice: 'gpu'"),
    ):
        with pytest.raises(SystemExit) as stopped:
            run.main(arguments)
        assert stopped.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["accuracy", "cost_model", "steps"])
def test_where_to_write_must_be_said(name):
    done = subprocess.run([sys.executable, "-m", f"trn_kernels.benchmarks.{name}"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith(f"usage: python -m trn_kernels.benchmarks.{name} ")


@pytest.mark.parametrize("command", [["benchmarks/run.py"], ["-m", "trn_kernels.benchmarks.run"]])
def test_script_and_module(command):
    done = subprocess.run(
        [sys.executable, *command, "--list"], cwd=DOCS.parent.parent, capture_output=True, text=True, check=True
    )
    assert len(done.stdout.splitlines()) == len(run.all_cases())


def test_every_case_once():
    """Two of a name would be one in the report, so they must not differ; and all can run somewhere."""
    for full in (False, True):
        found = {}
        for case in (*rope.cases(full), *grouped_experts.cases(full)):
            assert dataclasses.replace(found.setdefault(run.describe(case), case), series=None) == dataclasses.replace(
                case, series=None
            )
            assert any(case.runs_on(backend) for backend in measure.BACKENDS)
        assert len(found) == len(run.all_cases(full))


def test_steps_in_turns():
    """The ratio is that of neighbours, after the warm-up; one that is out of turn is noticed."""
    steps_of = [("reference", 9.0), ("emulator", 99.0)] * steps.WARM_UP
    steps_of += [("reference", 1.0), ("emulator", 2.0), ("reference", 2.0), ("emulator", 6.0)]
    assert steps.ratios(steps_of) == (4.0, 1.5, [2.0, 3.0])
    with pytest.raises(AssertionError):
        steps.ratios(steps_of[1:])


def test_steps_in_the_report(tmp_path):
    assert steps.section(tmp_path) == []
    names = ",".join(steps.COLUMNS)
    row = "today,commit,versions,native_qwen3_debug,1.6,1.0,{},1.0,2.0,9"
    (tmp_path / "steps.csv").write_text("\n".join([names, row.format("1.2"), row.format("1.6")]) + "\n")
    text = "\n".join(steps.section(tmp_path))
    assert "| 1.6 |" in text and "| no |" in text and "| 1.2 |" not in text  # the last one
