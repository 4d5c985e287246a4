"""One training step of small Qwen3 models in every layout that torchtitan offers, against the same step in one process.

    python tests/recipes/matrix.py [WORDS]    # `make test-parallel`; only the rows whose name has these words

A row runs with all of ours (`on`), with torchtitan's RoPE (`off`) and, for a mixture of experts, with nothing of ours
(`stock`); rows that vary something else run `on` alone. Numbers are the largest relative differences from one process:
of the loss, of the norm of any parameter's gradient, of the norm of all. `bits` says that on and off have the same
gradients to the last bit; `state` that the weights went in and out again unchanged, under the same names, and the
optimizer's state has its names. See `problems` for what is asked of them.
"""

import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from workers import Workers

from trn_kernels.recipes.parallelism import schedules_take_microbatches, shards_typed_parameters

LAYERS, BATCH = 2, 4
SPMD = shards_typed_parameters()
BACKEND = "spmd_types" if SPMD else "partial_dtensor"
ALL = "trn_kernels.overrides"
ROPE, EXPERTS, AC = (f"{ALL}.{name}" for name in ("nki_rope", "nki_grouped_experts", "nki_selective_ac"))
BASE = [
    "--module",
    "recorded",
    "--debug.seed",
    "42",
    "--debug.deterministic",
    "--checkpoint.enable",
    "--checkpoint.interval",
    "1000",
]
DEGREES = {
    "replicate": "data_parallel_replicate_degree",
    "tp": "tensor_parallel_degree",
    "ep": "expert_parallel_degree",
    "pp": "pipeline_parallel_degree",
}


@dataclass(frozen=True)
class Row:
    model: str
    """A config function of `recorded.py`: dense, untied, moe or few (of which experts there are)."""
    layout: str = ""
    """Degrees, "tp 2, ep 2"; data parallelism shards over what is left of the processes."""
    processes: int = 1
    how: str = ""
    """More flags of torchtitan's, without those of `backend` and `checkpointing`."""
    backend: str = BACKEND
    checkpointing: str = ""
    """selective, full, or "ours": selective with our operators in the list."""
    only_on: bool = False

    @property
    def has_experts(self) -> bool:
        return self.model in ("moe", "few")

    @property
    def degrees(self) -> dict[str, int]:
        return {name: int(degree) for name, degree in (part.split() for part in self.layout.split(", ") if part)}

    @property
    def data_ranks(self) -> int:
        return self.processes // (self.degrees.get("tp", 1) * self.degrees.get("pp", 1))

    @property
    def logged_losses(self) -> int:
        """How many times the loss torchtitan logs; the recipes warn of more than one, see recipes/parallelism.py."""
        return self.data_ranks if self.backend == "full_dtensor" and not SPMD else 1

    @property
    def name(self) -> str:
        shards = self.data_ranks // self.degrees.get("replicate", 1)
        parts = [f"fsdp {shards}"] * (shards > 1) + [self.layout] * bool(self.layout)
        how = [word for word in self.how.replace("--", "").split() if word not in ("compile.enable", "compile.backend")]
        how = [word.rpartition(".")[2].replace("_", " ") for word in how]
        how += [f"AC {self.checkpointing}"] * bool(self.checkpointing)
        return ", ".join([self.model, *parts, *how, self.backend])

    def flags(self, variant: str) -> list[str]:
        imports = {"dense": {"on": ALL, "off": ""}, "moe": {"on": ALL, "off": EXPERTS, "stock": ""}}
        imports = imports["moe" if self.has_experts else "dense"][variant]
        if self.checkpointing == "ours":
            imports = ",".join(filter(None, (imports, AC)))
        flags = [
            f"--training.local_batch_size={BATCH // self.data_ranks}",
            f"--parallelism.spmd_backend={self.backend}",
        ]
        flags += [f"--parallelism.{DEGREES[axis]}={degree}" for axis, degree in self.degrees.items()]
        flags += [*self.how.split(), *(["--override.imports", imports] if imports else [])]
        if self.checkpointing:
            flags.append(f"activation-checkpoint:{'full' if self.checkpointing == 'full' else 'selective'}")
        return flags

    def config(self, variant: str) -> str:
        return "moe_stock" if variant == "stock" else self.model

    @property
    def variants(self) -> tuple[str, ...]:
        if self.only_on or "inductor" in self.how:  # which fuses, and so rounds, torchtitan's RoPE otherwise
            return ("on",)
        if self.model != "moe":
            return ("on", "off")
        simple = self.backend == BACKEND and not self.how and not self.checkpointing
        return ("on", "off", "stock") if simple else ("on",)


NO_SP = "--parallelism.no-enable-sequence-parallel"
AOT_EAGER, INDUCTOR = ("--compile.enable --compile.backend " + backend for backend in ("aot_eager", "inductor"))
FOUR_BATCHES = f"--training.global_batch_size {BATCH} --training.local_batch_size 1"


def rows() -> list[Row]:
    """All of them; torch 2.13 lacks torchtitan's default backend in more than one process, and its pipelines."""
    found = [Row("dense", backend=backend) for backend in ("partial_dtensor", "full_dtensor")]
    for n in (2, 4):
        for layout in ("", f"replicate {n}", f"tp {n}"):
            found += [Row("dense", layout, n), Row("moe", layout, n)]
        found += [Row("dense", f"tp {n}", n, NO_SP), Row("moe", f"tp {n}", n, NO_SP)]
        found += [Row("moe", f"ep {n}", n), Row("moe", f"tp {n}, ep {n}", n)]
        found += [Row("moe", f"tp {n}, ep {n}", n, NO_SP)] if SPMD else []
    for layout in ("replicate 2", "tp 2"):
        found += [Row("dense", layout, 4), Row("moe", layout, 4)]
    found += [Row("moe", layout, 4) for layout in ("ep 2", "replicate 2, ep 2", "tp 2, ep 2", "tp 2, ep 4")]
    found += [Row("few", layout, 4, only_on=True) for layout in ("", "replicate 2", "tp 2", "ep 2")]
    if schedules_take_microbatches():
        found += [Row("untied", "pp 2", 2), Row("moe", "pp 2", 2)]
        found += [Row("untied", layout, 4) for layout in ("pp 4", "pp 2", "tp 2, pp 2")]
        found += [Row("moe", layout, 4) for layout in ("pp 2", "ep 2, pp 2", "tp 2, ep 2, pp 2")]
    other = [row for row in found if row.processes > 1 and not row.how]
    if SPMD:  # one row at a time, which is refused with DTensors: see recipes/parallelism.py
        found += [Row("moe", "tp 2", 2, FOUR_BATCHES), Row("moe", "tp 2, pp 2", 4)]
    if SPMD:
        found += [replace(row, backend="partial_dtensor", only_on=True) for row in other]
    found += [replace(row, backend="full_dtensor", only_on=True) for row in other if row.processes == 2]
    found += [Row("dense", how=FOUR_BATCHES), Row("moe", how=FOUR_BATCHES)]
    found += [Row("dense", "", 2, FOUR_BATCHES), Row("moe", "ep 2", 2, FOUR_BATCHES)]
    modified = [Row("dense"), Row("moe"), Row("dense", "", 2), Row("dense", "tp 2", 2), Row("dense", "tp 2", 4)]
    modified += [Row("moe", layout, 2) for layout in ("", "tp 2", "ep 2", "tp 2, ep 2")] + [Row("moe", "tp 2, ep 2", 4)]
    for row in modified:
        found += [replace(row, checkpointing=policy) for policy in ("selective", "ours", "full")]
        found += [replace(row, how="--debug.spmd_typechecking")] if SPMD else []
        if row.processes < 4:
            found += [replace(row, how=AOT_EAGER)]
            found += (
                [replace(row, how=INDUCTOR)] if row.layout in ("", "tp 2" if row.model == "dense" else "ep 2") else []
            )
            if SPMD or row.layout == "":  # the others are refused: see recipes/parallelism.py
                found += [replace(row, how=AOT_EAGER, checkpointing="ours", only_on=True)]
    return [replace(row, backend="spmd_types") if row.processes == 1 and "check" in row.how else row for row in found]


def small() -> list[Row]:
    """A few that use every piece: the default test run."""
    found = [
        Row("dense", checkpointing="ours"),
        Row("dense", "", 2),
        Row("dense", "tp 2", 2),
        Row("moe", "ep 2", 2, checkpointing="ours"),
        Row("moe", "tp 2", 2, "--debug.spmd_typechecking" if SPMD else NO_SP),
        Row("moe", "replicate 2, ep 2", 4),
        Row("moe", "tp 2, ep 2", 4),
    ]
    if schedules_take_microbatches():
        found.append(Row("moe", "ep 2, pp 2", 4))
    return [replace(row, only_on=row.model == "moe") for row in found]


class Matrix:
    """Runs rows from the same weights, and compares."""

    def __init__(self, workers: Workers):
        self.workers = workers
        self._count = 0
        self._seeds: dict[str, Path] = {}
        self._references: dict[tuple[str, str], dict] = {}

    def seed(self, model: str) -> Path:
        """Folder of the checkpoint that every run of the model starts from; torchtitan's, made in one process."""
        if model not in self._seeds:
            self.workers.run(f"{model}_seed", *BASE, "--config", model, "--checkpoint.create_seed_checkpoint")
            self._seeds[model] = self.workers.folder / f"{model}_seed" / "checkpoint" / "step-0"
        return self._seeds[model]

    def run(self, model: str, *flags: str, processes: int = 1, load_only: bool = True) -> list[dict]:
        """What a run recorded: one dict per record, of all ranks together."""
        self._count += 1
        name = f"run{self._count}"
        start = ["--checkpoint.initial_load_path", str(self.seed(model.partition("_")[0]))]
        start += ["--checkpoint.load_only"] if load_only else []
        run = self.workers.run(name, *BASE, "--config", model, *start, *flags, processes=processes)
        return [_together(records) for records in zip(*run.records, strict=True)]

    def reference(self, model: str, variant: str) -> dict:
        if (model, variant) not in self._references:
            row = Row(model, backend="spmd_types")
            loaded, step = self.run(row.config(variant), *row.flags(variant))
            self._references[model, variant] = step | loaded
        return self._references[model, variant]

    def measure(self, row: Row) -> dict:
        """Differences from one process, by variant; see `problems`."""
        start = time.monotonic()
        measured = {}
        for variant in row.variants:
            reference = self.reference(row.model, variant)
            loaded, step = self.run(row.config(variant), *row.flags(variant), processes=row.processes)
            before, after = loaded["loaded"]["model"], step["weights"]
            same = [before == reference["loaded"]["model"], step["optimizer"].keys() == reference["optimizer"].keys()]
            if row.checkpointing:  # torchtitan halves the counts of tokens then, which the bias follows
                after = after | _biases(reference["weights"])
            same += [after == reference["weights"], after == before | _biases(after)]
            measured[variant] = {
                "loss": _difference(step["loss"], reference["loss"] * row.logged_losses),
                "gradients": max(
                    _difference(step["gradients"][name][0], norm) for name, (norm, _) in reference["gradients"].items()
                ),
                "norm": _difference(step["norm"], reference["norm"]),
                "state": all(same),
                "launches": step["launches"],
                "hashes": {name: bits for name, (_, bits) in step["gradients"].items()},
            }
        measured["bits"] = len({tuple(sorted(measured[v]["hashes"].items())) for v in row.variants[:2]}) == 1
        measured["seconds"] = time.monotonic() - start
        return measured


def _together(records: list[dict]) -> dict:
    """One record of all ranks: stages of a pipeline have other parameters, and only the last ones a loss."""
    total = records[0]
    for record in records[1:]:
        for key in record:
            if key == "loaded":
                total[key] = {kind: _merge(total[key][kind], record[key][kind]) for kind in record[key]}
            elif key == "launches":
                total[key] |= {name: max(total[key].get(name, 0), count) for name, count in record[key].items()}
            elif key == "loss":
                total[key] = max(total[key], record[key])  # -1 where there is none
            elif key in ("gradients", "weights", "optimizer"):
                total[key] = _merge(total[key], record[key])
    return total


def _merge(first: dict, second: dict) -> dict:
    for name in first.keys() & second.keys():
        if first[name] != second[name]:
            raise AssertionError(f"ranks differ in {name}: {first[name]} and {second[name]}")
    return first | second


def _biases(weights: dict) -> dict:
    """What balances the load of experts, and moves in every step."""
    return {name: value for name, value in weights.items() if name.endswith("expert_bias_E")}


def _difference(value: float, reference: float) -> float:
    return abs(value - reference) / max(abs(reference), 1e-12)


def problems(row: Row, measured: dict) -> list[str]:
    """What a row should not be: one line each.

    torchtitan's experts round to bfloat16 in between, and sums over ranks round elsewhere than one sum. It adds up the
    norm of all gradients in float32, one after another in one process, so that the value of one process is the worse.
    """
    found = []
    for variant in row.variants:
        limit = 2e-2 if variant == "stock" else 1e-5
        for part, most in (("loss", min(limit, 1e-4)), ("gradients", limit), ("norm", max(limit, 5e-5))):
            if not measured[variant][part] <= most:
                found.append(f"{variant}: {part} differs by {measured[variant][part]:.1e}, more than {most:.0e}")
        if not measured[variant]["state"]:
            found.append(f"{variant}: names or values of the state differ")
        launched = {name.split(" on ")[0] for name in measured[variant]["launches"]}
        wanted = {"rope", "rope_backward"} if variant == "on" else set()
        if row.has_experts and variant != "stock":
            wanted |= {"grouped_experts", "grouped_experts_backward"}
        if launched != wanted:
            found.append(f"{variant}: {sorted(launched)} ran, not {sorted(wanted)}")
    if not measured["bits"]:
        found.append("on and off differ")
    if row.checkpointing and "compile" not in row.how:
        again = 1 if row.checkpointing == "ours" else 2
        for name, count in measured["on"]["launches"].items():
            if "backward" not in name and count != again * LAYERS:
                found.append(f"{name}: {count} launches, not {again * LAYERS}")
    return found


def line(row: Row, measured: dict) -> str:
    cells = [f"{row.processes}", f"{row.name:64}"]
    for variant in ("on", "off", "stock"):
        values = measured.get(variant)
        parts = ("loss", "gradients", "norm")
        cells.append(" ".join(f"{values[part]:7.0e}" for part in parts) if values else " " * 23)
    bits = " " if len(row.variants) < 2 else "yes" if measured["bits"] else "no"
    cells += [f"{bits:3}", "yes" if all(measured[variant]["state"] for variant in row.variants) else "no "]
    return " | ".join([*cells, f"{measured['seconds']:4.0f} s"])


def main(words: list[str]) -> int:
    chosen = [row for row in rows() if all(word in row.name for word in words)]
    print(f"torch {torch.__version__}, {len(chosen)} rows; differences from one process: loss, gradients, norm of all")
    print(f"# | {'layout':64} | {'on':23} | {'off':23} | {'stock':23} | bits| state")
    bad, start = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Workers(Path(folder)) as workers:
        matrix = Matrix(workers)
        for row in chosen:
            try:
                measured = matrix.measure(row)
                print(line(row, measured), flush=True)
                complaints = problems(row, measured)
            except (RuntimeError, AssertionError) as error:
                print(f"{row.processes} | {row.name:64} | failed", flush=True)
                complaints = [str(error)]
            for complaint in complaints:
                print(f"    {complaint}", flush=True)
            bad += bool(complaints)
    print(f"{len(chosen) - bad} of {len(chosen)} rows are right, in {time.monotonic() - start:.0f} s")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
