"""Training steps on this CPU with our kernels in the emulator against the same steps with PyTorch operators.

    python -m trn_kernels.benchmarks.steps DIR

trains each debug recipe in one process that changes ``TRN_KERNELS_BACKEND`` from step to step, so that both kinds
see the same machine at about the same time. The emulator's time says nothing about a kernel's on a device; the ratio
says what a training on a laptop costs. Adds a line per recipe to DIR/steps.csv, which the report shows.
"""

from __future__ import annotations

import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RECIPES = {"native_qwen3_debug": 1.5, "nki_qwen3_moe_debug": 4.0}
"""Recipes and how many times a step with PyTorch operators one in the emulator may take."""
BACKENDS = ("reference", "emulator")
PAIRS, WARM_UP = 12, 3
COLUMNS = ("date", "commit", "versions", "recipe", "emulator_s", "reference_s", "ratio", "lowest", "highest", "pairs")
_TIMES = "TRN_KERNELS_STEP_TIMES"  # file that the training process writes


def ratios(seconds: list[tuple[str, float]]) -> tuple[float, float, list[float]]:
    """Median seconds of a step in the emulator and with PyTorch, and the ratio of every pair, after the warm-up.

    Args:
        seconds: (backend, duration) of every step, alternately of both.
    """
    pairs = list(zip(seconds[::2], seconds[1::2], strict=False))[WARM_UP:]
    assert pairs and all((a[0], b[0]) == BACKENDS for a, b in pairs), seconds
    reference, emulated = (statistics.median(pair[i][1] for pair in pairs) for i in range(2))
    return emulated, reference, [b / a for (_, a), (_, b) in pairs]


def run(recipe: str) -> list[tuple[str, float]]:
    """Train in a process of its own; (backend, seconds) of every step."""
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder, "times.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1", "--rdzv_backend=c10d"]
        command += ["--rdzv_endpoint=localhost:0", "-m", "trn_kernels.recipes.train"]
        command += ["--module", "trn_kernels.benchmarks.steps", "--config", recipe]
        command += ["--override.imports", "trn_kernels.overrides"]
        environment = os.environ | {_TIMES: str(times), "OMP_NUM_THREADS": "1"}
        # The recipe makes its tokenizer and text in the current folder.
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{recipe} failed:\n{(done.stdout + done.stderr)[-3000:]}")
        for backend in BACKENDS:
            if f" on {backend}:" not in done.stdout + done.stderr:
                raise RuntimeError(f"{recipe}: no operator ran on {backend}")
        return [tuple(step) for step in json.loads(times.read_text())]


def measure(folder: Path | None) -> list[dict[str, str]]:
    """Compare every recipe, and add a line for each to ``folder``/steps.csv."""
    from trn_kernels.benchmarks.results import this_run

    about = this_run("python -m trn_kernels.benchmarks.steps")
    rows = []
    for recipe in RECIPES:
        print(f"{recipe} ... ", end="", flush=True)
        emulated, reference, each = ratios(run(recipe))
        values = {
            "date": about.date,
            "commit": about.commit,
            "versions": about.versions,
            "recipe": recipe,
            "emulator_s": f"{emulated:.4f}",
            "reference_s": f"{reference:.4f}",
            "ratio": f"{statistics.median(each):.3f}",
            "lowest": f"{min(each):.3f}",
            "highest": f"{max(each):.3f}",
            "pairs": str(len(each)),
        }
        rows.append(values)
        print(f"{values['ratio']} x, {emulated:.3f} s and {reference:.3f} s", flush=True)
    if folder is not None:
        path = folder / "steps.csv"
        new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerows(rows)
    return rows


def section(folder: Path) -> list[str]:
    """Lines of the report: the last comparison of every recipe in ``folder``/steps.csv, nothing without the file."""
    path = folder / "steps.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        last = {row["recipe"]: row for row in csv.DictReader(file)}
    lines = ["", "## A training step on a CPU", ""]
    lines += [
        "Kernels in the emulator against PyTorch operators, in turn in one process: the median ratio of neighbouring",
        "steps. Wall time of this machine (`cpu`), which says nothing about a device.",
        "",
        "| recipe | ratio | lowest to highest | target | reached | step, s | with PyTorch, s | date | commit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for recipe, row in last.items():
        limit = RECIPES[recipe]
        reached = "yes" if float(row["ratio"]) <= limit else "no"
        cells = [f"`{recipe}`", row["ratio"], f"{row['lowest']} to {row['highest']}", f"at most {limit}", reached]
        cells += [row["emulator_s"], row["reference_s"], row["date"], row["commit"]]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


# -- in the training process ----------------------------------------------------------------------------


def native_qwen3_debug():
    """The recipe with steps that take turns."""
    return _in_turns("native_qwen3_debug")


def nki_qwen3_moe_debug():
    """The recipe with steps that take turns."""
    return _in_turns("nki_qwen3_moe_debug")


def _in_turns(recipe: str):
    from torchtitan.trainer import Trainer

    from trn_kernels.recipes import qwen3

    config = getattr(qwen3, recipe)()
    config.training.steps = 2 * PAIRS
    config.checkpoint.enable = False
    original, steps = Trainer.train_step, []

    def train_step(self, *args, **kwargs):
        backend = BACKENDS[len(steps) % 2]
        os.environ["TRN_KERNELS_BACKEND"] = backend
        start = time.perf_counter()
        result = original(self, *args, **kwargs)
        steps.append((backend, time.perf_counter() - start))
        Path(os.environ[_TIMES]).write_text(json.dumps(steps))
        return result

    Trainer.train_step = train_step
    return config


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m trn_kernels.benchmarks.steps DIR")
    measure(Path(sys.argv[1]))
