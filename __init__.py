"""NKI kernels for AWS Trainium as PyTorch operators, torchtitan overrides and Qwen3 recipes."""

import sys

__version__ = "0.1.0"

# For `--override.imports trn_kernels.overrides` torchtitan imports only what stands before the last dot, so
# the overrides have to be registered by then. Without torchtitan's models in the process there is nothing to replace.
if "torchtitan.config.override" in sys.modules and "torchtitan.models.common" in sys.modules:
    from trn_kernels import overrides  # noqa: F401
