"""Golden losses: the debug recipes give them, and a change is seen."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trn_kernels.recipes import golden, verify

GOLDEN = Path(__file__).with_name("golden")


def train(folder, config, *flags):
    command = f"""
        -m torch.distributed.run --nproc_per_node=1 --rdzv_backend c10d --rdzv_endpoint localhost:0
        -m trn_kernels.recipes.train --module trn_kernels.recipes.golden --config {config}
    """
    done = subprocess.run(
        [sys.executable, *command.split(), *flags],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HOME": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    (folder / "log").write_text(done.stdout)
    return folder / "log"


def test_every_debug_recipe_has_a_golden_file():
    assert {file.stem for file in GOLDEN.iterdir()} == {name for name in vars(golden) if name.endswith("_debug")}


@pytest.mark.parametrize("config", ["native_qwen3_debug", "nki_qwen3_moe_debug", "v5_qwen3_debug"])
def test_recipes_give_their_golden_losses(tmp_path, config):
    # The golden file of the first is of a run without our RoPE: both have the same bits.
    flags = ["--override.imports", "trn_kernels.overrides.nki_rope"] if config.startswith("native") else []
    report = verify.verify_losses(train(tmp_path, config, *flags), GOLDEN / f"{config}.json")
    assert report.problems == [], str(report)


def test_a_changed_loss_is_seen(tmp_path):
    """The first step is the same, but it learns more slowly. Read from TensorBoard's events."""
    train(tmp_path, "native_qwen3_debug", "--lr_scheduler.warmup_steps", "3", "--metrics.enable_tensorboard")
    report = verify.verify_losses(tmp_path / "outputs" / "tb", GOLDEN / "native_qwen3_debug.json")
    assert [problem.partition(" is ")[0] for problem in report.problems] == [f"loss of step {n}" for n in range(2, 6)]
    assert verify.main(["losses", str(tmp_path / "log"), str(GOLDEN / "native_qwen3_debug.json")]) == 1


def test_comparison(tmp_path, capsys):
    right = {step: {"loss": 7.0 / step, "grad_norm": 1.5} for step in (1, 2, 3)}
    verify.write_losses(right, tmp_path / "golden.json", tolerance=1e-3)
    assert verify.read_losses(tmp_path / "golden.json")[2] == {"loss": 3.5, "grad_norm": 1.5}

    def problems(change, tolerance=None):
        run = json.loads(json.dumps({"steps": {str(k): v for k, v in right.items()}}))
        change(run["steps"])
        (tmp_path / "run.json").write_text(json.dumps(run))
        return verify.verify_losses(tmp_path / "run.json", tmp_path / "golden.json", tolerance).problems

    assert problems(lambda steps: steps.update({"4": {"loss": 9.0, "grad_norm": 1.0}})) == []
    assert problems(lambda steps: steps["2"].update(loss=3.5 * 1.0009)) == []
    assert problems(lambda steps: steps["2"].update(loss=3.5 * 1.0009), 1e-4) == [
        "loss of step 2 is 3.50315, golden 3.5: differs by 9.0e-04, more than 1.0e-04"
    ]
    assert len(problems(lambda steps: steps["3"].update(loss=float("nan")))) == 1
    assert problems(lambda steps: steps.pop("3")) == [f"no loss of step 3 in {tmp_path / 'run.json'}"]

    (tmp_path / "empty.log").write_text("nothing\n")
    assert verify.main(["losses", str(tmp_path / "empty.log"), str(tmp_path / "golden.json")]) == 1
    assert f"FAIL no losses in {tmp_path / 'empty.log'}" in capsys.readouterr().out
    assert verify.main(["losses", str(tmp_path / "golden.json"), "--write", str(tmp_path / "copy.json")]) == 0
    assert verify.read_losses(tmp_path / "copy.json") == right | {3: {"loss": 2.33333, "grad_norm": 1.5}}
    with pytest.raises(SystemExit):
        verify.main(["losses", str(tmp_path / "golden.json")])
    assert "give either a second run or --write" in capsys.readouterr().err


def test_fixed_tokens():
    def batches(rank, ranks, samples):
        config = golden.FixedTokens.Config()
        return golden.FixedTokens(config, dp_rank=rank, dp_world_size=ranks, seq_len=16, local_batch_size=samples)

    whole, halves = batches(0, 1, 4), [iter(batches(rank, 2, 2)) for rank in range(2)]
    stream, seen = iter(whole), []
    for _ in range(3):
        inputs, labels = next(stream)
        parts = [next(half) for half in halves]
        assert torch.equal(inputs["input"], torch.cat([part["input"] for part, _ in parts]))
        assert torch.equal(inputs["input"][:, 1:], labels[:, :-1])
        assert inputs["positions"][0].tolist() == [*range(8), *range(8)]
        seen += inputs["input"].tolist()
    assert len({tuple(row) for row in seen}) == 12
    resumed = batches(0, 1, 4)
    resumed.load_state_dict(whole.state_dict())
    assert torch.equal(next(iter(resumed))[1], next(stream)[1])
