"""The report: one table, the targets, and plots, from the rows of one run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from trn_kernels.benchmarks import grouped_experts, rope, steps
from trn_kernels.benchmarks.measure import CAPTURE
from trn_kernels.emulator import cost
from trn_kernels.emulator.profiler import ENGINES

Row = dict[str, str]
OURS = "trn_kernels"
# The palette of Okabe and Ito, which the colour-blind tell apart.
COLORS = {
    "time": "#0072B2",
    "overlapped": "#56B4E9",
    "hbm": "#D55E00",
    "pe": "#009E73",
    "ours": "#0072B2",
    "other": "#E69F00",
}


def number(row: Row, column: str) -> float:
    return float(row[column])


def kernel_of(row: Row) -> str:
    return f"{row['op']} {row['direction']}" + ("" if row["implementation"] == OURS else f" ({row['implementation']})")


def ratio_of(row: Row) -> float:
    """Time over the least time of the problem."""
    return number(row, "time_us") / number(row, "bound_us")


def bytes_of(row: Row) -> float:
    """HBM bytes over the least of the problem."""
    return number(row, "hbm_bytes") / number(row, "min_bytes")


# -- tables ---------------------------------------------------------------------------------------------


def beside(rows: list[Row]) -> list[Row]:
    """Rows of the same problem next to each other."""
    order = list(dict.fromkeys(map(_problem, rows)))
    return sorted(rows, key=lambda row: order.index(_problem(row)))


def table(rows: list[Row]) -> list[str]:
    """The table, a row per measurement."""
    lines = [
        "| kernel | shape | LNC | backend | time, us | overlapped, us | bound, us | ratio | bytes over minimum "
        "| limiting engine |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in beside(rows):
        time = f"{number(row, 'time_us'):,.1f}"
        cells = [kernel_of(row), row["shape"], row["lnc"], row["backend"], time]
        if row["backend"] == "cpu":
            # A bound of another machine says nothing about it; only its rows can be compared with each other.
            first = next(r for r in rows if r["backend"] == "cpu" and _problem(r) == _problem(row))
            relative = number(row, "time_us") / number(first, "time_us")
            cells += ["", "", f"{relative:.2f} of {first['implementation']}", "", ""]
        else:
            cells += [
                f"{number(row, 'overlapped_us'):,.1f}" if row["overlapped_us"] else "",
                f"{number(row, 'bound_us'):,.1f}",
                f"{ratio_of(row):.2f}",
                f"{bytes_of(row):.3f}" if row["hbm_bytes"] else "",
                row["limiting_engine"],
            ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _problem(row: Row) -> tuple[str, ...]:
    return row["op"], row["direction"], row["shape"], row["lnc"]


@dataclass(frozen=True)
class Target:
    """``value`` of the rows against ``limit``; ``most`` tells which side is good. None: a row was not measured.

    A time is judged by the bounds of the launch, which are of what it moves and multiplies; ``of_problem`` is the same
    time over the bound of the problem, which no design can change.
    """

    text: str
    limit: float
    value: float | None
    most: bool = True
    of_problem: float | None = None

    @property
    def reached(self) -> bool | None:
        if self.value is None:
            return None
        return self.value <= self.limit if self.most else self.value >= self.limit


def targets(rows: list[Row]) -> list[Target]:
    """How fast the kernels are meant to be by the cost model, and how fast they are."""
    model = {(*_problem(r), r["implementation"]): r for r in rows if r["backend"] == "model"}

    def value(function: Callable[..., float], *keys) -> float | None:
        found = [model.get(key) for key in keys]
        return None if None in found else function(*found)

    def timed(name, limit, key) -> Target:
        return Target(f"{name}: time over its bound", limit, value(_over_own_bound, key), True, value(ratio_of, key))

    def rope_key(table, gathered=False, implementation=OURS):
        return ("rope", "forward", rope.shape_of("Qwen3-30B-A3B", 4096, table, gathered), "2", implementation)

    fp32, bf16 = rope_key(torch.float32), rope_key(torch.bfloat16)
    made = [
        Target("rope, fp32 table: bytes over the minimum", 1.0, value(bytes_of, fp32)),
        timed("rope, fp32 table", 1.5, fp32),
        timed("rope, bf16 table", 1.15, bf16),
    ]
    for name, plain in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        change = value(_time_over, rope_key(plain, True), rope_key(plain))
        made.append(Target(f"rope, {name} table: time with gathered positions over time without", 1.1, change))
    published = [key for key in model if key[4].startswith("published") and key[:4] == fp32[:4]]
    fewer = value(_bytes_over, published[0], fp32) if published else None
    made.append(Target("rope, fp32 table: bytes of the published operator over ours", 2.8, fewer, most=False))

    def expert_key(problem, direction, implementation=OURS):
        return ("grouped_experts", direction, problem.shape, "2", implementation)

    problems = [make(tokens) for make in (grouped_experts.reduced, grouped_experts.whole) for tokens in (4096, 16384)]
    for problem in problems:
        name = f"experts, top {problem.top_k} of {problem.num_experts}, {problem.tokens:,} tokens"
        for direction, limit in (("forward", 1.25), ("backward", 1.35)):
            key = expert_key(problem, direction)
            made.append(timed(f"{name}, {direction}", limit, key))
            if problem.tokens == 16384:
                text = f"{name}, {direction}: issued over useful FLOPs"
                made.append(Target(text, 1.15, value(_issued_over_useful, key)))
            for other in (key for key in model if key[:4] == expert_key(problem, direction)[:4]):
                if other[4].startswith("nkilib"):
                    for what, function in (("bytes", _bytes_over), ("time", _time_over)):
                        text = f"{name}, {direction}: {what} over that of {other[4]}"
                        made.append(Target(text, 1.0, value(function, key, other)))
    return made


def _time_over(row: Row, other: Row) -> float:
    return number(row, "time_us") / number(other, "time_us")


def _bytes_over(row: Row, other: Row) -> float:
    return number(row, "hbm_bytes") / number(other, "hbm_bytes")


def _over_own_bound(row: Row) -> float:
    # RoPE has no matmul that counts: its tensor engine adds.
    bounds = ("hbm_bound_us",) if row["op"] == "rope" else ("hbm_bound_us", "pe_bound_us")
    return number(row, "time_us") / max(number(row, bound) for bound in bounds)


def _issued_over_useful(row: Row) -> float:
    return number(row, "issued_flops") / number(row, "flops")


def target_table(rows: list[Row]) -> list[str]:
    lines = ["| target | limit | now | reached | over the bound of the problem |", "|---|---|---|---|---|"]
    for target in targets(rows):
        limit = f"{'at most' if target.most else 'at least'} {target.limit:g}"
        now = "not measured" if target.value is None else f"{target.value:.3f}"
        reached = {None: "", True: "yes", False: "no"}[target.reached]
        strict = "" if target.of_problem is None else f"{target.of_problem:.3f}"
        lines.append(f"| {target.text} | {limit} | {now} | {reached} | {strict} |")
    return lines


def device_table(rows: list[Row]) -> list[str]:
    """Compile, first call and steady state of the device's rows."""
    lines = [
        "| kernel | shape | LNC | compile, ms | first call, ms | median, us | fastest, us | slowest, us | queued, us |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in (r for r in rows if r["backend"] == "trn2"):
        cells = [kernel_of(row), row["shape"], row["lnc"]]
        cells += [f"{number(row, column) / 1000:,.1f}" for column in ("compile_us", "first_us")]
        cells += [f"{number(row, c):,.1f}" for c in ("time_us", "fastest_us", "slowest_us", "queued_us")]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


HOW = f"""\
A row is a launch, or a few one after the other. **time** is, by `model`, the time with the dependencies between
instructions; **overlapped** the time if all engines worked at once. **bound** is the least time of the problem on its
cores: the larger of the bytes that nobody can avoid over {cost.HBM_GB_PER_S:.1f} GB/s and of the useful FLOPs over
{cost.PE_TFLOPS:.1f} TFLOPS, per core. **ratio** is time over bound; **bytes over minimum** what is moved over what
must be. The sources of all constants are in `emulator/cost.py`.

Backends: `model` is the emulator's cost model, no measurement. `trn2` is measured on a Neuron device: the median of
synchronised calls. `cpu` is PyTorch on the CPU of the machine that made this report; such times can only be compared
with each other, which is what their ratio does, and no NKI kernel ran there.

Shapes: "balanced" routing gives every expert as many rows; "random" is what uniform draws give; "skewed" draws expert
i in proportion to 1 / (i + 1); "one expert" gets every row. "forward" of the experts keeps what the backward
needs, "inference" does not; "both" is forward and backward.

For comparison: the published RoPE permutes and copies queries and keys before and after `rope_hf`; a copy counts as
one DMA from HBM to HBM, the least it can cost. nki-library's blockwise kernels get the same sorted rows in blocks of
256, as many blocks as a kernel without dropped tokens must be compiled for, and no scaling by the router. Its rows
appear where `NKILIB_SRC` names a checkout of it."""


TARGETS = """\
By the model, for LNC 2 and bf16. A target for a time is judged by the launch's own bounds: the bytes that it moves and
the matmuls that it does, padding included. The last column is the same time over the bound of the table above, which no
design can change; what a launch moves and multiplies too much has targets of its own."""


# -- plots ----------------------------------------------------------------------------------------------


def _label(row: Row) -> str:
    """Two short lines for an axis."""
    shape = row["shape"].replace("Qwen3-", "").replace(", bf16,", ",")
    kernel = kernel_of(row).replace("grouped_experts", "experts").replace("blockwise_mm_baseline", "bwmm")
    return f"{kernel}, LNC {row['lnc']}\n{shape}"


def _model(rows: list[Row]) -> list[Row]:
    return [row for row in beside(rows) if row["backend"] == "model"]


def _panels(rows: list[Row], width: float = 11, header: float = 0.9):
    """A figure with a panel per operator, as high as its rows are many."""
    import matplotlib.pyplot as plt

    groups = [[r for r in rows if r["op"] == op] for op in dict.fromkeys(r["op"] for r in rows)]
    heights = [len(group) + 1.5 for group in groups]
    figure, axes = plt.subplots(
        len(groups),
        1,
        figsize=(width, 0.42 * sum(heights) + header),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for axis, group in zip(axes[:, 0], groups, strict=True):
        axis.set_yticks(range(len(group)), [_label(row) for row in group], fontsize=7)
        axis.set_ylim(len(group) - 0.4, -0.6)
        axis.grid(axis="x", alpha=0.3)
        axis.set_axisbelow(True)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    return figure, list(zip(axes[:, 0], groups, strict=True))


def plot_time(rows: list[Row]):
    """Modelled times against both bounds."""
    figure, panels = _panels(_model(rows))
    for axis, group in panels:
        for y, row in enumerate(group):
            cores = int(row["lnc"])
            color = COLORS["ours" if row["implementation"] == OURS else "other"]
            hbm = number(row, "min_bytes") / cost.HBM_GB_PER_S / cores / 1000
            pe = number(row, "flops") / cost.PE_TFLOPS / cores / 1e6
            time = number(row, "time_us")
            axis.barh(y, time, color=color, height=0.6)
            axis.plot(number(row, "overlapped_us"), y, "|", color="white", markersize=11, markeredgewidth=2)
            axis.plot(hbm, y, "D", color="white", markeredgecolor="black", markersize=5)
            if pe:
                axis.plot(pe, y, "o", color="black", markersize=4)
            axis.annotate(
                f"{ratio_of(row):.2f}", (time, y), (4, 0), textcoords="offset points", va="center", fontsize=7
            )
        axis.set_xlabel("us, model (figure at the end: time over the larger bound)", fontsize=8)
        axis.margins(x=0.06)
        axis.set_xlim(left=0)
    _legend(
        figure,
        [
            ("bar", COLORS["ours"], "ours"),
            ("bar", COLORS["other"], "others"),
            ("|", "white", "if engines overlapped perfectly"),
            ("D", "white", "HBM bound of the problem"),
            ("o", "black", "tensor engine bound of the problem"),
        ],
    )
    return figure


def _legend(figure, entries) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = []
    for kind, color, label in entries:
        if kind == "bar":
            handles.append(Patch(color=color, label=label))
        elif kind == "|":
            # White on a bar; in the legend it needs a ground.
            line = Line2D([], [], color=COLORS["ours"], linewidth=8, marker="|", markersize=9, label=label)
            line.set_markeredgecolor(color)
            line.set_markeredgewidth(2)
            handles.append(line)
        else:
            handles.append(
                Line2D(
                    [], [], linestyle="", marker=kind, color=color, markeredgecolor="black", markersize=5, label=label
                )
            )
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=8, frameon=False)


def plot_bytes(rows: list[Row]):
    """HBM bytes against the least that is possible."""
    figure, panels = _panels(_model(rows))
    for axis, group in panels:
        for y, row in enumerate(group):
            moved, least = number(row, "hbm_bytes") / 1e6, number(row, "min_bytes") / 1e6
            color = COLORS["ours" if row["implementation"] == OURS else "other"]
            axis.barh(y, moved, color=color, height=0.6)
            axis.plot([least, least], [y - 0.38, y + 0.38], color="black", linewidth=2)
            axis.annotate(
                f"{moved / least:.2f}", (moved, y), (4, 0), textcoords="offset points", va="center", fontsize=7
            )
        axis.set_xlabel("MB of HBM read and written, model (figure at the end: over the minimum)", fontsize=8)
        axis.margins(x=0.06)
        axis.set_xlim(left=0)
    _legend(figure, [("bar", COLORS["ours"], "ours"), ("bar", COLORS["other"], "others"), ("|", "black", "minimum")])
    return figure


def plot_engines(rows: list[Row]):
    """How much of the time each engine works."""
    figure, panels = _panels(_model(rows), width=9, header=0.4)
    for axis, group in panels:
        share = [[number(row, f"{e}_us") / number(row, "time_us") for e in ENGINES] for row in group]
        axis.grid(False)
        axis.imshow(share, cmap="cividis", vmin=0, vmax=1, aspect="auto")
        axis.set_xticks(range(len(ENGINES)), ENGINES, fontsize=8)
        axis.xaxis.tick_top()
        axis.tick_params(length=0)
        for y, values in enumerate(share):
            for x, value in enumerate(values):
                color = "black" if value > 0.55 else "white"
                axis.text(x, y, f"{value:.0%}", ha="center", va="center", fontsize=7, color=color)
    figure.suptitle("Share of the modelled time in which an engine works (model)", fontsize=10)
    return figure


def _log_ticks(*sides) -> None:
    """Plain numbers at 1, 2 and 5 of every decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for side in sides:
        side.set_major_locator(LogLocator(subs=(1, 2, 5)))
        side.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        side.set_minor_formatter(NullFormatter())


ROPE_OPERATIONS = 3
"""Multiplications and additions per element that a rotation takes: two products and a sum."""


def _operations(row: Row) -> float:
    if row["op"] == "rope":
        # Of the queries and keys alone, whatever the table: bf16, read and written.
        length = int(row["shape"].split("S ")[1].split(",")[0])
        heads = sum(int(n) for n in row["shape"].split(", ")[2].removesuffix(" heads").split("+"))
        return ROPE_OPERATIONS * length * heads * rope.HEAD_DIM * (2 if row["direction"] == "both" else 1)
    return number(row, "flops")


def plot_roofline(rows: list[Row]):
    """Useful operations per second over operations per byte moved, per core, a panel per operator; None for none."""
    import matplotlib.pyplot as plt
    import numpy as np

    markers = {"forward": "o", "inference": "^", "backward": "s"}
    points: dict[str, list] = {}
    for row in _model(rows):
        if row["direction"] == "both":
            continue
        operations = _operations(row)
        x = operations / number(row, "hbm_bytes")
        y = operations / number(row, "time_us") / 1e6 / int(row["lnc"])
        points.setdefault(row["op"], []).append((x, y, row))
    if not points:
        return None
    figure, axes = plt.subplots(1, len(points), figsize=(5.6 * len(points), 5), squeeze=False, layout="constrained")
    for axis, (op, found) in zip(axes[0], points.items(), strict=True):
        xs, ys = ([point[i] for point in found] for i in range(2))
        low, high = min(xs) / 2, max(xs) * 2
        x = np.geomspace(low, high, 200)
        roof = np.minimum(cost.PE_TFLOPS, x * cost.HBM_GB_PER_S / 1000)
        axis.loglog(x, roof, color="black", linewidth=1.5)
        axis.set_xlim(low, high)
        axis.set_ylim(min(ys) / 2, roof.max() * 2)
        for x, y, row in found:
            color = COLORS["ours" if row["implementation"] == OURS else "other"]
            marker = markers[row["direction"]]
            axis.plot(x, y, marker, color=color, markeredgecolor="black", markersize=8, alpha=0.8)
        label = f"HBM {cost.HBM_GB_PER_S:.1f} GB/s"
        if roof.max() >= cost.PE_TFLOPS:
            label += f", then tensor engine {cost.PE_TFLOPS:.1f} TFLOPS in bf16"
        _log_ticks(axis.xaxis, axis.yaxis)
        axis.set_title(f"{op}\nroof: {label}", fontsize=9)
        axis.set_xlabel("useful operations per byte of HBM that is moved", fontsize=8)
        axis.grid(which="both", alpha=0.2)
    axes[0, 0].set_ylabel("useful TFLOPS of one core, model", fontsize=8)
    _legend(
        figure,
        [
            ("bar", COLORS["ours"], "ours"),
            ("bar", COLORS["other"], "others"),
            *((marker, "white", direction) for direction, marker in markers.items()),
        ],
    )
    return figure


def plot_scaling(rows: list[Row]):
    """Time and bound over sequence length and over tokens; None without rows of a sweep."""
    import matplotlib.pyplot as plt

    names = sorted({row["series"] for row in _model(rows) if row["series"]})
    if not names:
        return None
    figure, axes = plt.subplots(1, len(names), figsize=(4.2 * len(names), 4), squeeze=False, layout="constrained")
    for axis, name in zip(axes[0], names, strict=True):
        points = sorted((r for r in _model(rows) if r["series"] == name), key=lambda r: int(r["at"]))
        at = [int(row["at"]) for row in points]
        for label, column, style in (
            ("time", "time_us", "o-"),
            ("overlapped", "overlapped_us", "s--"),
            ("bound", "bound_us", "k:"),
        ):
            color = {} if column == "bound_us" else {"color": COLORS[label]}
            axis.loglog(at, [number(row, column) for row in points], style, label=label, **color)
        axis.set_xticks(at, [f"{x // 1024}k" for x in at])
        _log_ticks(axis.yaxis)
        axis.minorticks_off()
        axis.set_title(f"{points[0]['op']}, {name}", fontsize=9)
        axis.set_xlabel("positions" if name == "sequence" else "tokens", fontsize=8)
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("us, model", fontsize=8)
    axes[0, 0].legend(fontsize=8)
    return figure


PLOTS = {
    "time": (plot_time, "Time against both bounds"),
    "bytes": (plot_bytes, "HBM bytes against the minimum"),
    "engines": (plot_engines, "Engine utilisation"),
    "roofline": (plot_roofline, "Roofline, per core"),
    "scaling": (plot_scaling, "Scaling with sequence length and tokens"),
}


# -- the whole ------------------------------------------------------------------------------------------


def write(folder: Path, rows: list[Row]) -> None:
    """``report.md`` and a PNG per plot in ``folder``.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    first = rows[0]
    lines = ["# Benchmarks", "", *table(rows), ""]
    lines += [
        f"Made on {first['date']} by `{first['command']}` at commit {first['commit']} with {first['versions']}; "
        f"all rows are in `results.csv`. Target of `model`: {_targets_named(rows)}.",
        "",
        HOW,
    ]
    if _model(rows):
        lines += ["", "## Targets", "", TARGETS, "", *target_table(rows)]
    if any(row["backend"] == "trn2" for row in rows):
        lines += ["", "## On the device", "", *device_table(rows), "", "To profile a kernel:", "", "```bash"]
        lines += [CAPTURE, "```"]
    lines += steps.section(folder)
    if _model(rows):
        for name, (draw, title) in PLOTS.items():
            figure = draw(rows)
            if figure is None:
                continue
            figure.savefig(folder / f"{name}.png", dpi=110)
            plt.close(figure)
            lines += ["", f"## {title}", "", f"![{title}]({name}.png)"]
    (folder / "report.md").write_text("\n".join(lines) + "\n")
    print(f"{folder / 'report.md'}")


def _targets_named(rows: list[Row]) -> str:
    return ", ".join(sorted({row["target"] for row in _model(rows)})) or "none"
