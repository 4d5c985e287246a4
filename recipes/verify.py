"""Proofs after a run: is the export a standard checkpoint, does the log show the run that was meant and its losses.

    python -m trn_kernels.recipes.verify export DIR [--reference DIR] [--max-logit-difference X]
    python -m trn_kernels.recipes.verify log FILE [--ranks N] [--layers N] [--first-loss X] [--override TEXT]
    python -m trn_kernels.recipes.verify losses RUN GOLDEN [--tolerance X]
    python -m trn_kernels.recipes.verify losses RUN --write GOLDEN

Each prints what it finds, one fact a line, and its complaints last, marked FAIL. The exit status is 1 if there are any.
"""

import argparse
import gc
import json
import math
import re
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

PUBLISHED_LOADED, PUBLISHED_RANDOM = 6.54, 12.43
"""First-step loss of the published Qwen3-4B-Instruct-2507 runs: from the released weights, from random ones."""


@dataclass
class Report:
    """Facts and complaints, in the order in which they were found."""

    facts: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        verdict = [f"FAIL {problem}" for problem in self.problems] or ["OK"]
        return "\n".join(self.facts + verdict)


# -- export ---------------------------------------------------------------------------------------------


def verify_export(
    folder: str | Path, reference: str | Path | None = None, max_logit_difference: float | None = None
) -> Report:
    """Is `folder` a checkpoint that any tool can load?

    Args:
        folder: of the export.
        reference: a checkpoint of the same architecture to compare with, such as the one it was fine-tuned from.
        max_logit_difference: complain above this largest difference from the reference; None only reports it.

    Returns:
        What was found. A tied `lm_head.weight` may be missing; anything else that is missing, unexpected, of another
        shape or not finite is a complaint that names the tensor.
    """
    from trn_kernels.recipes.checkpoints import header_problems, read_config, stored_tensors

    folder, report = Path(folder), Report()
    report.problems += header_problems(folder)
    if report.problems:
        return report
    config = read_config(folder)
    tensors, _ = stored_tensors(folder)
    dtypes = sorted({tensor.dtype for tensor in tensors.values()})
    report.facts.append(
        f"{len(tensors)} tensors in {len({t.file for t in tensors.values()})} files, {', '.join(dtypes)}"
    )
    _check_values(tensors, report)
    if not report.problems:
        _check_opening(folder, config, dtypes, report)
    if reference is not None and not report.problems:
        _compare(folder, Path(reference), max_logit_difference, report)
    return report


def _check_values(tensors, report: Report) -> None:
    for name, tensor in _values(tensors):
        finite = tensor.isfinite()
        if not finite.all():
            report.problems.append(f"{name} has {int((~finite).sum())} values that are not finite")


def _values(tensors):
    """(name, values) of each tensor, one at a time."""
    from safetensors import safe_open

    for name, stored in tensors.items():
        with safe_open(stored.file, "pt") as file:
            yield name, file.get_tensor(name)


def _check_opening(folder: Path, config: dict, dtypes: list[str], report: Report) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    said = config.get("dtype", config.get("torch_dtype"))
    if len(dtypes) > 1 or {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}.get(dtypes[0]) != said:
        report.problems.append(f"dtype is {said!r} in config.json, but the tensors are {', '.join(dtypes)}")
    try:
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, local_files_only=True)
    except Exception as error:  # whatever it is: the export does not open
        report.problems.append(f"AutoModelForCausalLM.from_pretrained: {type(error).__name__}: {error}")
        return
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        for key in sorted(map(str, info.get(kind) or ())):
            report.problems.append(f"AutoModelForCausalLM.from_pretrained: {kind} {key}")
    tied = model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    if tied != bool(config.get("tie_word_embeddings")):
        report.problems.append(
            f"tie_word_embeddings is {config.get('tie_word_embeddings')}, but the model's are {tied}"
        )
    report.facts.append(f"opens as {type(model).__name__}, {model.dtype}, embeddings {'' if tied else 'not '}tied")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        report.problems.append(f"AutoTokenizer.from_pretrained: {type(error).__name__}: {error}")
        return
    if len(tokenizer) > config["vocab_size"]:
        report.problems.append(f"the tokenizer has {len(tokenizer)} tokens, vocab_size is {config['vocab_size']}")
    text = "The import statement"
    back = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
    if back != text:  # Transformers makes an empty tokenizer where files are missing
        report.problems.append(f"AutoTokenizer.from_pretrained: {text!r} comes back as {back!r}; are its files there?")
    report.facts.append(f"opens as {type(tokenizer).__name__} with {len(tokenizer)} tokens")


def _compare(folder: Path, reference: Path, limit: float | None, report: Report) -> None:
    from trn_kernels.recipes.checkpoints import expected_tensors, header_problems, read_config, stored_tensors

    problems = header_problems(reference)
    if not problems and expected_tensors(read_config(folder)) != expected_tensors(read_config(reference)):
        problems = ["its config.json is of another size"]
    if problems:
        report.problems += [f"reference {reference}: {problem}" for problem in problems]
        return
    ours, theirs = stored_tensors(folder)[0], stored_tensors(reference)[0]
    changed, largest = 0, (0.0, "none")
    for (name, value), (_, other) in zip(
        _values({n: ours[n] for n in sorted(ours.keys() & theirs.keys())}),
        _values({n: theirs[n] for n in sorted(ours.keys() & theirs.keys())}),
        strict=True,
    ):
        difference = float((value.float() - other.float()).abs().max())
        changed += difference > 0
        largest = max(largest, (difference, name))
    report.facts.append(
        f"{changed} of {len(ours)} tensors differ from the reference, at most by {largest[0]:.3g} ({largest[1]})"
    )
    report.problems += _swapped(ours, theirs)
    difference = float((_logits(folder) - _logits(reference)).abs().max())
    report.facts.append(f"largest difference of logits from the reference: {difference:.3g}")
    if limit is not None and not difference <= limit:
        report.problems.append(f"largest difference of logits is {difference:.3g}, more than {limit:.3g}")


def _swapped(ours, theirs) -> list[str]:
    """Gates that are nearer to the reference's up projection than to its gate, and the reverse.

    Both have one shape, so nothing else tells them apart; training moves weights far less than that.
    """
    problems = []
    for gate in sorted(name for name in ours if name.endswith(".gate_proj.weight")):
        up = gate.replace(".gate_proj.", ".up_proj.")
        values = [tensor.float() for pair in (ours, theirs) for _, tensor in _values({n: pair[n] for n in (gate, up)})]
        straight = (values[0] - values[2]).norm() + (values[1] - values[3]).norm()
        crossed = (values[0] - values[3]).norm() + (values[1] - values[2]).norm()
        if crossed < straight:
            problems.append(f"{gate} and {up} are swapped")
    return problems


def _logits(folder: Path):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (1, 64), generator=random)
    with torch.no_grad():
        logits = model(tokens).logits
    del model
    gc.collect()
    return logits


# -- log ------------------------------------------------------------------------------------------------

_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_PREFIX = re.compile(r"^\[(?:[a-z]*rank|default)(\d+)\]:")
_MESH = re.compile(
    r"Building device mesh with parallelism: pp=(\d+), dp_replicate=(\d+), dp_shard=(\d+), cp=(\d+), tp=(\d+)"
)
_STEP = re.compile(
    r"step:\s*(?P<step>\d+)\s+loss:\s*(?P<loss>\S+)\s+grad_norm:\s*(?P<grad_norm>\S+)\s+"
    r"memory:\s*(?P<memory>\S+?)GiB\S*\s+tps:\s*(?P<tps>[\d,]+)\s+tflops:\s*(?P<tflops>\S+)\s+mfu:\s*(?P<mfu>\S+)"
)
_OVERRIDE = re.compile(
    r"\[Override\] (?P<name>\S+): (?P<before>\S*?layers\.)(?P<layer>\d+)(?P<after>\.\S+) (?P<what>.*)"
)
_LAYERS = re.compile(r"\[Recipe\] (\d+) layers, (.*)")


@dataclass
class Log:
    """What a training log says."""

    ranks: int | None = None
    model: str | None = None
    layers: int | None = None
    source: str | None = None
    """What our recipe built the model from."""
    loaded: str | None = None
    """Folder of the Hugging Face weights that it started from."""
    overrides: dict[str, set[int]] = field(default_factory=dict)
    """Kind of replaced node (layer written as *) -> layers."""
    unmatched: list[str] = field(default_factory=list)
    steps: list[dict[str, float]] = field(default_factory=list)
    launches: list[str] = field(default_factory=list)


def read_log(path: str | Path) -> Log:
    """Parse the output of a training, of one rank or of several; of several, the lowest counts."""
    lines = [_COLOR.sub("", line) for line in Path(path).read_text(errors="replace").splitlines()]
    prefixes = [match and int(match[1]) for match in map(_PREFIX.match, lines)]
    first = min((rank for rank in prefixes if rank is not None), default=None)
    log, overrides = Log(), defaultdict(set)
    for line, rank in zip(lines, prefixes, strict=True):
        if rank != first:
            continue
        if match := _MESH.search(line):
            log.ranks = math.prod(map(int, match.groups()))
        elif match := _STEP.search(line):
            log.steps.append({name: _number(text) for name, text in match.groupdict().items()})
        elif match := _OVERRIDE.search(line):
            kind = f"{match['name']}: {match['before']}*{match['after']} {match['what']}"
            overrides[kind].add(int(match["layer"]))
        elif match := _LAYERS.search(line):
            log.layers, log.source = int(match[1]), match[2]
        elif "produced no replacements" in line:
            log.unmatched.append(line)
        elif match := re.search(r"INFO - Model (.*) size: ([\d,]+) total parameters", line):
            log.model = f"{match[1]}, {match[2]} parameters"
        elif match := re.search(r"Loading from HF safetensors from \S+: (.*)", line):
            log.loaded = match[1]
        elif match := re.search(r"\[Launches\] (.*)", line):
            log.launches.append(match[1])
    log.overrides = dict(overrides)
    return log


def _number(text: str) -> float:
    try:
        return float(text.replace(",", "").rstrip("%"))
    except ValueError:
        return math.nan  # "N/A"


def verify_log(
    path: str | Path,
    *,
    ranks: int | None = None,
    layers: int | None = None,
    first_loss: float | None = None,
    tolerance: float = 0.05,
    overrides: tuple[str, ...] = (),
) -> tuple[Report, Log]:
    """Does the log show the run that was meant?

    Args:
        path: of the log.
        ranks: processes that there must be; None reports them.
        layers: of the model; None takes the number that our recipes log, else that of the overrides.
        first_loss: expected at step 1; None takes the published one for Qwen3-4B-Instruct-2507, else reports it.
        tolerance: relative, of first_loss.
        overrides: each must be part of the name of some replacement.

    Returns:
        The report, and what was read.
    """
    log, report = read_log(path), Report()
    report.facts.append(
        f"model: {log.model or 'not said'}, {log.loaded and f'weights of {log.loaded}' or 'random weights'}"
    )
    report.facts.append(f"ranks: {log.ranks or 'not said'}")
    if ranks is not None and (log.ranks or 0) < ranks:
        report.problems.append(f"{log.ranks or 0} ranks, expected {ranks}")
    _check_overrides(log, layers or log.layers, overrides, report)
    if not log.steps:
        report.problems.append("no step in the log")
        return report, log
    _check_steps(log, first_loss if first_loss is not None else _published(log), tolerance, report)
    return report, log


def _published(log: Log) -> float | None:
    # The native model is named after its flavor; Transformers' comes from the Hub or from a folder of that name.
    if not (log.model or "").startswith("qwen3 4B,") and not (log.source or "").endswith("Qwen3-4B-Instruct-2507"):
        return None
    return PUBLISHED_LOADED if log.loaded else PUBLISHED_RANDOM


def _check_overrides(log: Log, layers: int | None, wanted: tuple[str, ...], report: Report) -> None:
    count = layers or max((1 + max(found) for found in log.overrides.values()), default=0)
    for kind, found in log.overrides.items():
        report.facts.append(f"override: {len(found)} of {count} layers, {kind}")
        if missing := sorted({*range(count)} - found):
            report.problems.append(f"no override line for layers {', '.join(map(str, missing))} of {kind}")
    if not log.overrides:
        report.facts.append("override: none")
    for text in wanted:
        if not any(text in kind for kind in log.overrides):
            report.problems.append(f"no override line with {text!r}")
    report.problems += [f"override without effect: {line}" for line in log.unmatched]


def _check_steps(log: Log, expected: float | None, tolerance: float, report: Report) -> None:
    first, last = log.steps[0], log.steps[-1]
    for step in log.steps:
        for name in ("loss", "grad_norm"):
            if not math.isfinite(step[name]):
                report.problems.append(f"{name} is {step[name]} at step {step['step']:.0f}")
    against = "" if expected is None else f", expected {expected} within {tolerance:.0%}"
    report.facts.append(f"loss: {first['loss']} at step {first['step']:.0f}{against}")
    if expected is not None and first["step"] != 1:
        report.problems.append(f"the log begins at step {first['step']:.0f}, so that its first loss cannot be judged")
    elif expected is not None and not abs(first["loss"] - expected) <= tolerance * expected:
        report.problems.append(f"first loss is {first['loss']}, expected {expected} within {tolerance:.0%}")
    change = last["loss"] - first["loss"]
    trend = "falls" if change < 0 else "does not fall"
    report.facts.append(f"loss trend: {trend}, {change:+.4f} to {last['loss']} at step {last['step']:.0f}")
    for name, unit in (("grad_norm", ""), ("memory", " GiB"), ("tps", " tokens/s per rank"), ("mfu", " %")):
        values = [step[name] for step in log.steps]
        # The first step includes compilation.
        steady = statistics.median(values[1:] or values)
        report.facts.append(f"{name}: median {steady:g}{unit}, largest {max(values):g}{unit}")
    report.facts += [f"launches: {line}" for line in log.launches]


PANELS = (
    ("loss", "loss"),
    ("grad_norm", "gradient norm"),
    ("memory", "memory (GiB)"),
    ("tps", "tokens/s per rank"),
)


def draw(log: Log, path: str | Path, title: str = "") -> None:
    """Draw loss, gradient norm, memory and throughput over the steps into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [step["step"] for step in log.steps]
    figure, axes = plt.subplots(2, 2, figsize=(10, 6.5), sharex=True, layout="constrained")
    for axis, (name, label) in zip(axes.flat, PANELS, strict=True):
        axis.plot(steps, [step[name] for step in log.steps], marker="o", markersize=3, linewidth=1.5)
        axis.set_title(label, fontsize=11)
        axis.grid(alpha=0.3)
        axis.xaxis.get_major_locator().set_params(integer=True)
    for axis in axes[1]:
        axis.set_xlabel("step")
    figure.suptitle(title or log.model or "", fontsize=12)
    figure.savefig(path, dpi=120)
    plt.close(figure)


# -- losses ---------------------------------------------------------------------------------------------

TOLERANCE = 1e-4
"""Relative difference of a float32 loss that other versions of torch and other machines make at most."""

_TENSORBOARD = {"loss": "loss_metrics/global_avg_loss", "grad_norm": "grad_norm"}


def read_losses(path: str | Path) -> dict[int, dict[str, float]]:
    """Loss and gradient norm by step, from a golden file, a training log, or a folder of TensorBoard's events.

    Raises:
        OSError: `path` cannot be read.
        ValueError: nothing of that in `path`, or a step without a loss.
    """
    path = Path(path)
    if path.is_dir():
        steps = _read_tensorboard(path)
    elif path.suffix == ".json":
        steps = _read_golden(path)[0]
    else:
        steps = {int(s["step"]): {name: s[name] for name in _TENSORBOARD} for s in read_log(path).steps}
    if not steps:
        raise ValueError(f"no losses in {path}")
    for step, values in steps.items():
        if "loss" not in values:
            raise ValueError(f"no loss of step {step} in {path}")
    return steps


def _read_golden(path: Path) -> tuple[dict[int, dict[str, float]], float]:
    """Steps and tolerance."""
    try:
        stored = json.loads(path.read_text())
        steps = {int(step): {n: float(v) for n, v in values.items()} for step, values in stored["steps"].items()}
        return steps, float(stored.get("tolerance", TOLERANCE))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no golden file: {type(error).__name__}: {error}") from error


def _read_tensorboard(folder: Path) -> dict[int, dict[str, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = sorted(folder.rglob("events.out.tfevents.*"))
    if len(files) != 1:
        raise ValueError(f"{folder} has {len(files)} files of TensorBoard's events, must be 1: one run")
    events, steps = EventAccumulator(str(files[0])).Reload(), defaultdict(dict)
    for name, tag in _TENSORBOARD.items():
        for event in events.Scalars(tag) if tag in events.Tags()["scalars"] else ():
            steps[event.step][name] = event.value
    return dict(steps)


def write_losses(steps: dict[int, dict[str, float]], path: str | Path, tolerance: float = TOLERANCE) -> None:
    """Write a golden file: loss and gradient norm by step, and the tolerance to compare with."""
    steps = {str(step): {name: round(value, 5) for name, value in values.items()} for step, values in steps.items()}
    Path(path).write_text(json.dumps({"tolerance": tolerance, "steps": steps}, indent=1) + "\n")


def verify_losses(run: str | Path, golden: str | Path, tolerance: float | None = None) -> Report:
    """Has `run` the losses of `golden`? Both as `read_losses` takes them.

    Args:
        run: may have more steps.
        golden: all its steps must be in `run`.
        tolerance: largest relative difference of a loss; None takes the golden file's. Gradient norms are only shown.

    Returns:
        A table as facts; each loss that differs by more, that is missing or not finite, is a complaint.
    """
    ours, theirs, report = read_losses(run), read_losses(golden), Report()
    if tolerance is None:
        tolerance = _read_golden(Path(golden))[1] if Path(golden).suffix == ".json" else TOLERANCE
    report.facts.append(f"{'step':>4} {'loss':>9} {'golden':>9} {'difference':>10}   {'grad_norm':>9} {'golden':>9}")
    largest = 0.0
    for step, right in sorted(theirs.items()):
        if step not in ours:
            report.problems.append(f"no loss of step {step} in {run}")
            continue
        found = ours[step]
        if right["loss"] == 0:
            report.problems.append(f"loss of step {step} is 0 in {golden}; no difference is relative to that")
            continue
        difference = abs(found["loss"] - right["loss"]) / abs(right["loss"])
        norms = f"{found.get('grad_norm', math.nan):9.4f} {right.get('grad_norm', math.nan):9.4f}"
        report.facts.append(f"{step:4} {found['loss']:9.5f} {right['loss']:9.5f} {difference:10.1e}   {norms}")
        if not difference <= tolerance:
            report.problems.append(
                f"loss of step {step} is {found['loss']:.7g}, golden {right['loss']:.7g}: differs by {difference:.1e}, "
                f"more than {tolerance:.1e}"
            )
        largest = max(largest, difference)
    report.facts.append(f"largest relative difference of a loss: {largest:.1e}, tolerance {tolerance:.1e}")
    return report


# -- command line ---------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m trn_kernels.recipes.verify", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export", help="load an export and say whether it is a standard checkpoint")
    export.add_argument("folder")
    export.add_argument("--reference", help="a checkpoint to compare with")
    export.add_argument("--max-logit-difference", type=float, help="fail above it")
    log = commands.add_parser("log", help="judge a training log and draw its curves")
    log.add_argument("file")
    log.add_argument("--ranks", type=int, help="processes that there must be")
    log.add_argument("--layers", type=int, help="layers of the model, where the log does not say")
    log.add_argument("--first-loss", type=float, help="expected at step 1")
    log.add_argument("--tolerance", type=float, default=0.05, help="of the first loss, relative (default 0.05)")
    log.add_argument("--override", action="append", default=[], help="part of a replacement that there must be")
    log.add_argument("--png", help="where to draw the curves (default: FILE.png)")
    losses = commands.add_parser("losses", help="compare the losses of two runs, or of a run with a golden file")
    losses.add_argument("run", help="a training log, a folder of TensorBoard's events, or a golden file")
    losses.add_argument("golden", nargs="?", help="the same, to compare with")
    losses.add_argument("--tolerance", type=float, help=f"relative (default: the golden file's, else {TOLERANCE})")
    losses.add_argument("--write", metavar="GOLDEN", help="write the losses of the run there instead")
    options = parser.parse_args(arguments)
    if options.command == "losses" and (options.golden is None) == (options.write is None):
        losses.error("give either a second run or --write")
    # About a file, which they name; those of an export may come from deep inside other packages.
    told = () if options.command == "export" else (OSError, ValueError)
    try:
        return _run(options)
    except told as error:
        print(Report(problems=[str(error)]))
        return 1


def _run(options: argparse.Namespace) -> int:
    if options.command == "losses":
        if options.write is None:
            report = verify_losses(options.run, options.golden, options.tolerance)
        else:
            steps = read_losses(options.run)
            write_losses(steps, options.write, TOLERANCE if options.tolerance is None else options.tolerance)
            report = Report([f"{len(steps)} steps in {options.write}"])
    elif options.command == "export":
        from trn_kernels.recipes.cpu import stub_triton

        stub_triton()
        report = verify_export(options.folder, options.reference, options.max_logit_difference)
    else:
        report, read = verify_log(
            options.file,
            ranks=options.ranks,
            layers=options.layers,
            first_loss=options.first_loss,
            tolerance=options.tolerance,
            overrides=tuple(options.override),
        )
        if read.steps:
            png = options.png or f"{options.file}.png"
            try:  # whose failure must not lose the report
                draw(read, png)
                report.facts.append(f"curves: {png}")
            except (OSError, ValueError, ImportError) as error:
                report.problems.append(f"no curves in {png}: {type(error).__name__}: {error}")
    print(report)
    return 1 if report.problems else 0


if __name__ == "__main__":
    from trn_kernels.recipes.train import drop_package_folder

    drop_package_folder()
    sys.exit(main())
