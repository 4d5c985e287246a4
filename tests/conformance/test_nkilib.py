"""AWS's nki-library on the emulator: its own test files, unmodified, and its larger kernels at small sizes.

Runs where the environment variable ``NKILIB_SRC`` names a checkout of https://github.com/aws-neuron/nki-library
(the state of 2026-04-13 is known to work); nothing of it is part of this repository. Without it everything here is
skipped, and says so. What is stubbed is in ``nkilib_plugin.py``.

The tests run in processes of their own: the library's folder ``test`` hides the package of that name in Python.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCE = os.environ.get("NKILIB_SRC")
# What the library's test suite needs and this project does not; the packages for devices and metrics are stubbed.
NEEDED = ("allpairspy", "filelock", "numpy", "scipy", "torch", "typing_extensions")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.skipif(not SOURCE, reason="NKILIB_SRC names no checkout of aws-neuron/nki-library"),
    pytest.mark.skipif(bool(SOURCE and MISSING), reason=f"nki-library's tests need {', '.join(MISSING)}"),
]

# File, options, and how many tests pass; the rest is skipped by the library itself (sizes in the name).
FILES = [
    ("core/embeddings/test_rope_hf.py", (), 21),
    ("core/embeddings/test_rope.py", (), 58),
    ("core/utils/test_cross_partition_copy.py", (), 20),
    ("core/utils/test_tp_broadcast.py", (), 4),
    ("experimental/dynamic_shapes/test_dynamic_elementwise_add.py", (), 5),
    ("core/max/test_cascaded_max.py", ("-m", "fast"), 24),
    ("core/router_topk/test_router_topk.py", ("-m", "fast"), 185),
    ("core/cumsum/test_cumsum.py", ("-m", "fast"), 3),
    ("core/attention/test_attention_bwd.py", ("-m", "fast"), 49),
    ("core/attention/test_attention_tkg.py", ("-m", "fast"), 140),
    ("core/moe_block/test_moe_block_tkg.py", ("-m", "fast"), 21),
    ("core/output_projection/test_output_proj_cte.py", ("-m", "fast"), 36),
    ("core/output_projection/test_output_proj_tkg.py", ("-m", "fast"), 30),
    ("core/qkv/test_qkv_cte.py", ("-m", "fast"), 15),
    ("core/subkernels/test_find_nonzero_indices.py", ("-m", "fast"), 5),
    ("core/subkernels/test_indexed_flatten.py", ("-m", "fast"), 5),
    ("core/subkernels/test_layernorm_tkg.py", ("-m", "fast"), 4),
    ("core/subkernels/test_rmsnorm_tkg.py", ("-m", "fast"), 8),
    ("core/topk/test_topk.py", ("-m", "fast"), 43),
    ("experimental/conv/test_conv1d.py", ("-m", "fast"), 34),
    ("experimental/conv/test_depthwise_conv1d.py", ("-m", "fast"), 5),
]


def run(tmp_path, *arguments) -> str:
    """Run pytest inside the library; its output."""
    root = Path(SOURCE)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            [str(HERE), str(root / "src"), str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rfE",
        "-c",
        str(root / "test/pytest.ini"),
        "--rootdir",
        str(root),
    ]
    command += ["-p", "nkilib_plugin", "-p", "no:cacheprovider", "--test-mode", "simulation", "--force-local-cleanup"]
    command += ["--output-directory", str(tmp_path), *arguments]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def passed(output: str) -> int:
    return int(re.findall(r"(\d+) passed", output)[-1])


@pytest.mark.parametrize("file, options, count", FILES, ids=[file for file, *_ in FILES])
def test_its_own_tests_pass_unmodified(tmp_path, file, options, count):
    path = Path(SOURCE) / "test/integration/nkilib" / file
    if not path.exists():
        pytest.skip(f"{file} is not in this checkout")
    output = run(tmp_path, str(path), *options)
    print(output.splitlines()[-1])
    # Other states of the library have other numbers of tests; none may fail, which run() sees.
    assert passed(output) >= min(count, 1)


def test_larger_kernels_match_their_references_at_small_sizes(tmp_path):
    output = run(tmp_path, "-p", "test.conftest", str(HERE / "nkilib_small.py"))
    print(output.splitlines()[-1])
    assert passed(output) >= 1
