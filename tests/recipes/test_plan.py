"""What a training needs: planned against measured, by degree, and in the documentation."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import trn_kernels
from trn_kernels.recipes import plan
from trn_kernels.recipes.parallelism import shards_typed_parameters

ROOT = Path(trn_kernels.__file__).resolve().parent
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    "OMP_NUM_THREADS": "1",
    # What is freed goes back at once, so that the resident set follows the tensors.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "262144",
    "MALLOC_TRIM_THRESHOLD_": "262144",
    # The emulator's own memory is not the training's.
    "TRN_KERNELS_BACKEND": "reference",
}


def python(folder, *arguments, returncode=0):
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == returncode, done.stdout + done.stderr
    return done


def planned(folder, *flags):
    return json.loads(python(folder, "-m", "trn_kernels.recipes.plan", *flags, "--json").stdout)


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """Function from the flags of a command line to a plan; one process makes all of a list."""
    folder = tmp_path_factory.mktemp("plans")

    def make(*lines):
        code = f"""
import dataclasses, json
from trn_kernels.recipes import cpu, plan
cpu.stub_triton()
cpu.prepare(always=True)
for line in {lines!r}:
    print(json.dumps(dataclasses.asdict(plan.run(line.split()))))
"""
        return [plan.Plan(**json.loads(line)) for line in python(folder, "-c", code).stdout.splitlines()]

    return make


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="reads the peak from Linux's /proc")
@pytest.mark.parametrize(("config", "ranks"), [("dense", 1), ("dense_selective", 2), ("moe", 2)])
def test_planned_is_measured(tmp_path, config, ranks):
    """float32 and bfloat16, dense and experts, in one process and sharded over two."""
    launch = f"-m torch.distributed.run --nproc_per_node={ranks} --rdzv_backend c10d --rdzv_endpoint localhost:0"
    log = python(tmp_path, *launch.split(), "-m", "measure", config).stdout
    measured = [int(text.split()[1]) for text in log.split("measured ")[1:]]
    assert len(measured) == ranks, log
    result = planned(tmp_path, "--module", "measured", "--config", config, "--ranks", str(ranks))
    assert result["peak"] > 150e6  # small against what a process takes beside its tensors
    for bytes_ in measured:
        assert result["peak"] == pytest.approx(bytes_, rel=0.1), result


def test_degrees_divide_what_they_shard(plans):
    debug, experts = (
        "--config native_qwen3_debug --ranks",
        "--config nki_qwen3_moe_debug --training.disable_cuda_graphs --ranks",
    )
    one, four, tp, replicas, local, ep = plans(
        f"{debug} 1",
        f"{debug} 4",
        f"{debug} 4 --tp 4",
        f"{debug} 4 --replicate 2 --fsdp 2",
        f"{experts} 2",
        f"{experts} 2 --ep 2",
    )
    for result in (one, four, tp, replicas):
        shards = result.degrees["dp_shard"] * result.degrees["tp"]
        # Norms are not split by tensor parallelism; AdamW has two tensors of the parameters' dtype and a step count.
        assert result.parts["parameters"] == pytest.approx(4 * one.total_parameters / shards, rel=5e-2)
        assert result.parts["optimizer"] == pytest.approx(2 * result.parts["parameters"], rel=1e-3)
    assert one.parts["parameters"] == 4 * one.total_parameters
    # Sharding over data leaves a rank its own activations; tensor parallelism splits the most of them.
    assert four.parts["activations"] == pytest.approx(one.parts["activations"], rel=1e-2)
    assert 0.25 * one.parts["activations"] < tp.parts["activations"] < 0.75 * one.parts["activations"]
    assert replicas.parts["fsdp"] > 0
    # Two ranks hold half of each expert, or half of the experts; only for the former they gather the others' half.
    assert ep.parts["parameters"] == pytest.approx(local.parts["parameters"], rel=1e-3)
    assert ep.parts["fsdp"] < 0.7 * local.parts["fsdp"]


def test_checkpointing_and_accumulation(plans):
    debug = "--config native_qwen3_debug --ranks 1 --training.disable_cuda_graphs --training.local_batch_size 8"
    none, selective, full, accumulated = plans(
        f"{debug} --ac none",
        f"{debug} --ac selective",
        f"{debug} --ac full",
        f"{debug} --training.global_batch_size 16",
    )
    sizes = [result.parts["activations"] for result in (none, selective, full)]
    assert sizes[0] > 1.5 * sizes[1] > 2 * sizes[2] > 0
    assert [result.checkpointing for result in (none, selective, full)] == ["none", "selective", "full"]
    # All gradients of the micro-batches before live through the last.
    assert accumulated.parts["gradients"] >= accumulated.parts["parameters"]
    assert accumulated.peak > none.peak + 0.8 * accumulated.parts["gradients"]


def test_says_whether_it_fits(tmp_path):
    flags = ["-m", "trn_kernels.recipes.plan", "--config", "native_qwen3_debug", "--ranks", "2"]
    table = python(tmp_path, *flags).stdout
    assert "qwen3 debugmodel, 0.0163 billion parameters\n2 ranks (dp_shard 2)" in table
    assert "24.000 GiB  of one logical core (trn2, LNC=2)\nfits, 23." in table
    assert "does not fit by 0." in python(tmp_path, *flags, "--hbm", "0.1", returncode=1).stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--ranks 0", "ranks is 0, must be at least 1"),
        (
            "--ranks 2 --training.disable_cuda_graphs --parallelism.pipeline_parallel_degree 2",
            "parallelism.pipeline_parallel_degree is 2; plan takes 1",
        ),
        ("--ranks 2 --training.enable_cpu_offload", "training.enable_cpu_offload is on"),
        ("--ranks 2 --training.global_batch_size 6", "training.global_batch_size is 6, not a multiple of"),
        ("--ranks 2 --tp 3", "parallelism has data_parallel_replicate_degree 1 x "),
        ("--ranks 2 --config nothing", "Config function 'nothing' not found in trn_kernels.recipes.qwen3."),
        ("--ranks 2 --hbm nan", "hbm is nan, must be a number of GiB above 0"),
        ("--ranks 40 --config nki_qwen3_moe_debug", "data parallelism shards 8 experts over 40 ranks, "),
        pytest.param(
            "--ranks 2 --tp 2 --ac full --compile.enable",
            "compile.enable is on with activation checkpointing, parallelism.tensor_parallel_degree 2",
            marks=pytest.mark.skipif(shards_typed_parameters(), reason="torch 2.14 can compile it"),
        ),
    ],
)
def test_refused(tmp_path, flags, message):
    """By one line, and a status of its own: none of these is a training that does not fit."""
    command = ["-m", "trn_kernels.recipes.plan", "--config", "native_qwen3_debug", *flags.split()]
    done = python(tmp_path, *command, returncode=2)
    assert f"\nerror: {message}" in f"\n{done.stderr}"
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "table takes the path of one Markdown file, got 0"),
        (["missing.md"], "[Errno 2] No such file or directory: 'missing.md'"),
    ],
)
def test_table_needs_a_file(tmp_path, arguments, message):
    done = python(tmp_path, "-m", "trn_kernels.recipes.plan", "table", *arguments, returncode=2)
    assert f"error: {message}" in done.stderr.splitlines()


def test_a_fault_of_another_package_keeps_its_traceback(monkeypatch, capsys):
    monkeypatch.setattr(plan, "_main", lambda arguments: json.loads("{"))
    assert plan.main([]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_the_documentation_has_what_plan_says(plans, tmp_path):
    """Two rows; the large models take a minute each."""
    lines = (ROOT / "docs" / "scale-out.md").read_text().splitlines()
    table = lines[lines.index(plan._BEGIN) + 3 : lines.index(plan._END)]
    assert [line.split()[1] for line in table] == [row.split()[0] for row in plan.ROWS]
    rows = [plan.ROWS.index(f"nki_qwen3_30b_a3b --ranks {flags}") for flags in ("64 --ep 8", "64 --tp 4 --ep 8")]
    code = f"""
from trn_kernels.recipes import cpu, plan
cpu.stub_triton()
cpu.prepare(always=True)
for row in {rows}:
    print(plan.table_row(plan.ROWS[row]))
"""
    assert python(tmp_path, "-c", code).stdout.splitlines() == [table[row] for row in rows]
