from trn_kernels.recipes.cpu import stub_triton

# Before any test module imports torchtitan, whose models do not import without Triton.
stub_triton()
