"""The Python in the README runs as it stands there."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path
from unittest.mock import patch

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


def test_transformers_alone(capsys):
    exec(block("use_nki_kernels"), {})
    assert "'model.layers.1.self_attn': 'trn_kernels::rope'" in capsys.readouterr().out


def test_an_override_of_some_layers():
    from torchtitan.config.override import _REGISTRY

    with patch.dict(_REGISTRY):
        exec(block("nki_experts_10_to_19"), {"__name__": "my_overrides"})
        assert _REGISTRY["my_overrides.nki_experts_10_to_19"].fqns == ["*.layers.1[0-9].*"]


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
