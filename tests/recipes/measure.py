"""Measures what a training process really takes: `torchrun -m measure CONFIG` for a config of `measured.py`.

One layer of it first trains two steps, which loads and warms up whatever a process needs once. Then torchtitan's own
trainer does so with the config. What the resident set grows to in the second step, over what it was between the two
trainings, is printed as `measured RANK BYTES`.
"""

import ctypes
import gc
import sys

from trn_kernels.recipes import cpu


def status(field: str) -> int:
    """A figure of this process, in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def train(config) -> int:
    """Largest resident set in the second of two steps, when the optimizer has its state."""
    cpu.prepare_config(config)
    trainer = config.build()
    batches = trainer.batch_generator(trainer.dataloader)
    for trainer.step in (1, 2):
        if trainer.step == 2:
            gc.collect()
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # VmHWM, the peak, is from now on
        trainer.train_step(batches)
    return status("VmHWM")


def main(name: str) -> None:
    cpu.stub_triton()
    cpu.prepare()
    import torch
    from torchtitan.config import ConfigManager

    def parsed():
        return ConfigManager().parse_args(["--module", "measured", "--config", name])

    warm = parsed()
    warm.model_spec.model.layers = warm.model_spec.model.layers[:1]
    train(warm)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = status("VmRSS")
    print(f"measured {torch.distributed.get_rank()} {train(parsed()) - before}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    cpu.leave()
