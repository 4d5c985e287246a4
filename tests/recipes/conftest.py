import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def train(tmp_path):
    """Function that trains a config of `recorded.py`; every run of a test shares the current folder's assets."""

    def run(name: str, config: str, *flags: str, processes: int = 2) -> tuple[list, str]:
        """What each step recorded, and the log. Outputs are in the folder `name` of `tmp_path`."""
        record = tmp_path / f"{name}.jsonl"
        command = f"""
            -m torch.distributed.run --nproc_per_node={processes} --rdzv_backend c10d --rdzv_endpoint localhost:0
            --local-ranks-filter 0 --role rank --tee 3
            -m trn_kernels.recipes.train --module recorded --config {config} --dump_folder {name}
            --debug.seed 42 --debug.deterministic
        """
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
            "RECORD": str(record),
            "HF_HOME": str(tmp_path / "hf"),
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [sys.executable, *command.split(), *flags],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout
        return [json.loads(line) for line in record.read_text().splitlines()], done.stdout

    return run
