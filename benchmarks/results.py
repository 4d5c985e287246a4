"""Rows of results and the CSV that they are appended to."""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

import trn_kernels
from trn_kernels.benchmarks import nki_library
from trn_kernels.benchmarks.measure import Case, ModelFigures, WallFigures
from trn_kernels.emulator.profiler import ENGINES

ROOT = Path(trn_kernels.__file__).parent
COLUMNS = (
    *("date", "commit", "versions", "command", "target", "backend"),
    *("op", "implementation", "direction", "shape", "lnc", "series", "at"),
    *("min_bytes", "flops", "bound_us"),
    # Of every backend: of model with dependencies, of the others the median.
    "time_us",
    # Of model.
    *("overlapped_us", "hbm_bytes", "hbm_bound_us", "pe_bound_us", "issued_flops", "limiting_engine"),
    *(f"{engine}_us" for engine in ENGINES),
    *("sbuf_bytes", "psum_bytes", "mean_descriptor_bytes"),
    # Of wall time.
    *("compile_us", "first_us", "fastest_us", "slowest_us", "queued_us", "runs"),
)


@dataclass(frozen=True)
class Run:
    """What all rows of one run share."""

    date: str
    commit: str
    versions: str
    command: str


def this_run(command: str) -> Run:
    """Date in UTC, commit ("+" if files differ from it) and versions of this process."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    versions = {"trn_kernels": importlib.metadata.version("trn_kernels"), "torch": torch.__version__}
    for package in ("torch_neuronx", "nki"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if nki_library.available():
        versions["nki-library"] = nki_library.version()
    return Run(date, _commit(), ", ".join(f"{name} {v}" for name, v in versions.items()), command)


def _commit() -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short=10", "HEAD")
    # What the benchmarks write does not make them another state.
    changed = git("status", "--porcelain", "--", ".", ":!docs/benchmarks")
    return (commit + ("+" if changed else "")) or "unknown"


def row(run: Run, case: Case, figures: ModelFigures | WallFigures) -> dict[str, str]:
    """One row. Its backend is what the figures say of themselves; nobody passes one."""
    series, at = case.series or ("", "")
    values = {
        **vars(run),
        "target": figures.target,
        "backend": figures.backend,
        "op": case.op,
        "implementation": case.implementation,
        "direction": case.direction,
        "shape": case.shape,
        "lnc": case.lnc,
        "series": series,
        "at": at,
        "min_bytes": case.min_bytes,
        "flops": case.flops,
        "bound_us": _us(case.bound_ns),
        "time_us": _us(figures.time_ns),
    }
    if isinstance(figures, ModelFigures):
        values |= {
            "overlapped_us": _us(figures.overlapped_ns),
            "hbm_bytes": figures.hbm_bytes,
            "hbm_bound_us": _us(figures.hbm_bound_ns),
            "pe_bound_us": _us(figures.pe_bound_ns),
            "issued_flops": figures.issued_flops,
            "limiting_engine": figures.limiting_engine,
            **{f"{engine}_us": _us(ns) for engine, ns in figures.busy_ns.items()},
            "sbuf_bytes": figures.sbuf_bytes,
            "psum_bytes": figures.psum_bytes,
            "mean_descriptor_bytes": round(figures.mean_descriptor_bytes),
        }
    else:
        values |= {
            "compile_us": _us(figures.compile_ns),
            "first_us": _us(figures.first_ns),
            "fastest_us": _us(min(figures.runs_ns)),
            "slowest_us": _us(max(figures.runs_ns)),
            "queued_us": _us(figures.queued_ns),
            "runs": len(figures.runs_ns),
        }
    return {column: str(values.get(column, "")) for column in COLUMNS}


def _us(ns: float) -> str:
    return f"{ns / 1000:.3f}"


def append(path: Path, rows: list[dict[str, str]]) -> None:
    """Add rows to the CSV, which is made if it is not there.

    Raises:
        ValueError: the file has other columns.
    """
    new = not path.exists()
    if not new:
        read(path)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def read(path: Path) -> list[dict[str, str]]:
    """All rows, oldest first."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{path} has other columns than this version writes; move it away or take another --out")
        return list(reader)


def key(row: dict[str, str]) -> tuple[str, ...]:
    """What two rows of the same measurement share."""
    return tuple(row[c] for c in ("op", "implementation", "direction", "shape", "lnc", "backend"))


def last_run(path: Path) -> list[dict[str, str]]:
    """The rows of the run that wrote last."""
    rows = read(path)
    last = rows[-1]
    return [row for row in rows if (row["date"], row["command"]) == (last["date"], last["command"])]
