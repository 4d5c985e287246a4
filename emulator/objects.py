"""``nl.NKIObject``: the base of the classes that a kernel may define."""

from __future__ import annotations

import dataclasses
import inspect


class _Construct(type):
    """Objects take any keyword as an attribute, also where ``@dataclass`` made an ``__init__`` without it.

    The NKI compiler copies keywords to attributes and leaves the other fields unset; kernels rely on both. A class
    with an ``__init__`` of its own is built as Python does.
    """

    def __call__(cls, *args, **kwargs):
        init = cls.__init__
        generated = init is NKIObject.__init__ or getattr(init, "__code__", None).co_filename == "<string>"
        if not generated:
            return super().__call__(*args, **kwargs)
        try:
            inspect.signature(init).bind(None, *args, **kwargs)
            if init is not NKIObject.__init__:
                return super().__call__(*args, **kwargs)
        except TypeError:
            pass
        fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
        names = [field.name for field in fields] or list(cls.__dict__.get("__annotations__", ()))
        if len(args) > len(names):
            raise TypeError(f"{cls.__name__} has {len(names)} fields, {len(args)} values were given")
        built = cls.__new__(cls)
        for field in fields:
            if field.default is not dataclasses.MISSING:
                object.__setattr__(built, field.name, field.default)
            elif field.default_factory is not dataclasses.MISSING:
                object.__setattr__(built, field.name, field.default_factory())
        # object.__setattr__: also a frozen dataclass is built.
        for name, value in {**dict(zip(names, args, strict=False)), **kwargs}.items():
            object.__setattr__(built, name, value)
        if hasattr(built, "__post_init__"):
            built.__post_init__()
        return built


class NKIObject(metaclass=_Construct):
    """A plain object of a kernel: keyword arguments become attributes."""

    def __init__(self, **kwargs):
        for name, value in kwargs.items():
            setattr(self, name, value)
