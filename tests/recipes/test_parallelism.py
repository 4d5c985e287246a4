"""Layouts of torchtitan against one process: a part of matrix.py, and what lasts longer than a step."""

import math

import pytest
from matrix import AOT_EAGER, Matrix, Row, problems, small
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.qwen3.config_registry import qwen3_debugmodel

from trn_kernels.recipes import parallelism, qwen3
from trn_kernels.recipes.parallelism import check_parallelism, fit_torch


@pytest.fixture(scope="module")
def matrix(workers):
    return Matrix(workers)


@pytest.mark.parametrize("row", small(), ids=lambda row: row.name)
def test_one_step_equals_one_process(matrix, row):
    measured = matrix.measure(row)
    assert problems(row, measured) == []


# -- several steps --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "saved", "others"),
    [
        (
            "dense",
            Row("dense", "", 2, AOT_EAGER, checkpointing="ours").flags("on"),
            [("tp 2", 2, "off"), ("", 1, "on")],
        ),
        (
            "moe",
            Row("moe", "tp 2", 2, checkpointing="full").flags("off"),
            [("ep 2", 2, "on"), ("tp 2, ep 2", 4, "on"), ("", 1, "off")],
        ),
    ],
    ids=["dense", "moe"],
)
def test_a_checkpoint_goes_on_in_every_layout(matrix, model, saved, others):
    """Weights and optimizer under the same names, bit for bit, and from there the same training."""
    learning = f"{model}_learning"
    steps = ["--dump_folder", f"saved_{model}", "--training.steps", "2"]
    _, first, second = matrix.run(learning, *steps, "--checkpoint.interval", "1", *saved, processes=2, load_only=False)
    assert any(name.endswith("exp_avg") for name in first["optimizer"])
    assert second["loss"] < first["loss"]
    for layout, processes, variant in others:
        flags = ["--checkpoint.load_step", "1", *Row(model, layout, processes).flags(variant)]
        loaded, resumed = matrix.run(learning, *steps, *flags, processes=processes)
        assert loaded["loaded"]["model"] == first["weights"], layout
        assert loaded["loaded"]["optimizer"] == first["optimizer"], layout
        assert resumed["step"] == 2
        assert resumed["loss"] == pytest.approx(second["loss"], rel=1e-5), layout
        for parameter, (norm, _) in second["gradients"].items():
            assert resumed["gradients"][parameter][0] == pytest.approx(norm, rel=1e-4), (layout, parameter)


def test_clipping_scales_by_the_norm_of_one_process(matrix):
    """Also where experts and other weights are on different meshes."""
    reference = matrix.reference("moe", "on")
    norms = {name: norm for name, (norm, _) in reference["gradients"].items()}
    total = math.sqrt(sum(norm**2 for norm in norms.values()))
    most = 0.5
    assert total > 2 * most
    for layout, processes in (("", 1), ("ep 2", 2), ("tp 2", 2), ("tp 2, ep 2", 4), ("replicate 2, ep 2", 4)):
        flags = Row("moe", layout, processes).flags("on")
        _, step = matrix.run("moe", "--training.max_norm", str(most), *flags, processes=processes)
        assert step["norm"] == pytest.approx(total, rel=5e-5), layout  # torchtitan sums it in float32
        scales = [step["gradients"][name][0] / norm for name, norm in norms.items() if norm]
        assert scales == pytest.approx([most / total] * len(norms), rel=5e-5), layout
        assert max(scales) == pytest.approx(min(scales), rel=1e-5), layout


@pytest.mark.parametrize("model", ["dense", "moe", "transformers"])
def test_every_label_weighs_the_same(matrix, model):
    """Where they are: 3 in one micro-batch and 61 in another, none on one rank and 64 on another."""
    for valid, processes in (("3 0 61 0", 1), ("0 0 64 0", 2)):
        labels = ["--dataloader.valid", *valid.split(), "--training.global_batch_size", "4"]
        *_, one = matrix.run(model, "--training.local_batch_size", "4", *labels)
        *_, two = matrix.run(model, "--training.local_batch_size", "2", *labels, processes=processes)
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
        for name, (norm, _) in one["gradients"].items():
            assert two["gradients"][name][0] == pytest.approx(norm, rel=1e-5, abs=1e-12), name


def test_logging_changes_nothing(matrix):
    """Metrics are read from the device only in the steps that log."""
    flags = ["--training.steps", "20", *Row("dense").flags("on")]
    runs = [matrix.run("dense_learning", "--metrics.log_freq", freq, *flags) for freq in ("1", "5", "20")]
    every, fifth, last = ({step["step"]: step for step in steps} for _, *steps in runs)
    assert [*every] == [*range(1, 21)]
    assert [*fifth] == [1, 5, 10, 15, 20]
    assert [*last] == [1, 20]
    assert every[20]["loss"] < every[1]["loss"]
    for steps in (fifth, last):
        for number, step in steps.items():
            assert {**step, "launches": None} == {**every[number], "launches": None}


def test_the_large_mixture_of_experts_on_64_ranks(workers):
    """`nki_qwen3_30b_a3b` with expert parallelism is built as on a trn2.48xlarge, here as its first rank alone."""
    flags = ["--module", "recorded", "--config", "large_moe", "--comm.mode", "fake_backend"]
    for degrees, local in (
        ({"expert": 8}, (1, 768, 2048)),  # 8 experts, over the 8 ranks of data parallelism that have the same ones
        ({"expert": 64}, (1, 768, 2048)),
        ({"expert": 16, "tensor": 4}, (1, 768, 2048)),
        ({"tensor": 4}, (4, 192, 2048)),
    ):
        asked = [f"--parallelism.{axis}_parallel_degree={degree}" for axis, degree in degrees.items()]
        backend = ["--parallelism.spmd_backend", "partial_dtensor"]
        (records,), (log,), _ = workers.run("large_moe", *flags, *asked, *backend, NGPU="64")
        shapes = records[0]["local"]
        experts = {name: tuple(shape) for name, shape in shapes.items() if name.endswith("experts.w1_EFD")}
        assert len(experts) == 4
        assert set(experts.values()) == {local}, degrees
        assert log.count(" GroupedExperts.Config -> NKIGroupedExperts.Config") == 4


# -- what is refused, with its numbers ------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def with_parallelism(config, **degrees):
    for name, value in degrees.items():
        full = f"{name}_parallel_degree"
        setattr(config.parallelism, full if hasattr(config.parallelism, full) else name, value)
    return config


def torch_is(monkeypatch, new: bool):
    monkeypatch.setattr(parallelism, "shards_typed_parameters", lambda: new)
    monkeypatch.setattr(parallelism, "schedules_take_microbatches", lambda: new)


REFUSED = {
    "kv heads": (qwen3.native_qwen3_debug, {"tensor": 16}, "tensor_parallel_degree is 16; .* divide .* n_kv_heads, 8"),
    "heads": (qwen3.native_qwen3_debug, {"tensor": 3}, "tensor_parallel_degree is 3; it must divide .* n_heads, 16"),
    "expert shards": (qwen3.nki_qwen3_moe_debug, {"expert": 16}, "expert_parallel_degree is 16; .* 8 experts"),
    "uneven experts": (qwen3.nki_qwen3_moe_debug, {"expert": 3}, "expert_parallel_degree is 3; .* 8 experts"),
    "context": (qwen3.native_qwen3_debug, {"context": 2}, "context_parallel_degree is 2; it must be 1: .*scaled_dot"),
}


@pytest.mark.parametrize(("recipe", "degrees", "message"), REFUSED.values(), ids=[*REFUSED])
@pytest.mark.parametrize("new", [False, True], ids=["torch 2.13", "torch 2.14"])
def test_degrees_that_do_not_fit(folder, monkeypatch, recipe, degrees, message, new):
    torch_is(monkeypatch, new)
    config = recipe()
    check_parallelism(config, processes=48)
    with pytest.raises(ValueError, match=message):
        check_parallelism(with_parallelism(config, **degrees), processes=48)


RANKS = {
    "tensor": (2, {"tensor": 3}, "_replicate_degree 1 x .*tensor_parallel_degree 3 .* = 3, .* divide .* ranks, 2"),
    "more than ranks": (2, {"tensor": 4}, "tensor_parallel_degree 4 .* = 4, which must divide the number of ranks, 2"),
    "fewer than ranks": (
        8,
        {"tensor": 2, "data_parallel_shard_degree": 2},
        "_shard_degree 2 x .*tensor_parallel_degree 2 .* = 4, which must be the number of ranks, 8",
    ),
    "expert": (2, {"expert": 3}, "expert_parallel_degree is 3, must divide 2, the number of ranks, 2, by"),
    "expert of replicas": (
        4,
        {"expert": 4, "data_parallel_replicate_degree": 2},
        "expert_parallel_degree is 4, must divide 2, the number of ranks, 4, by .*replicate_degree 2",
    ),
    "no tensor": (2, {"tensor": 0}, "tensor_parallel_degree is 0, must be at least 1$"),
    "no expert": (2, {"expert": 0}, "expert_parallel_degree is 0, must be at least 1$"),
    "no pipeline": (2, {"pipeline": 0}, "pipeline_parallel_degree is 0, must be at least 1$"),
    "no context": (2, {"context": -1}, "context_parallel_degree is -1, must be at least 1$"),
    "no replica": (2, {"data_parallel_replicate_degree": 0}, "_replicate_degree is 0, must be at least 1$"),
    "no shard": (2, {"data_parallel_shard_degree": 0}, "_shard_degree is 0, must be at least 1, or -1 for"),
}


@pytest.mark.parametrize(("processes", "degrees", "message"), RANKS.values(), ids=[*RANKS])
@pytest.mark.parametrize("recipe", [qwen3.native_qwen3_debug, qwen3.nki_qwen3_moe_debug], ids=["dense", "moe"])
def test_degrees_that_do_not_fit_the_ranks(folder, recipe, processes, degrees, message):
    with pytest.raises(ValueError, match=message):
        check_parallelism(with_parallelism(recipe(), **degrees), processes)


def test_ranks_of_a_run(folder, monkeypatch):
    """torchrun's, or those of torchtitan's rehearsal in one process."""
    config = with_parallelism(qwen3.native_qwen3_debug(), tensor=8)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("NGPU", "16")
    check_parallelism(config)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ValueError, match="the number of ranks, 1$"):
        check_parallelism(config)
    config.comm.mode = "fake_backend"
    check_parallelism(config)


@pytest.mark.parametrize(
    ("recipe", "length", "degrees", "message"),
    [
        (qwen3.native_qwen3_debug, 2056, {"tensor": 2}, None),
        (qwen3.native_qwen3_debug, 1016, {"tensor": 16, "enable_sequence_parallel": False}, "n_kv_heads"),
        (qwen3.native_qwen3_debug, 2060, {"tensor": 8}, r"seq_len is 2060; sequence parallelism .*_degree 8"),
        (qwen3.nki_qwen3_moe_debug, 2060, {"tensor": 8, "expert": 2}, "seq_len is 2060; sequence parallelism .* 8"),
        (
            qwen3.nki_qwen3_moe_debug,
            2060,
            {"tensor": 8, "expert": 2, "enable_sequence_parallel": False},
            r"seq_len is 2060; expert parallelism of degree 2 .*_degree 8",
        ),
        (qwen3.native_qwen3_debug, 2060, {}, "seq_len is 2060; loss.num_chunks, 8, must divide it"),
    ],
)
def test_sequences_that_cannot_be_split(folder, monkeypatch, recipe, length, degrees, message):
    torch_is(monkeypatch, True)
    config = with_parallelism(recipe(), **degrees)
    config.training.seq_len = length
    if message is None:
        check_parallelism(config, processes=16)
    else:
        with pytest.raises(ValueError, match=message):
            check_parallelism(config, processes=16)


@pytest.mark.parametrize(
    ("hidden", "processes", "degrees", "parts"),
    [
        (768, 16, {}, None),
        (770, 16, {}, 16),
        (770, 8, {}, None),
        (768, 64, {"expert": 8}, None),
        (772, 64, {"expert": 8}, 8),
        # torchtitan counts replicas too, although no shard is on them.
        (772, 16, {"data_parallel_replicate_degree": 2}, 8),
        (770, 8, {"data_parallel_replicate_degree": 2}, None),
    ],
)
def test_more_shards_than_experts(folder, monkeypatch, hidden, processes, degrees, parts):
    """FSDP then splits the experts' hidden dimension, evenly or not at all."""
    torch_is(monkeypatch, True)
    config = with_parallelism(qwen3.nki_qwen3_moe_debug(), **degrees)
    for layer in config.model_spec.model.layers:
        layer.moe.routed_experts.inner_experts.hidden_dim = hidden
    if parts is None:
        check_parallelism(config, processes)
    else:
        with pytest.raises(ValueError, match=f"8 experts over {processes} ranks, .* {hidden}, into {parts} parts"):
            check_parallelism(config, processes)


@pytest.mark.parametrize("new", [False, True], ids=["torch 2.13", "torch 2.14"])
def test_one_row_at_a_time_through_experts(folder, monkeypatch, new):
    torch_is(monkeypatch, new)

    def recipe(local_batch_size=1, **degrees):
        config = with_parallelism(qwen3.nki_qwen3_moe_debug(), **{"tensor": 2} | degrees)
        config.training.local_batch_size = local_batch_size
        return config

    dtensors = {"spmd_backend": "partial_dtensor"}
    with pytest.raises(ValueError, match="local_batch_size is 1; with .*tensor_parallel_degree 2"):
        check_parallelism(recipe(**dtensors), processes=2)
    check_parallelism(recipe(2, **dtensors), processes=2)
    check_parallelism(recipe(**dtensors, expert=2), processes=2)
    if not new:
        return
    check_parallelism(recipe(spmd_backend="spmd_types"), processes=2)
    check_parallelism(recipe(**dtensors, enable_sequence_parallel=False), processes=2)
    with pytest.raises(ValueError, match="pipeline_parallel_microbatch_size is 1; with"):
        check_parallelism(recipe(4, **dtensors, pipeline=2), processes=4)
    check_parallelism(recipe(4, **dtensors, pipeline=2, pipeline_parallel_microbatch_size=2), processes=4)


def test_what_an_older_torch_lacks(folder, monkeypatch):
    torch_is(monkeypatch, False)
    config = qwen3.nki_qwen3_moe_debug()
    assert config.parallelism.spmd_backend == "partial_dtensor"  # the recipes choose what works
    check_parallelism(config, processes=2)
    for flags, message in (
        ({"spmd_backend": "spmd_types"}, "'spmd_types', which in more than one process needs torch 2.14"),
        ({"pipeline": 2}, "pipeline_parallel_degree is 2; .* need torch 2.14"),
        ({"tensor": 2, "expert": 2, "enable_sequence_parallel": False}, "is 2 and tensor_parallel_degree 2; together"),
    ):
        config = with_parallelism(qwen3.nki_qwen3_moe_debug(), **flags)
        with pytest.raises(ValueError, match=message):
            check_parallelism(config, processes=2)
        torch_is(monkeypatch, True)
        check_parallelism(config, processes=2)
        torch_is(monkeypatch, False)
    one = with_parallelism(qwen3.native_qwen3_debug(), spmd_backend="spmd_types")
    check_parallelism(one, processes=1)
    one.debug.spmd_typechecking = True
    with pytest.raises(ValueError, match="'spmd_types', which with debug.spmd_typechecking needs torch 2.14"):
        check_parallelism(one, processes=1)


@pytest.mark.parametrize(
    "flags, refused",
    [
        ({"tensor": 2}, True),
        ({"expert": 2}, True),
        ({"spmd_backend": "full_dtensor"}, True),
        ({}, False),  # only FSDP: the blocks see plain tensors
    ],
)
def test_compiled_and_checkpointed_dtensors(folder, monkeypatch, flags, refused):
    def check(components=("model", "loss"), policy=SelectiveAC.Config):
        config = with_parallelism(qwen3.nki_qwen3_moe_debug(), **flags)
        config.training.local_batch_size = 2
        config.compile.enable, config.compile.components = True, list(components)
        config.activation_checkpoint = policy and policy()
        check_parallelism(config, processes=2)

    torch_is(monkeypatch, True)
    check()
    torch_is(monkeypatch, False)
    check(components=["loss"])
    check(policy=None)
    if refused:
        with pytest.raises(ValueError, match="compile.enable is on with activation checkpointing, .*need torch 2.14"):
            check()
    else:
        check()


def test_a_loss_that_is_logged_several_times_is_told(folder, monkeypatch, caplog):
    torch_is(monkeypatch, False)
    for processes, backend, told in (
        (2, "full_dtensor", True),
        (1, "full_dtensor", False),
        (2, "partial_dtensor", False),
    ):
        caplog.clear()
        with caplog.at_level("WARNING"):
            check_parallelism(with_parallelism(qwen3.native_qwen3_debug(), spmd_backend=backend), processes=processes)
        assert ("logs 2 times the loss" in caplog.text) == told


def test_a_newer_torch_keeps_torchtitans_backend(folder, monkeypatch):
    torch_is(monkeypatch, True)
    config = qwen3_debugmodel()
    fit_torch(config)
    assert config.parallelism.spmd_backend == "spmd_types"


def test_models_without_layers_pass(folder):
    config = qwen3.native_qwen3_debug()
    config.model_spec.model = object()
    check_parallelism(config)


def test_both_launchers_refuse(workers, folder, tmp_path):
    """Ours before a process group is made; torchtitan's, which asks the model, before anything is built."""
    flags = ["--module", "trn_kernels.recipes.qwen3", "--config", "nki_qwen3_moe_debug"]
    done = workers.run(
        "refused", *flags, "--parallelism.expert_parallel_degree", "3", folder=tmp_path, may_fail=True, processes=2
    )
    message = "parallelism.expert_parallel_degree is 3, must divide "
    assert done.failed[1] == 1
    assert f"ValueError: {message}2, the number of ranks" in done.logs[0]
    assert "Building device mesh" not in done.logs[0]
    config = with_parallelism(qwen3.nki_qwen3_moe_debug(), expert=3)
    with pytest.raises(ValueError, match=message):
        config.model_spec.model.update_from_config(config=config)
