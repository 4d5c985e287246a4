"""Hugging Face checkpoints through torchtitan and back, bit for bit; and those that are refused, by name."""

import hashlib
import json
import shutil

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from trn_kernels.recipes import qwen3
from trn_kernels.recipes.assets import debug_assets, debug_model
from trn_kernels.recipes.checkpoints import (
    INDEX,
    HFCheckpointManager,
    complete_export,
    expected_tensors,
    finetune,
    header_problems,
    loaded_from,
    read_config,
)

LAYERS = 2
EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Function that makes a published checkpoint, once for each kind."""
    root = tmp_path_factory.mktemp("published")

    def make(moe=False, tied=True, shards=1, dtype="bfloat16"):
        name = "-".join(map(str, ("moe" if moe else "dense", tied, shards, dtype)))
        assets = debug_assets(root / "assets")
        kind = {"moe": moe, "tied": tied, "shards": shards, "dtype": dtype, "num_layers": LAYERS}
        return debug_model(root / name, **kind, assets=assets)

    return make


@pytest.fixture(scope="module", autouse=True)
def one_process():
    """As in a training: torch writes the index of an export only where processes may be several."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def copied(published, tmp_path):
    """Function that copies a published checkpoint, to be damaged."""

    def make(**kind):
        return shutil.copytree(published(**kind), tmp_path / "copy")

    return make


def values(folder):
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def hashes(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def native(folder):
    """torchtitan's model config and adapter for a debug checkpoint."""
    facts = read_config(folder)
    moe = facts["model_type"] == "qwen3_moe"
    flavor, sizes = ("debugmodel_moe", (LAYERS, 8, 2)) if moe else ("debugmodel", (LAYERS, None, None))
    config = qwen3._native_qwen3(flavor, "none", reduced=sizes).model_spec.model
    config.reduced = ()
    config.enable_weight_tying = facts["tie_word_embeddings"]
    for layer in config.layers:
        if layer.moe is not None:
            layer.moe.load_balance_coeff = None
    qwen3.match_hf_config(config, str(folder))
    spec = qwen3.model_registry(flavor)
    with torch.device("meta"):
        model = config.build()
    unset(model)
    if config.enable_weight_tying:  # as torchtitan does when it initialises the weights
        model.tok_embeddings.weight = model.lm_head.weight
    return model, spec.state_dict_adapter(config, str(folder))


def unset(model):
    """All parameters of a meta model are NaN: what is not loaded shows."""
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    return model


def transformers_path(folder):
    """The model and adapter of torchtitan's transformers_modeling_backend."""
    from torchtitan.experiments.transformers_modeling_backend.state_dict_adapter import HFTransformerStateDictAdapter
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)

    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    with torch.device("meta"):
        model = Wrapped()
    unset(model).model.tie_weights()
    return model, HFTransformerStateDictAdapter(config, str(folder))


def manager(published, out, build, dtype="bfloat16"):
    model, adapter = build(published)
    config = HFCheckpointManager.Config(
        enable=True,
        initial_load_path=str(published),
        initial_load_in_hf=True,
        last_save_in_hf=True,
        export_dtype=dtype,
    )
    parts = {"dataloader": None, "model_parts": [model], "optimizers": None, "lr_schedulers": None, "states": {}}
    return config.build(**parts, sd_adapter=adapter, base_folder=str(out)), model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "build"),
    [
        ({}, native),
        ({"shards": 3}, native),
        ({"tied": False}, native),
        ({"tied": False, "shards": 3}, native),
        ({"moe": True}, native),
        ({"moe": True, "shards": 3}, native),
        ({"moe": True, "tied": False}, native),
        ({"moe": True, "tied": False, "shards": 3}, native),
        ({}, transformers_path),
        ({"shards": 3}, transformers_path),
        ({"tied": False, "shards": 3}, transformers_path),
    ],
    ids=lambda x: "-".join(f"{k}={v}" for k, v in x.items()) if isinstance(x, dict) else x.__name__,
)
def test_round_trip_is_exact(published, tmp_path, kind, build, dtype):
    folder = published(**kind, dtype=dtype)
    before = hashes(folder)
    checkpoints, _ = manager(folder, tmp_path, build, dtype)
    checkpoints.load()
    checkpoints._save_last_step(7)
    export = tmp_path / "checkpoint" / "step-7"
    assert [path.name for path in export.parent.iterdir()] == ["step-7"]
    ours, theirs = values(export), values(folder)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype == getattr(torch, dtype)
        assert torch.equal(ours[name], value), name
    assert hashes(folder) == before
    assert read_config(export)["dtype"] == dtype
    assert len(list(export.glob("*.safetensors"))) == len(list(folder.glob("*.safetensors")))
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (export / name).read_bytes() == (folder / name).read_bytes()
    assert not (export / "sharded").exists()


def test_export_opens_with_plain_transformers(published, tmp_path):
    folder = published(moe=True, tied=False, shards=3)
    checkpoints, _ = manager(folder, tmp_path, native)
    checkpoints.load()
    checkpoints._save_last_step(3)
    export = tmp_path / "checkpoint" / "step-3"
    model, info = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.bfloat16
    original = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.arange(40)[None]
    assert torch.equal(model(tokens).logits, original(tokens).logits)
    assert AutoTokenizer.from_pretrained(export).encode("import x") == AutoTokenizer.from_pretrained(folder).encode(
        "import x"
    )
    for file in export.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert opened.metadata()["format"] == "pt"


def test_fused_experts_reach_torchtitan_in_the_right_places(published, tmp_path):
    """Gate is 1, up 2, down 3 + expert id in Transformers' fused layout; so they must be in torchtitan's."""
    model = AutoModelForCausalLM.from_pretrained(published(moe=True, tied=False), dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            experts = layer.mlp.experts
            experts.gate_up_proj[:, : experts.intermediate_dim] = 1.0
            experts.gate_up_proj[:, experts.intermediate_dim :] = 2.0
            experts.down_proj.copy_((3.0 + torch.arange(8))[:, None, None].expand_as(experts.down_proj))
    folder = tmp_path / "marked"
    model.save_pretrained(folder)
    assert header_problems(folder) == []
    checkpoints, loaded = manager(folder, tmp_path, native)
    checkpoints.load()
    for layer in loaded.layers.values():
        experts = layer.moe.routed_experts.inner_experts
        assert (experts.w1_EFD == 1).all()
        assert (experts.w3_EFD == 2).all()
        assert torch.equal(experts.w2_EDF[:, 0, 0], 3.0 + torch.arange(8))


@pytest.mark.parametrize("build", [native, transformers_path])
def test_tied_head_on_disk_or_not_is_the_same(published, copied, tmp_path, build):
    """Published tied checkpoints exist with and without lm_head.weight; an index then lists it as well."""
    plain = published(shards=2)
    folder = copied(shards=2)
    index = json.loads((folder / INDEX).read_text())
    file = folder / index["weight_map"]["model.norm.weight"]
    tensors = load_file(file)
    tensors["lm_head.weight"] = values(plain)["model.embed_tokens.weight"].clone()
    save_file(tensors, file, {"format": "pt"})
    index["weight_map"]["lm_head.weight"] = file.name
    (folder / INDEX).write_text(json.dumps(index))
    assert header_problems(folder) == []
    checkpoints, model = manager(folder, tmp_path, build)
    checkpoints.load()
    inner = getattr(model, "model", model)
    embedding = inner.model.embed_tokens if build is transformers_path else inner.tok_embeddings
    assert inner.lm_head.weight.data_ptr() == embedding.weight.data_ptr()
    checkpoints._save_last_step(1)
    ours, theirs = values(tmp_path / "checkpoint" / "step-1"), values(plain)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert header_problems(tmp_path / "checkpoint" / "step-1") == []

    tensors["lm_head.weight"][3, 5] += 1
    save_file(tensors, file, {"format": "pt"})
    assert header_problems(folder) == [
        "lm_head.weight differs from model.embed_tokens.weight, although tie_word_embeddings is true"
    ]


# -- what is refused ------------------------------------------------------------------------------------


def rewrite(folder, change):
    """Change the tensors of a single-file checkpoint in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def move(tensors, old, new):
    tensors[new] = tensors.pop(old)


def fuse(tensors):
    parts = [tensors.pop(f"model.layers.0.mlp.experts.0.{part}_proj.weight") for part in ("gate", "up")]
    tensors["model.layers.0.mlp.experts.gate_up_proj"] = torch.cat(parts)[None]


@pytest.mark.parametrize(
    ("change", "problems"),
    [
        (lambda t: t.pop(EXPERT), [f"{EXPERT} is missing"]),
        (
            lambda t: t.update({"model.layers.0.mlp.experts.8.up_proj.weight": torch.ones(768, 256)}),
            ["model.layers.0.mlp.experts.8.up_proj.weight is unexpected"],
        ),
        (
            lambda t: move(t, EXPERT, EXPERT.replace("experts.5", "experts.05")),
            [f"{EXPERT} is missing", f"{EXPERT.replace('experts.5', 'experts.05')} is unexpected"],
        ),
        (
            fuse,
            [
                "model.layers.0.mlp.experts.0.gate_proj.weight is missing",
                "model.layers.0.mlp.experts.0.up_proj.weight is missing",
                "model.layers.0.mlp.experts.gate_up_proj is unexpected",
            ],
        ),
        (lambda t: t.pop("lm_head.weight"), ["lm_head.weight is missing"]),
        (
            lambda t: t.update({EXPERT: t[EXPERT].T.contiguous()}),
            [f"{EXPERT} has shape [256, 768], config.json says [768, 256]"],
        ),
        (
            lambda t: t.update({EXPERT: t[EXPERT].to(torch.int8)}),
            [f"{EXPERT} is of dtype I8, must be one of F64, F32, F16, BF16"],
        ),
    ],
    ids=["missing", "unexpected", "misnamed", "fused", "untied without head", "transposed", "quantised"],
)
def test_wrong_tensors_are_named(copied, tmp_path, change, problems):
    folder = copied(moe=True, tied=False)
    rewrite(folder, change)
    assert header_problems(folder) == problems
    checkpoints, _ = manager(folder, tmp_path, lambda _: native(folder))
    with pytest.raises(ValueError, match="cannot be loaded:\n  " + problems[0].replace("[", r"\[")):
        checkpoints.load()


def test_truncated_and_corrupt_files_are_named(copied):
    folder = copied()
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    last = max(
        json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")]).items(),
        key=lambda x: x[1].get("data_offsets", [0])[0],
    )
    file.write_bytes(whole[:-1])
    assert any(
        p.startswith(f"{last[0]} in model.safetensors ends at byte {len(whole)}; ") for p in header_problems(folder)
    )
    for damaged, message in (
        (whole[:5], "model.safetensors is truncated or corrupt: 5 bytes"),
        (whole[:100], "model.safetensors is truncated or corrupt: 100 bytes"),
        (b"\xff" * 8 + whole[8:], "model.safetensors is truncated or corrupt"),
        (whole[:8] + b"?" + whole[9:], "model.safetensors is corrupt: its header is not JSON"),
        (whole + b"x", "model.safetensors has 1 bytes after its last tensor"),
        (whole.replace(b'"dtype":"BF16"', b'"dtype":"F8_4"', 1), "which no Qwen3 checkpoint has"),
        (whole.replace(b'"shape":[2048,256]', b'"shape":[2048,255]', 1), "is at bytes"),
    ):
        file.write_bytes(damaged)
        problems = header_problems(folder)
        assert any(message in problem for problem in problems), (message, problems[:3])
    file.unlink()
    assert f"no safetensors file in {folder}" in header_problems(folder)


def test_index_and_files_must_agree(copied):
    folder = copied(shards=3)
    path = folder / INDEX
    index = json.loads(path.read_text())
    files = sorted({*index["weight_map"].values()})

    def problems(change):
        changed = json.loads(json.dumps(index))
        change(changed["weight_map"])
        path.write_text(json.dumps(changed))
        return header_problems(folder)

    assert problems(lambda m: None) == []
    assert problems(lambda m: m.pop("model.norm.weight")) == [
        f"model.norm.weight is in {index['weight_map']['model.norm.weight']}, but not in {INDEX}"
    ]
    other = next(file for file in files if file != index["weight_map"]["model.norm.weight"])
    assert problems(lambda m: m.update({"model.norm.weight": other})) == [
        f"model.norm.weight is not in {other}, where {INDEX} has it"
    ]
    assert f"gone.safetensors of {INDEX} is not there" in problems(
        lambda m: m.update({"model.norm.weight": "gone.safetensors"})
    )
    path.write_text("{}")
    assert f"{INDEX} is corrupt: KeyError('weight_map')" in header_problems(folder)
    path.write_text(json.dumps(index))
    shutil.copy(folder / files[0], folder / "stray.safetensors")
    name = next(name for name, file in index["weight_map"].items() if file == files[0])
    assert f"{name} is in {files[0]} and in stray.safetensors" in header_problems(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("build", [native, transformers_path])
def test_weight_that_is_no_number_is_named(copied, tmp_path, value, build):
    name = "model.layers.1.mlp.down_proj.weight"
    folder = copied()
    rewrite(folder, lambda t: t[name].view(-1)[7:8].fill_(value))
    checkpoints, _ = manager(folder, tmp_path, build)
    with pytest.raises(ValueError, match=f"{name} in .* has values that are not finite"):
        checkpoints.load()


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("num_hidden_layers", 1, "model.layers.1.self_attn.q_proj.weight is unexpected"),
        ("num_hidden_layers", 3, "model.layers.2.self_attn.q_proj.weight is missing"),
        ("num_key_value_heads", 4, r"k_proj.weight has shape [1024, 256], config.json says [512, 256]"),
        ("vocab_size", 2049, "model.embed_tokens.weight has shape [2048, 256], config.json says [2049, 256]"),
        ("model_type", "llama", "model_type is 'llama' in config.json; this checks 'qwen3' and 'qwen3_moe'"),
        ("head_dim", 64, "q_norm.weight has shape [128], config.json says [64]"),
        ("num_attention_heads", None, "config.json has no usable field"),
    ],
)
def test_config_of_another_size_is_refused(copied, field, value, problem):
    folder = copied()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {field: value}))
    assert any(problem in found for found in header_problems(folder))


def test_config_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ValueError, match="config.json cannot be read: .*No such file"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "config.json cannot be read: Expecting" in header_problems(tmp_path)[0]


def test_expected_tensors_are_those_of_transformers():
    """Of a model with a dense layer among the sparse ones, and biases."""
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=8, intermediate_size=12, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, num_experts=3, num_experts_per_tok=1, moe_intermediate_size=6,
        mlp_only_layers=[1], decoder_sparse_step=1, attention_bias=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    facts = config.to_dict() | {"num_experts": 3}
    names = expected_tensors(facts)
    fused = {name for name in model.state_dict() if ".experts." in name}
    plain = {name: tuple(value.shape) for name, value in model.state_dict().items() if name not in fused}
    assert {name: shape for name, shape in names.items() if ".experts." not in name} == plain
    assert {name.split(".experts.")[0] for name in names if ".experts." in name} == {
        name.split(".experts.")[0] for name in fused
    }


# -- exports and resuming -------------------------------------------------------------------------------


def test_published_dtype_field_is_kept_by_its_old_name(published, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    config = json.loads((published() / "config.json").read_text())
    config["torch_dtype"] = config.pop("dtype")
    (source / "config.json").write_text(json.dumps(config))
    out = tmp_path / "out"
    out.mkdir()
    complete_export(out, source, published(), "float32")
    written = json.loads((out / "config.json").read_text())
    assert written == config | {"torch_dtype": "float32"}
    assert (out / "tokenizer.json").exists()


def test_only_whole_checkpoints_are_found(published, tmp_path):
    checkpoints, _ = manager(published(), tmp_path, native)
    root = tmp_path / "checkpoint"
    assert checkpoints._find_load_step() == -1
    for step, files in ((2, [".metadata"]), (4, [".metadata"]), (6, ["__0_0.distcp", ".metadata.tmp"])):
        (root / f"step-{step}").mkdir(parents=True)
        for file in files:
            (root / f"step-{step}" / file).touch()
    (root / ".unfinished-8").mkdir()
    (root / ".unfinished-8" / INDEX).touch()
    assert checkpoints._find_load_step() == 4
    (root / "step-8").mkdir()
    (root / "step-8" / INDEX).touch()
    with pytest.raises(FileExistsError, match="step-8 is a finished export"):
        checkpoints.load()


def test_export_never_replaces_a_checkpoint_of_training(published, tmp_path):
    checkpoints, _ = manager(published(), tmp_path, native)
    checkpoints.load()
    step = tmp_path / "checkpoint" / "step-3"
    step.mkdir(parents=True)
    (step / "__0_0.distcp").touch()
    checkpoints._save_last_step(3)  # over the half of one
    assert header_problems(step) == []
    shutil.rmtree(step)
    step.mkdir()
    (step / ".metadata").touch()
    with pytest.raises(FileExistsError, match="step-3 holds a checkpoint of training; the export is whole in"):
        checkpoints._save_last_step(3)
    assert header_problems(tmp_path / "checkpoint" / ".unfinished-3") == []


def test_export_without_a_config_is_refused_before_training(published, copied, tmp_path):
    folder = copied()
    build = native(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="config.json cannot be read"):
        manager(folder, tmp_path, lambda _: build)


def test_load_balancing_is_off_when_fine_tuning(published, monkeypatch, tmp_path, caplog):
    monkeypatch.chdir(tmp_path)
    config = qwen3.nki_qwen3_moe_debug()
    config.model_spec.model.update_from_config(config=config)
    assert all(layer.moe.load_balance_coeff for layer in config.model_spec.model.layers)
    finetune(config, "ft", published(moe=True, tied=False))
    config.hf_assets_path = config.checkpoint.initial_load_path
    with caplog.at_level("INFO"):
        config.model_spec.model.update_from_config(config=config)
    assert all(layer.moe.load_balance_coeff is None for layer in config.model_spec.model.layers)
    assert "load balancing by expert bias is off in 4 layers" in caplog.text


def test_weights_of_another_model_are_refused_before_loading(published, copied, monkeypatch, tmp_path):
    """The folder of the weights is checked, also where it is not the one of the tokenizer."""
    monkeypatch.chdir(tmp_path)
    config = qwen3.native_qwen3_debug_finetune()
    assert loaded_from(config) == str(tmp_path / "assets" / "debug_qwen3")
    folder = copied()
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | {"num_hidden_layers": 4, "num_attention_heads": 8}))
    config.checkpoint.initial_load_path = str(folder)
    with pytest.raises(ValueError, match="num_attention_heads is 8 in .*copy/config.json, but 16 in the native model"):
        config.model_spec.model.update_from_config(config=config)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="copy/config.json cannot be read"):
        config.model_spec.model.update_from_config(config=config)
    config.checkpoint.enable = False
    config.model_spec.model.update_from_config(config=config)
