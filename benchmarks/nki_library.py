"""AWS's nki-library as a competitor, where its source is: the environment variable ``NKILIB_SRC``, or installed.

Nothing of it is part of this repository. Its blockwise kernels also gather rows by index and scale them by the
router's affinities; here they get rows that are sorted already, one expert per row and no scaling where the kernel
can, so that the task is that of ``grouped_experts``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from trn_kernels import emulator

BLOCK = 256
"""Rows of a block: the smallest that all its kernels take, which pads least."""


def available() -> bool:
    return _root() is not None


@functools.cache
def _root() -> str | None:
    """Name of its package; ``NKILIB_SRC`` names a checkout of https://github.com/aws-neuron/nki-library."""
    source = os.environ.get("NKILIB_SRC")
    if source:
        folder = Path(source, "src")
        if not (folder / "nkilib_src" / "nkilib").is_dir():
            raise FileNotFoundError(f"NKILIB_SRC={source!r}: there is no src/nkilib_src/nkilib")
        sys.path.append(str(folder))
        return "nkilib_src.nkilib"
    return "nkilib" if importlib.util.find_spec("nkilib") is not None else None


def load(module: str):
    """A module of it, such as "core.embeddings.rope_hf", on the emulator where the real ``nki`` is not there."""
    emulator.install()
    return importlib.import_module(f"{_root()}.{module}")


def version() -> str | None:
    """Commit of the checkout if it has one."""
    if not available():
        return None
    command = ["git", "-C", os.environ.get("NKILIB_SRC") or ".", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True) if os.environ.get("NKILIB_SRC") else None
    return done.stdout.strip() if done and done.returncode == 0 else "commit unknown"


def block_tables(counts: np.ndarray, block: int = BLOCK) -> tuple[np.ndarray, np.ndarray]:
    """Which row is at each place of each block (-1: none), and the expert of each block, for sorted rows.

    Args:
        counts: [E], rows of each expert.

    Returns:
        ids [N * block] and experts [N], int32. N is the number of blocks that is enough for every routing; those that
        this one does not need are given to the last expert, as the library's own tests do.
    """
    num_experts, num_rows = len(counts), int(counts.sum())
    num_blocks = -(-max(0, num_rows - (num_experts - 1)) // block) + num_experts - 1
    blocks = -(-counts // block)
    blocks[-1] += num_blocks - blocks.sum()
    first = np.concatenate([[0], np.cumsum(blocks)[:-1]]) * block
    ids = np.full(num_blocks * block, -1, np.int32)
    start = 0
    for at, count in zip(first, counts, strict=True):
        ids[at : at + count] = np.arange(start, start + count)
        start += count
    return ids, np.arange(num_experts).repeat(blocks).astype(np.int32)
