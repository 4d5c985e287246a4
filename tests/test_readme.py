"""The Python in the README runs as it stands there."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import trn_kernels

BLOCKS = [
    textwrap.dedent(block)
    for block in re.findall(
        r"^ *```python\n(.*?)^ *```", (Path(trn_kernels.__file__).parent / "README.md").read_text(), re.M | re.S
    )
]


def block(mark: str) -> str:
    (found,) = [b for b in BLOCKS if mark in b]
    return found


def test_own_model():
    scope = {}
    exec(block("query = torch.randn"), scope)
    assert scope["query"].shape == (2, 423, 32, 128)
    scope["query"].sum().backward()
    exec(block("y = grouped_experts"), scope)
    scope["y"].sum().backward()
    assert scope["w2"].grad.shape == (8, 256, 768)


def test_a_new_kernel(tmp_path):
    for room, mark in (("kernels", "@nki.jit"), ("ops", "scale_reference")):
        (tmp_path / room).mkdir()
        (tmp_path / room / "scale.py").write_text(block(mark))
    program = f"""
import trn_kernels.kernels, trn_kernels.ops
trn_kernels.kernels.__path__.append({str(tmp_path / "kernels")!r})
trn_kernels.ops.__path__.append({str(tmp_path / "ops")!r})
{block("emulator.install()")}
import torch
from trn_kernels.ops.scale import scale
x = torch.randn(100, 8, requires_grad=True)
y = scale(x, 3.0)
assert torch.equal(y, 3 * x)
y.sum().backward()
assert torch.equal(x.grad, torch.full_like(x, 3))
torch.library.opcheck(torch.ops.trn_kernels.scale, (x, 3.0))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("[[3. 3. 3.")
