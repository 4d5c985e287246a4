"""The fine-tune recipes as they are run: their loss is Transformers', their export is exact, a kill loses nothing."""

import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from trn_kernels.recipes.verify import verify_export, verify_log

LAYERS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The current folder of the runs of a test; they share its assets."""
    return tmp_path_factory.mktemp("finetune")


@pytest.fixture
def train(workers, folder):
    """Function that trains a config of `finetuned.py`."""

    def run(name: str, config: str, *flags: str, processes: int = 2, kill: str = ""):
        """The recorded steps and the log of rank 0, and which rank failed with which status, or None."""
        arguments = ["--module", "finetuned", "--config", config, "--debug.seed", "42", "--debug.deterministic"]
        arguments += ["--dump_folder", name.split(" ")[0], *flags]
        done = workers.run(name, *arguments, processes=processes, folder=folder, may_fail=True, KILL=kill)
        (folder / f"{name}.log").write_text(done.logs[0])
        return done.records[0], done.logs[0], done.failed

    return run


def values(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


@pytest.fixture
def batch():
    """What the ranks of a run train on, all of it."""
    from finetuned import Uneven

    return next(iter(Uneven(Uneven.Config(), dp_rank=0, seq_len=64, local_batch_size=4)))


def plain_loss(weights: Path, inputs: dict, labels: torch.Tensor) -> float:
    """Loss of plain Transformers."""
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32, attn_implementation="sdpa")
    with torch.no_grad():
        # The mask of ones keeps Transformers from separating the documents, which our recipes do not do.
        logits = model(
            inputs["input"], position_ids=inputs["positions"], attention_mask=torch.ones_like(labels), use_cache=False
        ).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()


RUNS = [
    ("v5", "checkpoint_qwen3_debug_ft", "assets/debug_qwen3", 2e-5),
    ("v5_stock", "checkpoint_qwen3_debug_ft", "assets/debug_qwen3", 2e-5),
    ("native", "checkpoint_native_qwen3_debug_ft", "assets/debug_qwen3", 2e-5),
    ("moe", "checkpoint_qwen3_moe_debug_ft", "assets/debug_qwen3_moe", 1e-3),
]


@pytest.mark.parametrize(("config", "checkpoint", "weights", "tolerance"), RUNS, ids=[run[0] for run in RUNS])
def test_first_loss_is_transformers_and_the_export_is_exact(
    train, folder, batch, config, checkpoint, weights, tolerance
):
    """Two processes, one step of learning rate 0, in which each tensor goes in, through FSDP, and out again."""
    flags = ["--override.imports", "trn_kernels.overrides"] if config == "native" else []
    steps, log, failed = train(config, config, *flags)
    assert failed is None, log
    expected = plain_loss(folder / weights, *batch)
    assert abs(steps[0][1] - expected) < tolerance
    kernels = config != "v5_stock"
    assert f"[Launches] {f'rope on emulator: {LAYERS}' if kernels else 'none'}\n" in log
    assert f"[Launches] {f'rope_backward on emulator: {LAYERS}' if kernels else 'none'}\n" in log

    export = folder / config / checkpoint / "step-1"
    report = verify_export(export, folder / weights, max_logit_difference=0.0)
    assert report.problems == []
    ours, theirs = values(export), values(folder / weights)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]), name
    assert not list(folder.glob("*/*/.unfinished*"))

    wanted = {"v5": ("self_attn",), "native": (".rope",), "moe": (".rope", ".inner_experts")}.get(config, ())
    report, found = verify_log(
        folder / f"{config}.log", ranks=2, first_loss=round(expected, 2), tolerance=0.01, overrides=wanted
    )
    assert report.problems == []
    assert (found.layers, found.ranks, len(found.overrides)) == (LAYERS, 2, len(wanted))
    assert found.loaded == str(folder / weights)


def test_killed_runs_resume_with_the_same_losses(train, folder):
    whole, log, failed = train("whole", "killed", processes=1)
    assert failed is None, log
    assert [step for step, _, _ in whole] == [1, 2, 3, 4, 5, 6]
    checkpoint = folder / "cut" / "checkpoint_native_qwen3_debug_ft"

    runs, names = [], []
    for kill, left in (("save 4", {"step-2", "step-4"}), ("export", {"step-2", "step-4", ".unfinished-6"}), ("", None)):
        steps, log, failed = train(f"cut {len(runs)}", "killed", processes=1, kill=kill)
        assert failed == ((0, -signal.SIGKILL) if kill else None), log
        if kill:
            assert {path.name for path in checkpoint.iterdir()} == left
        runs.append(steps)
        names.append([step for step, _, _ in steps])
    # The first run ends in the save of step 4, the others start after the last whole checkpoint before.
    assert names == [[1, 2, 3, 4], [3, 4, 5, 6], [5, 6]]
    for steps in runs:
        for step in steps:
            assert step == whole[step[0] - 1]
    ours, theirs = (values(folder / run / checkpoint.name / "step-6") for run in ("cut", "whole"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert verify_export(checkpoint / "step-6").problems == []
