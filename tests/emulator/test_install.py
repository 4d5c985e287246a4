"""What ``import nki`` means: the emulator, AWS's package, or the empty package of the public index."""

import os
import subprocess
import sys
import textwrap

import pytest

CHECK = """
import sys
from trn_kernels import emulator
print(emulator.installed(), emulator.real_nki(), "torch" in sys.modules)
emulator.install()
import nki, nki.isa as nisa, nki.language as nl, nki.typing as nt
from nki.isa import dma_copy
from nki.language import float32
print(emulator.installed(), emulator.real_nki(), nki.__version__)
emulator.install()
print(emulator.installed(), nki.isa is nisa, nki.language is nl)
"""
REAL = {
    "nki/__init__.py": "__version__ = '0.6.0'\n",
    "nki/isa/__init__.py": "def dma_copy(): pass\n",
    "nki/language.py": "float32 = 'float32'\n",
    "nki/typing.py": "",
}
ABSENT = "False False False\nTrue False 0.7.0+emulator\nTrue True True"


def run(path, code) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", f"import sys\nsys.path.insert(0, {str(path)!r})\n{textwrap.dedent(code)}"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        timeout=120,
    )


@pytest.mark.parametrize(
    "files, wanted",
    [
        ({}, ABSENT),
        # As on the public index: a package without a module, also as one file or as a bare folder.
        ({"nki/__init__.py": "__version__ = '0.0.1'\n"}, ABSENT),
        ({"nki.py": ""}, ABSENT),
        ({"nki/README": ""}, ABSENT),
        (REAL, "False True False\nFalse True 0.6.0\nFalse True True"),
    ],
    ids=["absent", "placeholder", "module", "folder", "real"],
)
def test_install(tmp_path, files, wanted):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    result = run(tmp_path, CHECK)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == wanted


def test_a_broken_real_package_is_an_error_not_a_fallback(tmp_path):
    for name, text in {**REAL, "nki/__init__.py": "raise ImportError('libneuron is missing')\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    result = run(tmp_path, "from trn_kernels import emulator\nemulator.install()")
    assert result.returncode != 0 and "libneuron is missing" in result.stderr


def test_kernels_run_after_install_without_torch(tmp_path):
    code = """
    from trn_kernels import emulator
    emulator.install()
    import numpy as np, nki, nki.isa as nisa, nki.language as nl

    @nki.jit
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        nisa.dma_copy(out, x)
        return out

    print(nki.simulate(kernel)(np.arange(3, dtype=np.int32)).tolist(), "torch" in sys.modules)
    """
    result = run(tmp_path, code)
    assert result.stdout.strip() == "[0, 1, 2] False", result.stderr
