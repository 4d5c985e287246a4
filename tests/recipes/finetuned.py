"""Config functions for the child processes of test_finetune.py.

Recorded is [step, loss, gradient norm] of each step. `KILL` is a moment at which rank 0 kills itself:
`save 4` (all data of the checkpoint of step 4 is written, its metadata is not), `step 5` or `export`.
"""

import os
import signal
from dataclasses import dataclass

from recorded import OneBatch, record
from torch.distributed.checkpoint import FileSystemWriter
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import derive
from torchtitan.trainer import Trainer

from trn_kernels.recipes import checkpoints, qwen3


class Uneven(OneBatch):
    """Rank 0 has 3 labels that count, rank 1 all of its 128: a mean of means would weigh them wrongly."""

    @dataclass(kw_only=True, slots=True)
    class Config(OneBatch.Config):
        pass

    def __init__(self, config, *, dp_rank, **others):
        super().__init__(config, dp_rank=dp_rank, **others)
        self.ignored = dp_rank == 0

    def __iter__(self):
        for inputs, labels in super().__iter__():
            if self.ignored:
                labels = labels.clone()
                labels[0], labels[1, 3:] = IGNORE_INDEX, IGNORE_INDEX
            yield inputs, labels


class Steps(MetricsProcessor):
    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def log(self, step, global_avg_loss, global_max_loss, grad_norm, extra_metrics=None):
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
        record([step, global_avg_loss, grad_norm])
        if os.environ["RANK"] == "0":
            die_at(f"step {step}")


def die_at(moment: str) -> None:
    if os.environ.get("KILL") == moment:
        os.kill(os.getpid(), signal.SIGKILL)


def _recorded(config: Trainer.Config) -> Trainer.Config:
    config.metrics = derive(config.metrics, Steps.Config)
    return config


def _one_step(config: Trainer.Config) -> Trainer.Config:
    """One step in float32 on a known batch that leaves the weights as they are."""
    config.dataloader = Uneven.Config()
    config.optimizer = default_adamw(lr=0.0)
    config.training.steps = 1
    config.training.seq_len = 64
    config.training.mixed_precision_param = "float32"
    return _recorded(config)


def v5() -> Trainer.Config:
    return _one_step(qwen3.v5_qwen3_debug_finetune())


def v5_stock() -> Trainer.Config:
    return _one_step(qwen3.v5_qwen3_debug_finetune(nki_kernels=False))


def native() -> Trainer.Config:
    return _one_step(qwen3.native_qwen3_debug_finetune())


def moe() -> Trainer.Config:
    return _one_step(qwen3.nki_qwen3_moe_debug_finetune())


def killed() -> Trainer.Config:
    """Six steps with a checkpoint after each second one."""
    config = qwen3.native_qwen3_debug_finetune()
    config.training.steps = 6
    config.training.seq_len = 64
    config.checkpoint.interval = 2
    finish, complete = FileSystemWriter.finish, checkpoints.complete_export

    def finish_or_die(self, metadata, results):
        die_at("save " + str(self.path).rpartition("step-")[2])
        finish(self, metadata, results)

    def complete_or_die(*arguments):
        die_at("export")
        complete(*arguments)

    FileSystemWriter.finish, checkpoints.complete_export = finish_or_die, complete_or_die
    return _recorded(config)
