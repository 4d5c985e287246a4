"""The proof tools: what they accept, and that each fault is found and named."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trn_kernels.recipes import env, verify
from trn_kernels.recipes.assets import debug_model
from trn_kernels.recipes.verify import main, read_log, verify_export, verify_log

LAYERS, STEPS = 3, 4
KINDS = ("attention.rope CosSinRoPE.Config -> NKIRoPE.Config", "moe.experts GroupedExperts.Config -> NKIExperts.Config")


def line(text, rank=0):
    return f"[rank{rank}]:[titan] 2026-11-29 19:48:47,709 - root - INFO - {text}"


def step(number, loss, grad_norm="1.2345", rank=0):
    return line(
        f"\x1b[31mstep: {number:2}  \x1b[32mloss: {loss}  \x1b[38;2;180;60;0mgrad_norm: {grad_norm}  "
        f"\x1b[38;2;54;234;195mmemory:  0.89GiB(3.80%)  \x1b[34mtps: 1,07{number}  \x1b[36mtflops: 0.01  "
        "\x1b[35mmfu: 12.50%\x1b[39m",
        rank,
    )


def lines(*, name="4B", loaded=True, losses=(6.51, 6.4, 6.2, 6.1)):
    return [
        line("Building device mesh with parallelism: pp=1, dp_replicate=2, dp_shard=32, cp=1, tp=1, ep=1"),
        line(f"[Recipe] {LAYERS} layers, native"),
        *(
            line(f"[Override] trn_kernels.overrides: model_spec.model.layers.{i}.{kind}")
            for i in range(LAYERS)
            for kind in KINDS
        ),
        line(f"\x1b[34mModel qwen3 {name} \x1b[31msize: 4,022,468,096 total parameters\x1b[39m"),
        *([line("Loading from HF safetensors from --checkpoint.initial_load_path: /weights")] if loaded else []),
        *(step(number, f"{loss:8.5f}") for number, loss in enumerate(losses, 1)),
        line("[Launches] rope on neuron: 12"),
    ]


@pytest.fixture
def log(tmp_path):
    def write(content):
        path = tmp_path / "log"
        path.write_text("\n".join(content) + "\n")
        return path

    return write


def test_good_log(log):
    report, found = verify_log(log(lines()), ranks=64, overrides=("rope", "experts"))
    assert report.problems == []
    assert (found.ranks, found.layers, found.loaded) == (64, LAYERS, "/weights")
    assert [s["loss"] for s in found.steps] == [6.51, 6.4, 6.2, 6.1]
    assert found.steps[1] | {"loss": 0} == {
        "step": 2, "loss": 0, "grad_norm": 1.2345, "memory": 0.89, "tps": 1072, "tflops": 0.01, "mfu": 12.5,
    }  # fmt: skip
    for fact in (
        "model: qwen3 4B, 4,022,468,096 parameters, weights of /weights",
        "ranks: 64",
        f"override: 3 of 3 layers, trn_kernels.overrides: model_spec.model.layers.*.{KINDS[0]}",
        "loss: 6.51 at step 1, expected 6.54 within 5%",
        "loss trend: falls, -0.4100 to 6.1 at step 4",
        "memory: median 0.89 GiB, largest 0.89 GiB",
        "tps: median 1073 tokens/s per rank, largest 1074 tokens/s per rank",
        "mfu: median 12.5 %, largest 12.5 %",
        "launches: rope on neuron: 12",
    ):
        assert fact in report.facts


@pytest.mark.parametrize(
    ("change", "options", "problem"),
    [
        (
            lambda text: [x for x in text if "layers.1.attention" not in x],
            {},
            f"no override line for layers 1 of trn_kernels.overrides: model_spec.model.layers.*.{KINDS[0]}",
        ),
        (
            lambda text: [x for x in text if "layers.2." not in x],  # also where no kind has the last layer
            {},
            f"no override line for layers 2 of trn_kernels.overrides: model_spec.model.layers.*.{KINDS[1]}",
        ),
        (
            lambda text: [x for x in text if "[Override]" not in x],
            {"overrides": ("rope",)},
            "no override line with 'rope'",
        ),
        (lambda text: text, {"layers": 4}, "no override line for layers 3 of"),
        (
            lambda text: [*text, line("override.imports=['x'] produced no replacements. Check that")],
            {},
            "override without effect: ",
        ),
        (lambda text: [*text, step(5, "     nan")], {}, "loss is nan at step 5"),
        (lambda text: [*text, step(5, " 6.00000", "inf")], {}, "grad_norm is inf at step 5"),
        (lambda text: text, {"ranks": 65}, "64 ranks, expected 65"),
        (lambda text: text[1:], {"ranks": 1}, "0 ranks, expected 1"),
        (lambda text: text, {"first_loss": 6.19}, "first loss is 6.51, expected 6.19 within 5%"),
        (lambda text: [x for x in text if "step:  1" not in x], {}, "the log begins at step 2, so that its first loss"),
        (lambda text: [x for x in text if "step:" not in x], {}, "no step in the log"),
    ],
)
def test_each_fault_of_a_log_is_named(log, change, options, problem):
    report, _ = verify_log(log(change(lines())), **options)
    assert any(found.startswith(problem) for found in report.problems), report.problems
    assert f"FAIL {problem}" in str(report)


@pytest.mark.parametrize(
    ("first", "loaded", "name", "wrong"),
    [
        (6.54 * 1.049, True, "4B", False),
        (6.54 * 1.051, True, "4B", True),
        (6.54 * 0.949, True, "4B", True),
        (12.43, True, "4B", True),
        (12.43, False, "4B", False),
        (6.54, False, "4B", True),
        (11.0, True, "debugmodel", False),
    ],
)
def test_published_first_losses(log, first, loaded, name, wrong):
    report, _ = verify_log(log(lines(name=name, loaded=loaded, losses=(first, 5.0))))
    assert bool(report.problems) == wrong


def test_published_loss_of_the_transformers_recipe(log):
    source = "from Qwen/Qwen3-4B-Instruct-2507"
    text = [x.replace("native", source) for x in lines(name="full", losses=(7.5, 7.0))]
    assert verify_log(log(text))[0].problems == ["first loss is 7.5, expected 6.54 within 5%"]


def test_only_the_lowest_rank_counts(log):
    text = [y for x in lines() for y in (x.replace("[rank0]", "[rank9]"), x.replace("[rank0]", "[rank10]"))]
    found = read_log(log([*text, step(1, "     nan", rank=10), "[default0]: noise"]))
    assert found.steps == []  # rank 0 says nothing
    found = read_log(log([*text, step(1, "     nan", rank=10)]))
    assert len(found.steps) == STEPS
    found = read_log(log([x.partition(":")[2] for x in lines()]))  # one process, without torchrun's prefix
    assert (len(found.steps), found.ranks, len(found.overrides)) == (STEPS, 64, 2)


def test_log_from_the_command_line(log, tmp_path, capsys):
    path = log(lines())
    assert main(["log", str(path), "--ranks", "64"]) == 0
    assert capsys.readouterr().out.endswith("OK\n")
    from matplotlib.image import imread

    picture = imread(f"{path}.png")[..., :3]
    assert picture.shape[0] > 600 and picture.shape[1] > 1000
    blue = (abs(picture - torch.tensor([0x1F, 0x77, 0xB4]).numpy() / 255) < 0.02).all(-1)
    halves = [
        blue[rows, columns].sum()
        for rows in (slice(0, 390), slice(390, None))
        for columns in (slice(600), slice(600, None))
    ]
    assert min(halves) > 200  # a curve in each of the four panels
    assert main(["log", str(path), "--ranks", "65", "--png", str(tmp_path / "other.png")]) == 1
    assert "FAIL 64 ranks, expected 65" in capsys.readouterr().out
    assert (tmp_path / "other.png").exists()


def test_the_median_of_an_even_number_is_between(log):
    facts = verify_log(log([*lines(), step(5, " 6.00000")]))[0].facts  # four after the first
    assert "tps: median 1073.5 tokens/s per rank, largest 1075 tokens/s per rank" in facts


GOOD = {"steps": {"1": {"loss": 2.0, "grad_norm": 1.0}}}


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("log missing.log", "[Errno 2] No such file or directory: 'missing.log'"),
        ("losses missing.log good.json", "[Errno 2] No such file or directory: 'missing.log'"),
        ("losses good.json missing.json", "[Errno 2] No such file or directory: 'missing.json'"),
        ("losses good.json empty.json", "empty.json is no golden file: KeyError: 'steps'"),
        ("losses good.json list.json", "list.json is no golden file: TypeError"),
        ("losses good.json text.json", "text.json is no golden file: JSONDecodeError"),
        ("losses good.json word.json", "word.json is no golden file: ValueError"),
        ("losses good.json no_loss.json", "no loss of step 1 in no_loss.json"),
        ("losses no_loss.json good.json", "no loss of step 1 in no_loss.json"),
        ("losses good.json zero.json", "loss of step 1 is 0 in zero.json"),
        ("losses good.json --write nowhere/new.json", "[Errno 2] No such file or directory: 'nowhere/new.json'"),
    ],
)
def test_files_that_cannot_be_judged_are_named(tmp_path, monkeypatch, capsys, command, problem):
    monkeypatch.chdir(tmp_path)
    files = {
        "good": json.dumps(GOOD),
        "empty": "{}",
        "list": "[]",
        "text": "steps",
        "word": json.dumps({"steps": {"1": {"loss": "small"}}}),
        "no_loss": json.dumps({"steps": {"1": {"grad_norm": 1.0}}}),
        "zero": json.dumps({"steps": {"1": {"loss": 0.0}}}),
    }
    for name, text in files.items():
        (tmp_path / f"{name}.json").write_text(text)
    assert main(command.split()) == 1
    (complaint,) = [text for text in capsys.readouterr().out.splitlines() if text.startswith("FAIL ")]
    assert complaint.startswith(f"FAIL {problem}")


def test_curves_that_cannot_be_drawn_leave_the_report(log, tmp_path, capsys):
    assert main(["log", str(log(lines())), "--png", str(tmp_path / "nowhere" / "curves.png")]) == 1
    out = capsys.readouterr().out
    assert "loss: 6.51 at step 1" in out
    assert f"FAIL no curves in {tmp_path / 'nowhere' / 'curves.png'}: FileNotFoundError" in out


# -- exports --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("verify")
    kind = {"num_layers": 1, "assets": root / "assets"}
    return {
        "dense": debug_model(root / "dense", **kind),
        "moe": debug_model(root / "moe", moe=True, tied=False, **kind),
    }


@pytest.fixture
def copied(models, tmp_path):
    return lambda name: shutil.copytree(models[name], tmp_path / "copy")


def rewrite(folder: Path, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_good_export(models, name):
    report = verify_export(models[name], models[name], max_logit_difference=0.0)
    assert report.problems == []
    assert "largest difference of logits from the reference: 0" in report.facts
    assert any(fact.startswith("0 of ") for fact in report.facts)
    opened = "Qwen3ForCausalLM, torch.bfloat16, embeddings tied"
    if name == "moe":
        opened = "Qwen3MoeForCausalLM, torch.bfloat16, embeddings not tied"
    assert f"opens as {opened}" in report.facts


def swap(tensors, prefix):
    gate, up = (f"{prefix}.{part}_proj.weight" for part in ("gate", "up"))
    tensors[gate], tensors[up] = tensors[up], tensors[gate]


def test_swapped_gate_and_up_are_named(models, copied):
    """Also after a training that moved the weights: by as much as a tenth here."""
    folder = copied("moe")

    def change(tensors):
        swap(tensors, "model.layers.0.mlp.experts.3")
        for name, value in tensors.items():
            if ".experts." in name:
                tensors[name] = value + 0.1 * value.std() * torch.randn_like(value)

    rewrite(folder, change)
    report = verify_export(folder, models["moe"])
    prefix = "model.layers.0.mlp.experts.3"
    assert report.problems == [f"{prefix}.gate_proj.weight and {prefix}.up_proj.weight are swapped"]
    assert verify_export(folder).problems == []  # nothing else can tell


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda t: t["model.norm.weight"][3:5].fill_(float("nan")),
            "model.norm.weight has 2 values that are not finite",
        ),
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda t: t.update(extra=torch.ones(1)), "extra is unexpected"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(7)}),
            "model.norm.weight has shape [7], config.json says [256]",
        ),
        (
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"].float()}),
            "dtype is 'bfloat16' in config.json, but the tensors are BF16, F32",
        ),
    ],
)
def test_each_fault_of_an_export_is_named(copied, change, problem):
    folder = copied("dense")
    rewrite(folder, change)
    assert problem in verify_export(folder).problems


def test_files_that_an_export_needs(copied):
    folder = copied("dense")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert any(problem.startswith("AutoTokenizer.from_pretrained: ") for problem in verify_export(folder).problems)
    (folder / "config.json").unlink()
    assert any("config.json cannot be read" in problem for problem in verify_export(folder).problems)


def test_tokenizer_larger_than_the_model(copied, models):
    folder = copied("dense")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][-1] | {"id": 2048, "content": "<|new|>"})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "the tokenizer has 2049 tokens, vocab_size is 2048" in verify_export(folder).problems


def test_export_from_the_command_line(models, copied, capsys):
    assert main(["export", str(models["dense"])]) == 0
    folder = copied("dense")
    rewrite(folder, lambda t: t["model.norm.weight"].mul_(2))
    arguments = ["export", str(folder), "--reference", str(models["dense"])]
    assert main(arguments) == 0
    capsys.readouterr()
    assert main([*arguments, "--max-logit-difference", "0.01"]) == 1
    assert "more than 0.01" in capsys.readouterr().out
    assert main(["export", str(models["moe"]), "--reference", str(models["dense"])]) == 1
    assert "its config.json is of another size" in capsys.readouterr().out


# -- env ------------------------------------------------------------------------------------------------


def test_env_here(capsys, monkeypatch):
    monkeypatch.delenv("TRN_KERNELS_BACKEND", raising=False)
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    status = env.main()
    out = capsys.readouterr().out
    rows = {row[0]: row[1:] for row in env.packages()}
    assert rows["torch"][0] == torch.__version__
    assert rows["torchtitan"][1:] == ("<0.4,>=0.3", "ok")
    assert set(rows) == {
        "python", "torch", "torchtitan", "transformers", "torch-neuronx", "nki", "nki-library", "torchtitan-neuron",
    }  # fmt: skip
    assert "LNC                1\n" in out
    assert all(f"{operator:<18} " in out for operator in env.OPERATORS)
    assert (status == 0) == out.endswith("OK\n")


def test_env_names_what_is_wrong(capsys, monkeypatch):
    versions = {"python": "3.11.1", "torch": "2.12.0", "torchtitan": None, "transformers": "5.20.0", "nki": "0.9.0"}
    monkeypatch.setattr(env, "_version", versions.get)
    monkeypatch.setenv("TRN_KERNELS_BACKEND", "neuron")
    verdicts = {name: verdict for name, _, _, verdict in env.packages()}
    assert verdicts["torch"] == verdicts["nki"] == "unsupported"
    assert verdicts["torchtitan"] == "missing"
    assert verdicts["transformers"] == "ok"
    assert verdicts["torch-neuronx"] == "optional"
    assert env.main() == 1
    out = capsys.readouterr().out
    assert "rope               error: TRN_KERNELS_BACKEND=neuron: kernels cannot run on cpu" in out
    assert out.endswith("NOT READY: grouped_experts, nki, rope, rope_hf, torch, torchtitan\n")


def test_env_on_a_device(capsys, monkeypatch):
    from types import SimpleNamespace

    monkeypatch.setattr("trn_kernels.recipes.cpu.accelerator", lambda: "neuron")
    monkeypatch.setattr(torch, "get_device_module", lambda name: SimpleNamespace(device_count=lambda: 64))
    monkeypatch.setattr(env, "backends", lambda kind: dict.fromkeys(env.OPERATORS, f"on {kind}"))
    assert env.main() == 1  # a device, and no compiler for kernels
    out = capsys.readouterr().out
    assert "device             neuron, 64 logical cores\n" in out
    assert "rope               on neuron\n" in out
    assert out.endswith("NOT READY: nki, torch-neuronx\n")


def test_panels_and_columns_agree():
    assert {name for name, _ in verify.PANELS} <= set(verify._STEP.groupindex)
