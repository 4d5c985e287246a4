"""Registers override factories with whichever override registry the installed torchtitan has.

torchtitan 0.3 finds a factory under `<module>.<function>` and has no form for a whole module. Its builds of
June and July 2026 give each override a name and activate every override that a listed module defines. One
list of (config class, factory) serves both: `--override.imports trn_kernels.overrides` means all of it.
"""

import inspect
from collections.abc import Callable, Sequence

from torchtitan.config import Configurable, override

Override = tuple[type[Configurable.Config], Callable]

_PACKAGE = "trn_kernels.overrides"


class _Exactly(type):
    """Metaclass of a config class whose instances are the configs of exactly the types in its `targets`."""

    def __instancecheck__(cls, instance):
        return type(instance) in cls.targets


def _exactly(*targets: type[Configurable.Config]) -> type[Configurable.Config]:
    return _Exactly("ExactConfig", (Configurable.Config,), {"targets": targets})


def register(overrides: list[Override], opt_in: Sequence[Override] = ()) -> None:
    """Register each factory as `trn_kernels.overrides.<name>` and all together as `trn_kernels.overrides`.

    Args:
        overrides: (target, factory) pairs. The factory takes a config of exactly the type `target`, plus
            keywords from the command line, and returns its replacement. Its `__module__` is set to this
            package, because torchtitan forms its key from that.
        opt_in: more of them, which have to be named. Builds that activate whole modules do not get them.
    """
    parameters = inspect.signature(override).parameters
    named = "name" in parameters
    for target, factory in overrides if named else [*overrides, *opt_in]:
        factory.__module__ = _PACKAGE
        # Before 21 June 2026 override() could not say `exact`.
        exact = {"target": target, "exact": True} if "exact" in parameters else {"target": _exactly(target)}
        override(*([factory.__name__] if named else []), description=_summary(factory), **exact)(factory)
    if not named:
        override(target=_exactly(*dict(overrides)), description=f"all of {_PACKAGE}")(_bundle(overrides))


def _bundle(overrides: list[Override]) -> Callable:
    """One factory for all targets, under the key that torchtitan 0.3 looks up for the whole package.

    It claims the very nodes that the single factories claim, so torchtitan logs each of them and detects
    conflicts node by node, as if every factory had been listed.
    """
    factories = dict(overrides)

    def bundle(cfg: Configurable.Config, **keywords) -> Configurable.Config:
        if keywords:
            names = ", ".join(f"{_PACKAGE}.{factory.__name__}" for factory in factories.values())
            raise ValueError(f"{_PACKAGE} takes no keywords, got {keywords}; give them to one of {names}")
        return factories[type(cfg)](cfg)

    bundle.__module__, _, bundle.__name__ = _PACKAGE.rpartition(".")
    return bundle


def _summary(factory: Callable) -> str:
    return inspect.getdoc(factory).partition("\n")[0]
