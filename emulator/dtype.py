"""``nki.dtype``: the dtypes, which are plain strings."""

from . import dtypes

globals().update({name: name for name in dtypes.NAMES})
bool_ = "bool"
