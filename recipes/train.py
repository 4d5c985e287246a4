"""`python -m trn_kernels.recipes.train`: torchtitan.train, same arguments, also without an accelerator.

    torchrun --nproc_per_node=2 -m trn_kernels.recipes.train \\
        --module trn_kernels.recipes.qwen3 --config native_qwen3_debug \\
        --override.imports trn_kernels.overrides

Rank 0 ends with one line per operator and backend that its process ran: `[Launches] rope on emulator: 160`.
"""

import os
import sys


def drop_package_folder() -> None:
    """Take this package's own folder off `sys.path`; other folders, such as the user's, stay.

    `python -m` puts the current folder first. From the repository root our folders (`kernels`, `ops`, ...)
    would hide installed packages of the same name, Hugging Face's `kernels` for one.
    """
    package = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != package]


def main() -> None:
    """Train, then log the launches of rank 0, also when training fails."""
    drop_package_folder()
    from trn_kernels.recipes import cpu

    cpu.stub_triton()
    cpu.prepare()
    import torchtitan.train

    # Registers the overrides: torchtitan imports `trn_kernels` for that, but this process already has it.
    from trn_kernels.overrides.registry import check_named
    from trn_kernels.recipes.parallelism import check_parallelism

    class Config(torchtitan.train.ConfigManager):
        def parse_args(self, *args, **kwargs):
            config = super().parse_args(*args, **kwargs)
            cpu.prepare_config(config)
            check_parallelism(config)
            check_named(config.override.imports, config)
            return config

    torchtitan.train.ConfigManager = Config
    try:
        torchtitan.train.main()
    finally:
        asked_for_help = isinstance(sys.exc_info()[1], SystemExit)
        if os.environ.get("RANK", "0") == "0" and not asked_for_help:
            _log_launches()


def _log_launches() -> None:
    from torchtitan.tools.logging import logger

    from trn_kernels.ops.neuron import launches

    counts = launches()
    for (op, backend), count in sorted(counts.items()):
        logger.info(f"[Launches] {op} on {backend}: {count}")
    if not counts:
        logger.info("[Launches] none")


if __name__ == "__main__":
    main()
    from trn_kernels.recipes import cpu

    cpu.leave()
