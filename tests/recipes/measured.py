"""Measures what a training process really takes: `torchrun -m measured CONFIG STEPS`, configs are below.

A tiny training first loads and warms up whatever a process needs once. Then torchtitan's own trainer runs the config;
the growth of the resident set up to its peak in the steps after the first is printed as `measured RANK BYTES`.
"""

import ctypes
import gc
import sys
from dataclasses import dataclass

from trn_kernels.recipes import cpu

cpu.stub_triton()
if __name__ == "__main__":
    cpu.prepare()

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.trainer import Trainer

from trn_kernels.recipes.qwen3 import native_qwen3_debug, qwen3_nki_moe_config


class Tokens(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, seq_len, local_batch_size, **kwargs):
        self.tokens = torch.zeros(local_batch_size, seq_len, dtype=torch.int64)

    def __iter__(self):
        while True:
            positions = torch.arange(self.tokens.shape[1]).expand_as(self.tokens)
            yield {"input": self.tokens.clone(), "positions": positions}, self.tokens

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass


def _measured(config: Trainer.Config, dtype: str) -> Trainer.Config:
    config.dataloader = Tokens.Config()
    config.training.mixed_precision_param = dtype
    config.training.local_batch_size, config.training.seq_len = 4, 512
    config.metrics.log_freq = 1000
    return config


def dense() -> Trainer.Config:
    return _measured(native_qwen3_debug(), "float32")


def dense_bfloat16() -> Trainer.Config:
    return _measured(native_qwen3_debug(), "bfloat16")


def moe() -> Trainer.Config:
    config = qwen3_nki_moe_config("debugmodel_moe", n_layers=4, num_experts=16, top_k=2)
    config.hf_assets_path = native_qwen3_debug().hf_assets_path
    config.activation_checkpoint = None
    config.training.disable_cuda_graphs = True
    return _measured(config, "float32")


def _status(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def _train(config: Trainer.Config, steps: int) -> int:
    """Largest resident set in the steps after the first."""
    cpu.prepare_config(config)
    trainer = config.build()
    batches = trainer.batch_generator(trainer.dataloader)
    for step in range(1, steps + 1):
        trainer.step = step
        if step == 2:
            gc.collect()
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # the peak is from now on
        trainer.train_step(batches)
    return _status("VmHWM")


def main(config: str, steps: str, *flags: str) -> None:
    from torchtitan.config import ConfigManager

    def parsed():
        return ConfigManager().parse_args(["--module", "measured", "--config", config, *flags])

    warm = parsed()
    warm.training.local_batch_size, warm.training.seq_len = 1, 32
    warm.model_spec.model.layers = warm.model_spec.model.layers[:1]
    _train(warm, 2)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = _status("VmRSS")
    peak = _train(parsed(), int(steps))
    print(f"measured {torch.distributed.get_rank()} {peak - before}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    cpu.leave()
