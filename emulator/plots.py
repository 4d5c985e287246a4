"""The roofline of profiled kernels. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from . import cost as model

if TYPE_CHECKING:
    from .profiler import Report


def roofline(reports: Mapping[str, Report], path: str | Path) -> None:
    """Draw kernels under the ceilings of the machine into an image, on all cores that they used.

    A kernel with matmuls is placed by the operations of these, one without by the elements that the Vector, Scalar and
    GpSimd engines produced. The dot is the time with dependencies, the bar above it ends at perfect overlap.

    Args:
        reports: by the name to print; all of launches on equally many cores.
        path: where to write; the suffix is the format.

    Raises:
        ValueError: no reports, or they have different numbers of cores.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    cores = {len(report.cores) for report in reports.values()}
    if len(cores) != 1:
        raise ValueError(f"reports of launches on {sorted(cores)} cores: one roofline shows one number of cores")
    cores = cores.pop()
    points = [(name, *_point(report)) for name, report in reports.items()]
    bandwidth = model.HBM_GB_PER_S * cores / 1000  # TB/s
    ceilings = [
        (model.PE_TFLOPS * cores, "tensor engine, bf16"),
        (model.PE_TFLOPS / 4 * cores, "tensor engine, fp32"),
        (model.ELEMENTWISE_TOPS * cores, "Vector + Scalar + GpSimd, one element a cycle and lane"),
    ]
    intensities = [intensity for _, intensity, *_ in points]
    x = np.geomspace(min(0.05, *intensities) / 2, max(2000.0, *intensities) * 2, 200)
    figure, axis = plt.subplots(figsize=(9, 5.5), layout="constrained")
    for (peak, label), style in zip(ceilings, ("-", "--", ":"), strict=True):
        axis.plot(x, np.minimum(peak, bandwidth * x), style, color="0.3", linewidth=1.2)
        axis.annotate(
            f"{label}: {peak:.3g} T/s", (x[-1], peak), (-4, 3), textcoords="offset points", ha="right", fontsize=8
        )
    axis.annotate(
        f"HBM: {bandwidth * 1000:.0f} GB/s",
        (x[40], bandwidth * x[40]),
        (-8, 2),
        textcoords="offset points",
        ha="right",
        fontsize=8,
    )
    for (name, intensity, scheduled, overlapped, what), color in zip(points, plt.cm.viridis(_spread(len(points)))):  # noqa: B905
        axis.plot([intensity] * 2, [scheduled, overlapped], color=color, linewidth=2)
        axis.plot(intensity, scheduled, "o", color=color, markersize=7, label=f"{name} ({what})")
    axis.set(xscale="log", yscale="log", xlabel="operations per byte of HBM traffic", ylabel="T operations / s")
    target = next(iter(reports.values())).target
    axis.set_title(f"Roofline by the model (not measured), {cores} core{'s' * (cores > 1)} of {target}", fontsize=11)
    axis.grid(which="major", alpha=0.3)
    axis.legend(fontsize=8, loc="upper left")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _spread(count: int) -> list[float]:
    return [0.85 * i / max(1, count - 1) for i in range(count)]


def _point(report: Report) -> tuple[float, float, float, str]:
    """Operations per byte, tera-operations per second with dependencies and with perfect overlap, and which."""
    flops = sum(core.total("flops") for core in report.cores)
    operations = flops or sum(core.total("elements") for core in report.cores)
    what = "matmul operations" if flops else "elements"
    if not operations or not report.hbm_bytes:
        raise ValueError(f"{report.kernel} computes nothing or moves no bytes of HBM: it has no place in a roofline")
    return (
        operations / report.hbm_bytes,
        *(operations / ns / 1000 for ns in (report.scheduled_ns, report.overlapped_ns)),
        what,
    )
