"""Device code: NKI kernels, one file per family. They import nki, never torch or numpy.

Importing a kernel needs ``nki``: AWS's where it is installed, else ``trn_kernels.emulator.install()`` first.
"""
