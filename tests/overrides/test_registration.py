"""Each form of `--override.imports` finds our overrides and claims exactly the nodes it should."""

import subprocess
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
from torchtitan.config import Configurable, OverrideConfig, apply_overrides
from torchtitan.config.manager import ConfigManager
from torchtitan.config.override import _REGISTRY
from torchtitan.models.common.rope import CosSinRoPE
from torchtitan.models.qwen3.config_registry import qwen3_debugmodel

import trn_kernels
from trn_kernels.overrides import OVERRIDES, NKIRoPE, compat, nki_rope

LAYERS = 8  # of torchtitan's debug model
ROOT = Path(trn_kernels.__file__).parent


class OtherRoPE(CosSinRoPE):
    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass


def ropes(config):
    return [layer.attention.rope for layer in config.model_spec.model.layers]


def with_a_subclass(config):
    """Layer 3 has a RoPE that is not exactly the target."""
    attention = config.model_spec.model.layers[3].attention
    attention.rope = OtherRoPE.Config(dim=128, max_seq_len=16)
    return config


def test_target_is_exactly_cos_sin_rope():
    single = _REGISTRY["trn_kernels.overrides.nki_rope"]
    assert single.target_cls is CosSinRoPE.Config
    assert single.exact
    assert single.factory is nki_rope


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


@pytest.mark.parametrize("imports", ["trn_kernels.overrides", "trn_kernels.overrides.nki_rope"])
def test_subclass_is_not_claimed(imports):
    config = with_a_subclass(qwen3_debugmodel())
    assert len(apply_overrides(OverrideConfig(imports=[imports]), config)) == LAYERS - 1
    assert type(ropes(config)[3]) is OtherRoPE.Config


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


def test_unknown_kernel_is_refused():
    with pytest.raises(ValueError, match="kernel must be one of .*'rope'.*'rope_hf'.* got 'roap'"):
        nki_rope(CosSinRoPE.Config(dim=64, max_seq_len=8), kernel="roap")


def test_bundle_serves_several_targets(monkeypatch):
    """A second override joins by one more (target, factory) pair."""
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
        "trn_kernels.overrides.halve_eps",
        "trn_kernels.overrides",
    }
    target, bundle = registered["trn_kernels.overrides"]
    model = with_a_subclass(qwen3_debugmodel()).model_spec.model
    claims = [cfg for _, cfg, _, _ in model.traverse(target)]
    # One RoPE and two query/key norms per layer (the same node for both), two block norms, one final norm.
    assert {type(cfg) for cfg in claims} == {CosSinRoPE.Config, RMSNorm.Config}
    assert sum(type(cfg) is CosSinRoPE.Config for cfg in claims) == LAYERS - 1
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
    config = with_a_subclass(qwen3_debugmodel())
    lines = registry.apply("trn_kernels.overrides", config)
    claimed = [i for i in range(LAYERS) if i != 3]
    assert lines == [f"[Override] nki_rope: model_spec.model.layers.{i}.attention.rope" for i in claimed]
    assert [type(rope) for rope in ropes(config)].count(NKIRoPE.Config) == LAYERS - 1


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
        "import trn_kernels; print(*sorted(_REGISTRY))"
    )
    assert done.stdout.split() == ["trn_kernels.overrides", "trn_kernels.overrides.nki_rope"], done.stderr
