"""Each form of `--override.imports` finds our overrides and claims exactly the nodes it should."""

import shlex
import subprocess
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from unittest.mock import patch

import pytest
from torchtitan.config import Configurable, OverrideConfig, apply_overrides, derive
from torchtitan.config.manager import ConfigManager
from torchtitan.config.override import _REGISTRY
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.rope import CosSinRoPE
from torchtitan.models.qwen3.config_registry import qwen3_30b_a3b, qwen3_debugmodel, qwen3_moe_debug

import trn_kernels
from trn_kernels.overrides import OPT_IN, OVERRIDES, NKIGroupedExperts, NKIRoPE, compat, nki_grouped_experts, nki_rope
from trn_kernels.overrides.activation_checkpoint import SAVED, NKISelectiveAC
from trn_kernels.overrides.registry import check_named

LAYERS = 8  # of torchtitan's debug model
ROOT = Path(trn_kernels.__file__).parent


class OtherRoPE(CosSinRoPE):
    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass


class OtherExperts(GroupedExperts):
    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass


def ropes(config):
    return [layer.attention.rope for layer in config.model_spec.model.layers]


def experts(config):
    return [layer.moe.routed_experts.inner_experts for layer in config.model_spec.model.layers]


def with_a_subclass(config):
    """Layer 3 has a RoPE, and experts if it is a mixture, that are not exactly the targets."""
    layer = config.model_spec.model.layers[3]
    layer.attention.rope = OtherRoPE.Config(dim=128, max_seq_len=16)
    if layer.moe is not None:
        routed = layer.moe.routed_experts
        routed.inner_experts = derive(routed.inner_experts, OtherExperts.Config)
    return config


@pytest.mark.parametrize(
    ("factory", "target"), [(nki_rope, CosSinRoPE.Config), (nki_grouped_experts, GroupedExperts.Config)]
)
def test_target_is_exactly_the_stock_class(factory, target):
    single = _REGISTRY[f"trn_kernels.overrides.{factory.__name__}"]
    assert single.target_cls is target
    assert single.exact
    assert single.factory is factory


@pytest.mark.parametrize(
    ("tokens", "name", "kernel"),
    [
        (["trn_kernels.overrides"], "trn_kernels.overrides", "rope"),
        (["trn_kernels.overrides.nki_rope"], "trn_kernels.overrides.nki_rope", "rope"),
        (
            ['trn_kernels.overrides.nki_rope={"kernel": "rope_hf"}'],
            "trn_kernels.overrides.nki_rope",
            "rope_hf",
        ),
    ],
)
def test_command_line_forms(tokens, name, kernel):
    config = ConfigManager().parse_args(
        ["--module", "qwen3", "--config", "qwen3_debugmodel", "--override.imports", *tokens]
    )
    config.model_spec.model.update_from_config(config=config)
    lines = apply_overrides(config.override, config)
    assert len(lines) == LAYERS
    for i, line in enumerate(lines):
        where = f"model_spec.model.layers.{i}.attention.rope"
        assert line.startswith(f"[Override] {name}: {where} CosSinRoPE.Config -> NKIRoPE.Config")
    assert all(type(rope) is NKIRoPE.Config and rope.kernel == kernel for rope in ropes(config))
    assert len({id(rope) for rope in ropes(config)}) == LAYERS


def documented_forms():
    """What the README says to type after `--override.imports`, word by word."""
    lines = (ROOT / "README.md").read_text().splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("--override.imports ")]


@pytest.mark.parametrize("words", documented_forms(), ids=" ".join)
def test_documented_forms(words):
    """Each parses as it stands, and every override in it claims something."""
    command = ["--module", "qwen3", "--config", "qwen3_moe_debug", "--override.imports", *words]
    config = ConfigManager().parse_args(command)
    lines = apply_overrides(config.override, config)
    names = [word.partition("=")[0] for word in words if word.startswith("trn_kernels.")]
    assert names
    assert {line.split()[1].rstrip(":") for line in lines} == set(names)
    if names[-1].endswith("nki_selective_ac"):
        save = ("grouped_experts",) if "=" in words[1] else SAVED
        assert (type(config.activation_checkpoint), config.activation_checkpoint.save) == (NKISelectiveAC.Config, save)


def test_keywords_and_commas():
    """torchtitan splits by commas only where no keywords follow; hence the README's spaces."""
    start = ["--module", "qwen3", "--config", "qwen3_moe_debug", "--override.imports"]
    keywords = 'trn_kernels.overrides.nki_selective_ac={"save": ["grouped_experts"]}'
    config = ConfigManager().parse_args([*start, f"trn_kernels.overrides,{keywords}"])
    with pytest.raises(ImportError, match="trn_kernels.overrides,trn_kernels.overrides"):
        apply_overrides(config.override, config)


@pytest.mark.parametrize(
    ("imports", "rope", "inner"),
    [
        ("trn_kernels.overrides", NKIRoPE, NKIGroupedExperts),
        ("trn_kernels.overrides.nki_rope", NKIRoPE, GroupedExperts),
        ("trn_kernels.overrides.nki_grouped_experts", CosSinRoPE, NKIGroupedExperts),
        (
            "trn_kernels.overrides.nki_rope,trn_kernels.overrides.nki_grouped_experts",
            NKIRoPE,
            NKIGroupedExperts,
        ),
    ],
)
def test_mixture_of_experts(imports, rope, inner):
    """Together and singly; one line for each node that is replaced."""
    config = ConfigManager().parse_args(
        ["--module", "qwen3", "--config", "qwen3_moe_debug", "--override.imports", imports]
    )
    lines = apply_overrides(config.override, config)
    expected = []
    for i in range(LAYERS):
        layer = f": model_spec.model.layers.{i}."
        if rope is NKIRoPE:
            expected.append(f"{layer}attention.rope CosSinRoPE.Config -> NKIRoPE.Config")
        if inner is NKIGroupedExperts:
            node = "moe.routed_experts.inner_experts"
            expected.append(f"{layer}{node} GroupedExperts.Config -> NKIGroupedExperts.Config")
    # What comes before the node is the name of the override.
    assert sorted(line[line.index(": ") :] for line in lines) == sorted(expected)
    assert {type(cfg) for cfg in ropes(config)} == {rope.Config}
    assert {type(cfg) for cfg in experts(config)} == {inner.Config}


@pytest.mark.parametrize(
    ("imports", "claims"),
    [
        ("trn_kernels.overrides", 2),
        ("trn_kernels.overrides.nki_rope", 1),
        ("trn_kernels.overrides.nki_grouped_experts", 1),
    ],
)
def test_subclass_is_not_claimed(imports, claims):
    config = with_a_subclass(qwen3_moe_debug())
    assert len(apply_overrides(OverrideConfig(imports=[imports]), config)) == claims * (LAYERS - 1)
    assert type(ropes(config)[3]) is OtherRoPE.Config
    assert type(experts(config)[3]) is OtherExperts.Config


def test_some_layers_by_an_override_of_ones_own(tmp_path, monkeypatch):
    """What the README says: a factory of the package under the user's `fqns`, in the user's module."""
    (tmp_path / "my_overrides.py").write_text(
        "from torchtitan.config import override\n"
        "from torchtitan.models.common.moe import GroupedExperts\n"
        "from trn_kernels.overrides import nki_grouped_experts\n"
        "\n"
        "@override(target=GroupedExperts.Config, exact=True, fqns=['*.layers.1[0-9].*'])\n"
        "def nki_experts_10_to_19(cfg):\n"
        "    return nki_grouped_experts(cfg)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = qwen3_30b_a3b()
    imports = ["my_overrides.nki_experts_10_to_19", "trn_kernels.overrides.nki_rope"]
    with patch.dict(_REGISTRY):
        lines = apply_overrides(OverrideConfig(imports=imports), config)
    mine = [line for line in lines if line.startswith("[Override] my_overrides.nki_experts_10_to_19: ")]
    assert len(mine) == 10
    assert len(lines) == 10 + 48
    claimed = [i for i, cfg in enumerate(experts(config)) if type(cfg) is NKIGroupedExperts.Config]
    assert claimed == [*range(10, 20)]


@pytest.mark.parametrize(
    ("config", "imports", "missing"),
    [
        (qwen3_debugmodel, ["trn_kernels.overrides.nki_grouped_experts"], "GroupedExperts.Config"),
        # Beside one that finds something torchtitan says nothing.
        (qwen3_debugmodel, ["trn_kernels.overrides", "trn_kernels.overrides.nki_selective_ac"], "SelectiveAC.Config"),
        (qwen3_debugmodel, [("trn_kernels.overrides.nki_selective_ac", {"save": ["rope"]})], "SelectiveAC.Config"),
        (qwen3_moe_debug, ["trn_kernels.overrides.nki_grouped_experts", "torchtitan.overrides.any"], None),
        (qwen3_debugmodel, ["trn_kernels.overrides"], None),
    ],
)
def test_a_named_override_has_something_to_replace(config, imports, missing):
    config = config()
    config.activation_checkpoint = FullAC.Config()
    if missing is None:
        check_named(imports, config)
    else:
        name = imports[-1] if isinstance(imports[-1], str) else imports[-1][0]
        with pytest.raises(ValueError, match=f"names {name}, which replaces {missing}; the config has none"):
            check_named(imports, config)


def test_bundle_and_single_override_conflict_by_node():
    imports = ["trn_kernels.overrides", ("trn_kernels.overrides.nki_rope", {"kernel": "rope_hf"})]
    with pytest.raises(ValueError, match="both claim node 'model_spec.model.layers.0.attention.rope'"):
        apply_overrides(OverrideConfig(imports=imports), qwen3_debugmodel())


def test_factory_keeps_every_field():
    config = CosSinRoPE.Config(
        dim=64,
        max_seq_len=77,
        theta=5e6,
        scaling="yarn",
        rope_factor=4.0,
        param_init={"weight": None},
        sharding_config=object(),
    )
    new = nki_rope(config, kernel="rope_hf")
    assert type(new) is NKIRoPE.Config
    assert new.kernel == "rope_hf"
    for field in fields(config):
        assert getattr(new, field.name) is getattr(config, field.name)
    assert type(new.build()) is NKIRoPE


def test_experts_factory_keeps_every_field():
    config = GroupedExperts.Config(
        dim=6, hidden_dim=5, num_experts=3, param_init={"w1_EFD": None}, sharding_config=object()
    )
    new = nki_grouped_experts(config)
    assert type(new) is NKIGroupedExperts.Config
    assert {f.name for f in fields(new)} == {f.name for f in fields(config)}
    for field in fields(config):
        assert getattr(new, field.name) is getattr(config, field.name)
    module = new.build()
    assert type(module) is NKIGroupedExperts
    assert module.num_experts == 3
    assert module._param_init is config.param_init
    assert module._sharding_config is config.sharding_config


def test_unknown_kernel_is_refused():
    with pytest.raises(ValueError, match="kernel must be one of .*'rope'.*'rope_hf'.* got 'roap'"):
        nki_rope(CosSinRoPE.Config(dim=64, max_seq_len=8), kernel="roap")


def test_keywords_of_the_whole_package_are_refused():
    imports = OverrideConfig(imports=[("trn_kernels.overrides", {"kernel": "rope_hf"})])
    with pytest.raises(ValueError, match=r"takes no keywords, got \{'kernel': 'rope_hf'\}; .*overrides.nki_rope"):
        apply_overrides(imports, qwen3_debugmodel())


def test_bundle_serves_several_targets(monkeypatch):
    """Another override joins by one more (target, factory) pair."""
    from torchtitan.models.common.nn_modules import RMSNorm

    registered = {}

    def override(*, target, description, exact=False):
        def decorator(fn):
            registered[f"{fn.__module__}.{fn.__name__}"] = (target, fn)
            return fn

        return decorator

    def halve_eps(cfg: RMSNorm.Config):
        """Some other override."""
        return replace(cfg, eps=cfg.eps / 2)

    monkeypatch.setattr(compat, "override", override)
    compat.register([*OVERRIDES, (RMSNorm.Config, halve_eps)])
    assert set(registered) == {
        "trn_kernels.overrides.nki_rope",
        "trn_kernels.overrides.nki_grouped_experts",
        "trn_kernels.overrides.halve_eps",
        "trn_kernels.overrides",
    }
    target, bundle = registered["trn_kernels.overrides"]
    model = with_a_subclass(qwen3_moe_debug()).model_spec.model
    claims = [cfg for _, cfg, _, _ in model.traverse(target)]
    assert {type(cfg) for cfg in claims} == {CosSinRoPE.Config, GroupedExperts.Config, RMSNorm.Config}
    assert sum(type(cfg) is CosSinRoPE.Config for cfg in claims) == LAYERS - 1
    assert sum(type(cfg) is GroupedExperts.Config for cfg in claims) == LAYERS - 1
    norm = next(cfg for cfg in claims if type(cfg) is RMSNorm.Config)
    assert bundle(norm).eps == norm.eps / 2


class NamedRegistry:
    """The registry of torchtitan's builds of June and July 2026: names, and whole modules on the command line."""

    def __init__(self, has_exact):
        self.entries = {}
        if not has_exact:
            self.override = self._override_without_exact

    def override(self, name, *, target, fqns=None, description="", exact=False):
        assert isinstance(target, type) and issubclass(target, Configurable.Config)

        def decorator(factory):
            if name in self.entries:
                raise ValueError(f"Override '{name}' is already registered")
            self.entries[name] = (target, exact, factory, factory.__module__)
            return factory

        return decorator

    def _override_without_exact(self, name, *, target, fqns=None, description=""):
        return NamedRegistry.override(self, name, target=target, fqns=fqns, description=description)

    def apply(self, module, config):
        lines = []
        for name, (target, exact, factory, origin) in self.entries.items():
            if origin != module and not origin.startswith(module + "."):
                continue
            for fqn, cfg, parent, attribute in list(config.traverse(target)):
                if exact and type(cfg) is not target:
                    continue
                setattr(parent, attribute, factory(cfg))
                lines.append(f"[Override] {name}: {fqn}")
        return lines


@pytest.mark.parametrize("has_exact", [False, True], ids=["10 June", "21 June"])
def test_builds_with_named_overrides(monkeypatch, has_exact):
    registry = NamedRegistry(has_exact)
    monkeypatch.setattr(compat, "override", registry.override)
    compat.register(OVERRIDES)
    config = with_a_subclass(qwen3_moe_debug())
    lines = registry.apply("trn_kernels.overrides", config)
    nodes = [("nki_rope", "attention.rope"), ("nki_grouped_experts", "moe.routed_experts.inner_experts")]
    assert lines == [
        f"[Override] {name}: model_spec.model.layers.{i}.{node}"
        for name, node in nodes
        for i in range(LAYERS)
        if i != 3
    ]
    assert [type(rope) for rope in ropes(config)].count(NKIRoPE.Config) == LAYERS - 1
    assert [type(inner) for inner in experts(config)].count(NKIGroupedExperts.Config) == LAYERS - 1


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", timeout=120)


def test_plain_import_is_light():
    code = "import sys, trn_kernels; print(*(m for m in sys.modules if m in ('torch', 'torchtitan', 'transformers')))"
    done = run(code)
    assert (done.stdout.strip(), done.returncode) == ("", 0), done.stderr


def test_import_registers_where_torchtitan_is_loaded():
    """All that torchtitan imports for `trn_kernels.overrides` is `trn_kernels`."""
    done = run(
        f"import runpy; runpy.run_path({str(ROOT / 'recipes' / 'cpu.py')!r})['stub_triton']()\n"
        "from torchtitan.config.override import _REGISTRY\n"
        "import torchtitan.models.common\n"
        "import trn_kernels; print(*sorted(_REGISTRY))"
    )
    factories = [factory.__name__ for _, factory in [*OVERRIDES, *OPT_IN]]
    names = ["trn_kernels.overrides", *(f"trn_kernels.overrides.{name}" for name in factories)]
    assert done.stdout.split() == sorted(names), done.stderr
