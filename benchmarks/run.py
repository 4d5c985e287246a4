"""Benchmarks of the kernels, and the report.

    python benchmarks/run.py --out docs/benchmarks

measures the default set on every backend that this machine has, appends the rows to results.csv in that folder and
writes report.md and its plots there: always of the rows of this run. `--backend model` takes one only, `--only` the
cases whose description contains a text, `--list` shows them.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if __package__ in (None, ""):
    # As a script: this folder must not be where Python looks for packages, its files have common names.
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != here]

from trn_kernels import emulator
from trn_kernels.benchmarks import grouped_experts, report, results, rope, steps
from trn_kernels.benchmarks.measure import BACKENDS, CAPTURE, Case, make_backends


def all_cases(full: bool = False) -> list[Case]:
    """Every case once."""
    return list({describe(case): case for case in (*rope.cases(full), *grouped_experts.cases(full))}.values())


def describe(case: Case) -> str:
    return f"{case.op} {case.direction}, {case.implementation}, {case.shape}, LNC {case.lnc}"


def measure(cases: list[Case], backends: list, run: results.Run, csv: Path | None) -> list[dict[str, str]]:
    """Measure every case on every backend that can, showing progress; rows are kept as they come."""
    pairs = [(backend, case) for backend in backends for case in cases if backend.can(case)]
    rows = []
    for number, (backend, case) in enumerate(pairs, 1):
        print(f"[{number:3}/{len(pairs)}] {backend.name:5} {describe(case)} ... ", end="", flush=True)
        start = time.perf_counter()
        row = results.row(run, case, backend.measure(case))
        rows.append(row)
        if csv is not None:
            results.append(csv, [row])
        ratio = float(row["time_us"]) / float(row["bound_us"])
        result = f"{float(row['time_us']):,.1f} us" + ("" if backend.name == "cpu" else f", {ratio:.2f} x bound")
        print(f"{result} ({time.perf_counter() - start:.1f} s)", flush=True)
    return rows


def _model_apart(options) -> list[dict[str, str]]:
    """The model in a process where the real ``nki`` does not exist: kernels there import the emulator's."""
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder)
        arguments = ["--backend", "model", "--out", str(out), *(["--full"] if options.full else [])]
        for text in options.only or ():
            arguments += ["--only", text]
        code = (
            f"import sys; sys.modules['nki'] = None; from trn_kernels.benchmarks.run import main; main({arguments!r})"
        )
        # torch must not load torch_neuronx, which imports nki.
        environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)
        return results.last_run(out / "results.csv")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of results.csv, report.md and its plots")
    parser.add_argument(
        "--backend",
        action="append",
        choices=("auto", *BACKENDS),
        help="may be repeated; auto (default): all that can run on this machine",
    )
    parser.add_argument("--only", action="append", metavar="TEXT", help="cases that contain this text; may be repeated")
    parser.add_argument("--full", action="store_true", help="more shapes, and nki-library at 16,384 tokens: an hour")
    parser.add_argument("--steps", action="store_true", help="also compare training steps on this CPU")
    parser.add_argument("--redraw", action="store_true", help="measure nothing: the report of the last run in DIR")
    parser.add_argument("--list", action="store_true", help="show the cases and stop")
    options = parser.parse_args(arguments)
    cases = [c for c in all_cases(options.full) if all(text in describe(c) for text in options.only or ())]
    if not cases:
        parser.error(f"--only {options.only}: no case contains that; --list without --only shows them")
    if options.list:
        print("\n".join(describe(case) for case in cases))
        return
    if options.out and options.out.exists() and not options.out.is_dir():
        parser.error(f"--out {options.out} is not a folder")
    csv = options.out / "results.csv" if options.out else None
    try:
        earlier = results.read(csv) if csv and csv.exists() else []
    except ValueError as error:
        parser.error(str(error))
    if options.redraw:
        if not earlier:
            parser.error(f"--redraw needs --out with a results.csv that has rows, {csv} has none")
        report.write(options.out, results.last_run(csv))
        return
    wanted = options.backend or ["auto"]
    apart = emulator.real_nki() and {"auto", "model"} & set(wanted) and any(case.runs_on("model") for case in cases)
    try:
        backends = make_backends(name for name in wanted if not (apart and name == "model"))
    except RuntimeError as error:
        parser.error(str(error))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    given = sys.argv[1:] if arguments is None else arguments
    run = results.this_run(shlex.join(["python", "benchmarks/run.py", *given]))
    rows = _model_apart(options) if apart else []
    rows += measure(cases, backends, run, csv)
    if not rows:
        parser.error(f"none of the {len(cases)} cases runs on {', '.join(wanted)}")
    if any(backend.name == "trn2" for backend in backends):
        print(f"To profile a kernel on the device:\n{CAPTURE}")
    if options.steps:
        steps.measure(options.out)
    if options.out:
        report.write(options.out, rows)
    else:
        print("\n".join(report.table(rows)))


if __name__ == "__main__":
    main()
