"""The command of the README, in two processes, with and without the override: the same training, bit for bit."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

LAYERS, STEPS = 4, 10


def train(folder: Path, dtype: str, *flags: str) -> tuple[list, str]:
    """Loss, maximum loss and gradient norm of each step, and the log."""
    record = folder / f"{dtype}-{len(flags)}.jsonl"
    command = f"""
        -m torch.distributed.run --nproc_per_node=2 --rdzv_backend c10d --rdzv_endpoint localhost:0
        --local-ranks-filter 0 --role rank --tee 3
        -m trn_kernels.recipes.train --module recorded --config debug
        --training.steps {STEPS} --training.seq_len 128 --training.mixed_precision_param {dtype}
        --debug.seed 42 --debug.deterministic
    """
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parent),
        "RECORD": str(record),
        "HF_HOME": str(folder / "hf"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *command.split(), *flags],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    return [json.loads(line) for line in record.read_text().splitlines()], done.stdout


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_override_trains_the_same(tmp_path_factory, dtype):
    folder = tmp_path_factory.mktemp("run")
    stock, log = train(folder, dtype)
    assert "[Override]" not in log
    assert "[Launches] none" in log
    ours, log = train(folder, dtype, "--override.imports", "trn_kernels.overrides")
    assert log.count("[Override] trn_kernels.overrides: model_spec.model.layers.") == LAYERS
    for op in ("rope", "rope_backward"):
        assert f"[Launches] {op} on emulator: {LAYERS * STEPS}\n" in log
    assert " on reference: " not in log
    assert len(stock) == STEPS
    assert ours == stock
    losses = [loss for loss, _, _ in ours]
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
