"""What is installed against what is supported, the device, and where each operator would run.

    python -m trn_kernels.recipes.env

The exit status is 1 if something that is needed here is missing or of another version.
"""

import importlib
import importlib.metadata
import platform
import re
import sys

OPERATORS = ("rope", "rope_hf", "grouped_experts")

# Not on the public index, or empty placeholders there; what the kernels are written for.
_NEURON = {"torch-neuronx": "", "nki": ">=0.3,<0.8", "nki-library": "", "torchtitan-neuron": ""}
_MODULES = {"torch-neuronx": "torch_neuronx", "nki": "nki.isa", "nki-library": "nkilib"}


def packages() -> list[tuple[str, str, str, str]]:
    """(name, installed version, supported versions, verdict) of each package that matters.

    The verdict is ok, missing, unsupported, or optional (not there, and needed on Neuron machines only).
    """
    rows = []
    for name, wanted in _supported().items():
        found = _version(name)
        if found is None:
            rows.append((name, "-", wanted or "any", "optional" if name in _NEURON else "missing"))
        else:
            rows.append((name, found, wanted or "any", "ok" if _fits(found, wanted) else "unsupported"))
    return rows


def _supported() -> dict[str, str]:
    """Package -> version specifier: Python and the extras `torch` and `train` of this package, and Neuron's."""
    metadata = importlib.metadata.metadata("trn_kernels")
    wanted = {"python": metadata["Requires-Python"]}
    for requirement in metadata.get_all("Requires-Dist"):
        match = re.match(r"(torch|torchtitan|transformers)\s*([<>=!~,.\d]+); extra == ", requirement)
        if match:
            wanted[match[1]] = match[2]
    return wanted | _NEURON


def _version(name: str) -> str | None:
    if name == "python":
        return platform.python_version()
    if name in _MODULES and not _importable(_MODULES[name]):
        return None  # absent, or the empty placeholder of that name
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown" if name in _MODULES else None


def _importable(module: str) -> bool:
    from trn_kernels import emulator

    if module.startswith("nki."):
        return emulator.real_nki()
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _fits(version: str, wanted: str) -> bool:
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    try:
        return SpecifierSet(wanted).contains(version, prereleases=True)
    except InvalidVersion:
        return not wanted


def device() -> tuple[str, int]:
    """Type of the device that a training would use, and how many there are (on Neuron: logical cores)."""
    import torch

    from trn_kernels.recipes.cpu import accelerator

    name = accelerator()
    return ("cpu", 1) if name is None else (name, torch.get_device_module(name).device_count())


def backends(device_type: str) -> dict[str, str]:
    """Operator -> backend that its kernel would run on for tensors of `device_type`, or why it would not."""
    import torch

    from trn_kernels.ops.neuron import backend_for

    try:
        backend = backend_for(torch.device(device_type))
    except ValueError as error:
        backend = f"error: {error}"
    return dict.fromkeys(OPERATORS, backend)


def main() -> int:
    """Print the table; returns the exit status."""
    rows = packages()
    for name, found, wanted, verdict in rows:
        print(f"{name:<18} {found:<18} {wanted:<18} {verdict}")
    missing = {name for name, _, _, verdict in rows if verdict in ("missing", "unsupported")}
    if "torch" not in {name for name, _, _, verdict in rows if verdict == "missing"}:
        from trn_kernels.ops.neuron import logical_neuron_cores

        kind, count = device()
        if kind == "neuron":
            missing |= {
                name for name, _, _, verdict in rows if verdict == "optional" and name in ("torch-neuronx", "nki")
            }
        unit = "" if kind == "cpu" else f", {count} {'logical cores' if kind == 'neuron' else 'devices'}"
        print(f"{'device':<18} {kind}{unit}")
        print(f"{'LNC':<18} {logical_neuron_cores()}")
        for operator, backend in backends(kind).items():
            print(f"{operator:<18} {backend}")
            missing |= {operator} if backend.startswith("error") else set()
    print(f"NOT READY: {', '.join(sorted(missing))}" if missing else "OK")
    return 1 if missing else 0


if __name__ == "__main__":
    from trn_kernels.recipes.train import drop_package_folder

    drop_package_folder()
    sys.exit(main())
