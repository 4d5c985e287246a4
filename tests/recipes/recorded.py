"""Config functions for the child processes of test_training.py: the debug recipe with its metrics written down.

torchtitan prints five digits of the loss; these runs are compared bit for bit.
"""

import json
import os
from dataclasses import dataclass, fields

from torchtitan.components.metrics import MetricsProcessor
from torchtitan.trainer import Trainer

from trn_kernels.recipes.qwen3 import native_qwen3_debug


class RecordedMetrics(MetricsProcessor):
    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def log(self, step, global_avg_loss, global_max_loss, grad_norm, extra_metrics=None):
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
        if os.environ["RANK"] == "0":
            with open(os.environ["RECORD"], "a") as file:
                file.write(json.dumps([global_avg_loss, global_max_loss, grad_norm]) + "\n")


def debug() -> Trainer.Config:
    config = native_qwen3_debug()
    metrics = {field.name: getattr(config.metrics, field.name) for field in fields(config.metrics)}
    config.metrics = RecordedMetrics.Config(**metrics)
    return config
