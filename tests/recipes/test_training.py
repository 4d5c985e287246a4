"""The commands of the README, in two processes, with and without an override."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

LAYERS, STEPS = 4, 10


def launched(log: str) -> dict[str, int]:
    """Launches of rank 0 by operator and backend."""
    lines = [line.partition("[Launches] ")[2] for line in log.splitlines() if "[Launches] " in line]
    return {name: int(count) for name, count in (line.split(": ") for line in lines if line != "none")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rope_trains_the_same_bit_for_bit(train, dtype):
    flags = f"--training.steps {STEPS} --training.seq_len 128 --training.mixed_precision_param {dtype}".split()
    stock, log = train("stock", "debug", *flags)
    assert "[Override]" not in log
    assert "[Launches] none" in log
    ours, log = train("ours", "debug", *flags, "--override.imports", "trn_kernels.overrides")
    assert log.count("[Override] trn_kernels.overrides: model_spec.model.layers.") == LAYERS
    assert launched(log) == dict.fromkeys(("rope on emulator", "rope_backward on emulator"), LAYERS * STEPS)
    assert len(stock) == STEPS
    assert ours == stock
    losses = [loss for loss, _, _ in ours]
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]


def test_torchrun_trains_the_same(train, tmp_path):
    """The launcher of the tests is another one."""
    flags = ["--training.steps", "2", "--training.seq_len", "128", "--override.imports", "trn_kernels.overrides"]
    ours, _ = train("ours", "debug", *flags)
    command = """
        -m torch.distributed.run --nproc_per_node=2 --rdzv_backend c10d --rdzv_endpoint localhost:0
        --local-ranks-filter 0 --role rank --tee 3
        -m trn_kernels.recipes.train --module recorded --config debug --dump_folder torchrun
        --debug.seed 42 --debug.deterministic
    """
    record = tmp_path / "torchrun.record"
    environment = {"PYTHONPATH": str(Path(__file__).parent), "RECORD": str(record), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command.split(), *flags],
        cwd=tmp_path,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    assert launched(done.stdout) == dict.fromkeys(("rope on emulator", "rope_backward on emulator"), 2 * LAYERS)
    steps = [json.loads(line) for line in record.read_text().splitlines()]
    assert sorted(steps) == sorted(2 * ours)  # of both ranks


def test_experts_train_like_stock(train):
    """The recipe as it is; then with torchtitan's experts and the same RoPE. Both multiply in bfloat16."""
    ours, log = train("ours", "moe_debug")
    assert log.count(" CosSinRoPE.Config -> NKIRoPE.Config") == LAYERS
    assert log.count(" GroupedExperts.Config -> NKIGroupedExperts.Config") == LAYERS
    operators = ("grouped_experts", "grouped_experts_backward", "rope", "rope_backward")
    assert launched(log) == {f"{operator} on emulator": LAYERS * STEPS for operator in operators}
    stock, log = train("stock", "moe_debug", "--override.imports", "trn_kernels.overrides.nki_rope")
    assert set(launched(log)) == {"rope on emulator", "rope_backward on emulator"}
    assert len(ours) == len(stock) == STEPS
    for step, (mine, theirs) in enumerate(zip(ours, stock, strict=True), 1):
        assert mine[0] == pytest.approx(theirs[0], rel=1e-3), f"loss of step {step}"
    assert ours[0][2] == pytest.approx(stock[0][2], rel=1e-3)
    assert ours[-1][0] < ours[0][0]
