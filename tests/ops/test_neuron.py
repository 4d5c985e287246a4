"""Backends, counters and the stand-ins of torch_neuronx."""

import os
import subprocess
import sys
import textwrap
import threading
import warnings

import pytest
import torch

from trn_kernels import emulator
from trn_kernels.ops import neuron, rope

emulator.install()

import nki  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402


def run(code: str, *path, **environment) -> str:
    """Run Python code in a fresh process; ``path`` goes to the front of its sys.path."""
    program = "\n".join([f"import sys; sys.path[:0] = {[str(p) for p in path]!r}", textwrap.dedent(code)])
    environment = {k: str(v) for k, v in environment.items()}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def call():
    query, key, table = torch.randn(1, 4, 2, 8), torch.randn(1, 4, 1, 8), torch.randn(4, 16)
    return rope(query, key, table)


# -- backends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value, ran",
    [(None, "emulator"), ("auto", "emulator"), ("emulator", "emulator"), ("reference", "reference")],
)
def test_backend_of_cpu_tensors(monkeypatch, value, ran):
    if value is None:
        monkeypatch.delenv("TRN_KERNELS_BACKEND", raising=False)
    else:
        monkeypatch.setenv("TRN_KERNELS_BACKEND", value)
    neuron.reset_launches()
    call()
    assert neuron.launches() == {("rope", ran): 1}


@pytest.mark.parametrize(
    "value, message",
    [
        ("neuron", "TRN_KERNELS_BACKEND=neuron: kernels cannot run on cpu, torch_neuronx is not loaded"),
        ("simulate", "AWS's nki package is not installed"),
        ("cpu", "'cpu' is not one of auto, neuron, simulate, emulator, reference"),
    ],
)
def test_what_cannot_be_honoured_is_an_error(monkeypatch, value, message):
    monkeypatch.setenv("TRN_KERNELS_BACKEND", value)
    neuron.reset_launches()
    with pytest.raises(ValueError, match=message):
        call()
    with pytest.raises(ValueError, match=message):  # nor where nothing would run
        rope(torch.randn(1, 0, 2, 8), torch.randn(1, 0, 1, 8), torch.randn(4, 16))
    assert neuron.launches() == {}


def test_an_empty_variable_is_unset(monkeypatch):
    for name in ("TRN_KERNELS_BACKEND", "NEURON_LOGICAL_NC_CONFIG", "NEURON_PLATFORM_TARGET_OVERRIDE"):
        monkeypatch.setenv(name, "")
    call()


def test_other_devices_run_the_reference_with_one_warning():
    neuron._warn_reference.cache_clear()
    with pytest.warns(UserWarning, match="no NKI kernel runs on xpu tensors"):
        assert neuron.backend_for(torch.device("xpu")) == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert neuron.backend_for(torch.device("xpu")) == "reference"


def test_a_simulator_takes_cpu_tensors(monkeypatch):
    monkeypatch.setenv("TRN_KERNELS_BACKEND", "emulator")
    with pytest.raises(ValueError, match="takes CPU tensors, not xpu"):
        neuron.backend_for(torch.device("xpu"))


@pytest.mark.parametrize("value", ["0", "3", "two"])
def test_lnc_is_one_or_two(monkeypatch, value):
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", value)
    with pytest.raises(ValueError, match=f"NEURON_LOGICAL_NC_CONFIG is '{value}'"):
        call()


def test_counters_are_safe_between_threads():
    neuron.reset_launches()
    threads = [threading.Thread(target=lambda: [call() for _ in range(20)]) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert neuron.launches() == {("rope", "emulator"): 80}


# -- nki_op and wrap_nki --------------------------------------------------------------------------------


@nki.jit
def add(a, b, scale=1.0):
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    x = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.sbuf)
    y = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=x, src=a)
    nisa.dma_copy(dst=y, src=b)
    nisa.scalar_tensor_tensor(dst=x, data=x, op0=nl.multiply, operand0=scale, op1=nl.add, operand1=y)
    nisa.dma_copy(dst=out, src=x)
    return out


@nki.jit
def overwrite(a):
    x = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.sbuf)
    nisa.memset(dst=x, value=0.0)
    nisa.dma_copy(dst=a, src=x)
    return a


def test_wrap_any_kernel():
    a, b = torch.randn(8, 4), torch.randn(8, 4)
    caller = neuron.wrap_nki(add)
    for grid in (1, 2, (2,), [1]):
        assert torch.equal(caller[grid](a, b), a + b)
    assert torch.equal(caller(a, b=b, scale=2.0), 2 * a + b)
    assert neuron.launches()["add", "emulator"] >= 5


@pytest.mark.parametrize("grid", [0, 3, (1, 2), "2", None])
def test_a_grid_is_one_or_two(grid):
    with pytest.raises(ValueError, match="1 or 2 physical cores"):
        neuron.wrap_nki(add)[grid]


def test_arguments_must_fit_the_signature():
    a = torch.randn(8, 4)
    for args, kwargs in (((a,), {}), ((a, a, 1.0, 2.0), {}), ((a, a), {"scael": 2.0}), ((a, a), {"b": a})):
        with pytest.raises(TypeError):
            neuron.wrap_nki(add)(*args, **kwargs)
    with pytest.raises(TypeError, match="needs a tensor argument"):
        neuron.wrap_nki(add)(1.0, 2.0)


def test_a_kernel_of_an_operator_writes_no_argument():
    a = torch.ones(8, 4)
    with pytest.raises(emulator.NKIError, match="kernel argument 'a'") as error:
        neuron.wrap_nki(overwrite)(a)
    assert error.value.rule == "read-only"
    assert torch.equal(a, torch.ones(8, 4))


def test_storages_can_be_resized_as_on_the_device():
    """FSDP and others free memory so; NumPy's memory would refuse."""
    a = torch.randn(8, 4)
    out = neuron.wrap_nki(add)(a, a)
    for tensor in (a, out):
        tensor.untyped_storage().resize_(0)


def test_a_fake_tensor_needs_a_fake(monkeypatch):
    with torch._subclasses.FakeTensorMode(), pytest.raises(TypeError, match="runs on plain tensors, not on FakeTensor"):
        neuron.wrap_nki(add)(torch.randn(8, 4), torch.randn(8, 4))


def test_no_reference_is_an_error(monkeypatch):
    monkeypatch.setenv("TRN_KERNELS_BACKEND", "reference")
    with pytest.raises(ValueError, match="add has no reference"):
        neuron.wrap_nki(add)(torch.randn(8, 4), torch.randn(8, 4))


def test_a_name_belongs_to_one_function():
    def first(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    def second(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    neuron.nki_op("trn_kernels::test_twice", first)
    with pytest.raises(ValueError, match="test_twice is already registered by .*first"):
        neuron.nki_op("trn_kernels::test_twice", second)


# -- what is imported, and the device path --------------------------------------------------------------


def test_imports_stay_light():
    out = run(
        """
        import sys, time
        start = time.perf_counter()
        import trn_kernels
        assert time.perf_counter() - start < 0.1
        assert "torch" not in sys.modules
        import trn_kernels.ops
        heavy = ("torchtitan", "transformers", "torch_neuronx", "nki", "nkilib", "neuronxcc")
        print([m for m in heavy if m in sys.modules])
        """
    )
    assert out == "[]"


def test_the_real_nki_simulates(tmp_path):
    """A stand-in of AWS's package: on it CPU tensors run in *its* ``nki.simulate``."""
    package = tmp_path / "nki"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from trn_kernels.emulator.machine import jit, simulate as _simulate\n"
        "calls = []\n"
        "def simulate(kernel):\n    calls.append(kernel.lnc)\n    return _simulate(kernel)\n"
    )
    for name in ("isa", "language", "typing"):
        (package / f"{name}.py").write_text(
            f"from trn_kernels.emulator import {name} as _m\nglobals().update(vars(_m))\n"
        )
    out = run(
        """
        import os, torch
        from trn_kernels.ops import rope, neuron
        call = lambda: rope(torch.randn(1, 4, 2, 8), torch.randn(1, 4, 1, 8), torch.randn(4, 16))
        call()
        os.environ["TRN_KERNELS_BACKEND"] = "emulator"
        try:
            call()
        except ValueError as e:
            print(e)
        import nki
        print(neuron.launches(), nki.calls, os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"])
        """,
        tmp_path,
    )
    assert out.splitlines() == [
        "TRN_KERNELS_BACKEND=emulator: AWS's nki package is installed, kernels use it; take simulate",
        "{('rope', 'simulate'): 1} [2] trn2",
    ]


def test_the_device_path(tmp_path):
    """Stand-ins of torch_neuronx and of a "neuron" device that only traces: the documented calls are made."""
    package = tmp_path / "torch_neuronx"
    package.mkdir()
    (package / "__init__.py").write_text(
        textwrap.dedent(
            """
            import torch
            log = []
            def nki_op(name, fn=None, mutates_args={}):
                log.append(("nki_op", name))
                return torch.library.custom_op(name, fn, mutates_args=mutates_args)
            class Caller:
                def __init__(self, kernel, grid=()):
                    self.kernel, self.grid = kernel, grid
                def __getitem__(self, grid):
                    return Caller(self.kernel, tuple(grid))
                def __call__(self, query, key, *rest):
                    log.append(("launch", self.kernel.__name__, self.grid, query.device.type, rest[-2:]))
                    return torch.empty_like(query), torch.empty_like(key)
            def wrap_nki(kernel):
                log.append(("wrap_nki", kernel.__name__))
                return Caller(kernel)
            """
        )
    )
    (package / "utils.py").write_text("def get_logical_neuron_cores():\n    return '1'\n")
    out = run(
        """
        import torch, torch_neuronx
        torch.utils.backend_registration._setup_privateuseone_for_python_backend("neuron")
        from torch._subclasses import FakeTensorMode
        from trn_kernels.ops import neuron
        from trn_kernels.ops.rope import _rope, _rope_backward
        torch_neuronx.log.clear()
        with FakeTensorMode():
            make = lambda *shape: torch.empty(*shape, device="neuron")
            args = (make(1, 4, 2, 8), make(1, 4, 1, 8), make(4, 16), None, False)
            for _ in range(2):
                out = _rope(*args, False)
            _rope_backward[2](*args, True)
            assert out[0].device.type == "neuron"
            try:
                _rope(*args, False, "surplus")
            except TypeError as e:
                print(e)
        for entry in torch_neuronx.log:
            print(*entry)
        print(neuron.launches())
        """,
        tmp_path,
    )
    assert out.splitlines() == [
        "too many positional arguments",
        "wrap_nki rope",
        "launch rope (1,) neuron (False, False)",
        "launch rope (1,) neuron (False, False)",
        "launch rope (2,) neuron (False, True)",
        "{}",
    ]


def test_operators_register_through_torch_neuronx(tmp_path):
    (tmp_path / "torch_neuronx.py").write_text(
        "import torch\nnames = []\n"
        "def nki_op(name, fn=None, mutates_args={}):\n"
        "    names.append(name)\n    return torch.library.custom_op(name, fn, mutates_args=mutates_args)\n"
    )
    out = run("import torch_neuronx, trn_kernels.ops; print(*torch_neuronx.names)", tmp_path)
    names = [f"trn_kernels::{op}" for op in ("rope", "rope_hf", "grouped_experts")]
    assert sorted(out.split()) == sorted([*names, *(f"{name}_backward" for name in names)])
