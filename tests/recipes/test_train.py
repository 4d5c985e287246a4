"""The launcher: what it takes off sys.path, and that it reports launches."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import trn_kernels
from trn_kernels.recipes.train import drop_package_folder

ROOT = Path(trn_kernels.__file__).resolve().parent


def test_only_the_package_folder_is_dropped(monkeypatch, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(ROOT)
    kept = [str(tmp_path), str(ROOT.parent), str(ROOT / "kernels"), "/nowhere"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(ROOT), f"{ROOT}/", str(link), *kept])
    drop_package_folder()
    assert sys.path == ["", *kept]  # the empty entry is the current folder, here the user's
    monkeypatch.chdir(ROOT)
    drop_package_folder()
    assert sys.path == kept


def run_python(arguments, cwd, path):
    environment = os.environ | {"PYTHONPATH": str(path), "RANK": "0"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def installed(tmp_path):
    """A folder with a package of the name of one of ours, and a config module that tells which one it gets."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("")
    (tmp_path / "probe.py").write_text(
        "def config():\n    import kernels\n    raise RuntimeError('kernels is ' + kernels.__file__)\n"
    )
    return tmp_path


def test_our_folders_do_not_shadow_packages(installed):
    stand_in = str(installed / "kernels" / "__init__.py")
    plain = run_python(["-c", "import kernels; print(kernels.__file__)"], ROOT, installed)
    assert plain.stdout.strip() != stand_in  # so there is something to take care of
    arguments = ["-m", "trn_kernels.recipes.train", "--module", "probe", "--config", "config"]
    done = run_python(arguments, ROOT, installed)
    assert f"RuntimeError: kernels is {stand_in}" in done.stderr
    # The launches are reported although the run failed.
    assert "[Launches] none" in done.stdout + done.stderr
    assert done.returncode != 0
