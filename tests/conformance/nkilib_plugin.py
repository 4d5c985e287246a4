"""Pytest plugin for nki-library's own tests: the emulator in place of the packages that they expect.

Loaded by ``test_nkilib.py`` with ``-p nkilib_plugin`` in a process of its own, never in ours. What is stubbed, and
nothing else: the internal packages ``nki_cpu_simulator``, ``neuron_dtypes`` and two modules of ``neuronxcc``; two
files that are missing in the public tree; and packages that serve devices and metrics, where they are absent.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types

import ml_dtypes
import numpy as np

from trn_kernels import emulator
from trn_kernels.emulator.machine import simulate

# The tests set it to gen3 themselves; it must not be the target of another machine.
os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"] = "trn2"
emulator.install()

import nki  # noqa: E402
import nki.isa  # noqa: E402
import nki.isa.constants  # noqa: E402


def module(name: str, **names) -> types.ModuleType:
    """A module of this name with these attributes, importable."""
    made = types.ModuleType(name)
    made.__path__ = []
    made.__dict__.update(names)
    sys.modules[name] = made
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, made)
    return made


# -- the simulator that the tests look for --------------------------------------------------------------


nki.cpu_simulate = simulate
module("nki_cpu_simulator", nki=nki)
sys.modules["nki_cpu_simulator.nki"] = nki
for name in ("isa", "isa.constants", "language", "typing"):
    sys.modules[f"nki_cpu_simulator.nki.{name}"] = sys.modules[f"nki.{name}"]
sys.modules["nki_cpu_simulator.nki.language.dtypes"] = sys.modules["nki.dtype"]
for name in ("builtin", "compiler", "tensor"):
    setattr(nki, name, module(f"nki_cpu_simulator.nki.{name}"))

# -- dtypes ---------------------------------------------------------------------------------------------

_FLOATS = (np.floating, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)


def static_cast(array, dtype):
    return np.asarray(array).astype(dtype)


def is_float_type(dtype) -> bool:
    scalar = np.dtype(dtype).type
    return issubclass(scalar, np.floating) or scalar in _FLOATS


module(
    "neuron_dtypes",
    static_cast=static_cast,
    is_float_type=is_float_type,
    bfloat16=ml_dtypes.bfloat16,
    float8_e4m3=ml_dtypes.float8_e4m3,
    float8_e4m3fn=ml_dtypes.float8_e4m3fn,
    float8_e5m2=ml_dtypes.float8_e5m2,
    # Of trn3, no test that runs here uses them.
    float8_e4m3fn_x4="float8_e4m3fn_x4",
    float8_e5m2_x4="float8_e5m2_x4",
    float4_e2m1fn_x4="float4_e2m1fn_x4",
)
for name in ("neuronxcc", "neuronxcc.nki", "neuronxcc.starfish", "neuronxcc.starfish.support"):
    module(name)
module("neuronxcc.nki.typing", mutable_tensor=nki.typing.mutable_tensor)
module("neuronxcc.starfish.support.dtype", static_cast=static_cast)

# -- files that the public tree lacks -------------------------------------------------------------------


class _Missing:
    """Stands for a class that only runs on devices use."""


module("test.utils.perf_analysis_private", analyze_trace=None)
module("test.utils.scripts")
module("test.utils.scripts.remote_lock_scripts", LockStatus=_Missing, LockResult=_Missing)


# -- packages for devices and metrics -------------------------------------------------------------------

_SERVICES = ("aws_embedded_metrics", "boto3", "botocore", "fabric2", "paramiko", "plotext", "pytest_html")


class _Service(types.ModuleType):
    """Any name is a class, so that annotations, bases and ``except`` clauses hold."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (Exception,), {})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in _SERVICES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Service(spec.name)

    def exec_module(self, module):
        pass


# Last: a package that is installed is used.
sys.meta_path.append(_Finder())


def pytest_configure():
    from test.utils.test_orchestrator import Orchestrator

    # Never set in simulation at the published state of the library, but read.
    Orchestrator._compiled_kernel = None
