import os

# The compile caches of torch do not notice that the fake of an operator has changed.
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

from trn_kernels.recipes.cpu import stub_triton

# Before any test module imports torchtitan, whose models do not import without Triton.
stub_triton()
