"""The commands of the README, in two processes, with and without an override."""

import math

import pytest

LAYERS, STEPS = 4, 10


def launched(log: str) -> dict[str, int]:
    """Launches of rank 0 by operator and backend."""
    lines = [line.partition("[Launches] ")[2] for line in log.splitlines() if "[Launches] " in line]
    return {name: int(count) for name, count in (line.split(": ") for line in lines if line != "none")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rope_trains_the_same_bit_for_bit(train, dtype):
    flags = f"--training.steps {STEPS} --training.seq_len 128 --training.mixed_precision_param {dtype}".split()
    stock, log = train("stock", "debug", *flags)
    assert "[Override]" not in log
    assert "[Launches] none" in log
    ours, log = train("ours", "debug", *flags, "--override.imports", "trn_kernels.overrides")
    assert log.count("[Override] trn_kernels.overrides: model_spec.model.layers.") == LAYERS
    assert launched(log) == dict.fromkeys(("rope on emulator", "rope_backward on emulator"), LAYERS * STEPS)
    assert len(stock) == STEPS
    assert ours == stock
    losses = [loss for loss, _, _ in ours]
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]


def test_experts_train_like_stock(train):
    """The recipe as it is; then with torchtitan's experts and the same RoPE. Both multiply in bfloat16."""
    ours, log = train("ours", "moe_debug")
    assert log.count(" CosSinRoPE.Config -> NKIRoPE.Config") == LAYERS
    assert log.count(" GroupedExperts.Config -> NKIGroupedExperts.Config") == LAYERS
    operators = ("grouped_experts", "grouped_experts_backward", "rope", "rope_backward")
    assert launched(log) == {f"{operator} on emulator": LAYERS * STEPS for operator in operators}
    stock, log = train("stock", "moe_debug", "--override.imports", "trn_kernels.overrides.nki_rope")
    assert set(launched(log)) == {"rope on emulator", "rope_backward on emulator"}
    assert len(ours) == len(stock) == STEPS
    for step, (mine, theirs) in enumerate(zip(ours, stock, strict=True), 1):
        assert mine[0] == pytest.approx(theirs[0], rel=1e-3), f"loss of step {step}"
    assert ours[0][2] == pytest.approx(stock[0][2], rel=1e-3)
    assert ours[-1][0] < ours[0][0]
