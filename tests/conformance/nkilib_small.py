# ruff: noqa: E402, I001  nki-library's packages, after the check that they are meant
"""Kernels of nki-library against their own references, at sizes that a CPU does in seconds.

Run by ``test_nkilib.py`` inside that library's test suite, whose builders, references and tolerances are used; its
own cases of these kernels are sized for devices.
"""

from types import SimpleNamespace

import numpy as np
import pytest

nl = pytest.importorskip("nki.language")

from test.integration.nkilib.core.attention.test_attention_bwd import TestAttentionBwdKernel as AttentionBackward
from test.integration.nkilib.core.attention.test_attention_cte import TestRangedAttentionCTEKernels as Attention
from test.integration.nkilib.core.moe.moe_cte.test_moe_cte import TestMoeBlockwiseMatMulLnc2 as MoE
from test.integration.nkilib.core.moe.moe_cte.test_moe_cte_common import BWMMFunc
from test.integration.nkilib.experimental.loss import test_cross_entropy_backward as cross_entropy_backward
from test.integration.nkilib.experimental.loss import test_cross_entropy_forward as cross_entropy_forward
from test.integration.nkilib.experimental.moe.test_bwmm_bwd import (
    TestMoeBlockwiseMatMulBwdShardHAffinityHDroplessLnc2 as MoEBackward,
)
from test.integration.nkilib.experimental.moe.test_bwmm_shard_on_H import TestMoeBlockwiseMatMulShardH as MoEShardH
from test.utils.common_dataclasses import CompilerArgs, Platforms

from nkilib_src.nkilib.core.utils.common_types import ActFnType, ExpertAffinityScaleMode
from nkilib_src.nkilib.experimental.moe.bwd.moe_bwd_parameters import ActFnType as BackwardActFnType
from nkilib_src.nkilib.experimental.moe.bwd.moe_bwd_parameters import ClampLimits

POST, PRE = ExpertAffinityScaleMode.POST_SCALE, ExpertAffinityScaleMode.PRE_SCALE


class Options:
    """The part of nki-library's ranged test case that its runners read."""

    def __init__(self, name, values):
        self.tensors = {name: values}


@pytest.mark.parametrize(
    "function, hidden, tokens, experts, block, top_k, intermediate, skip, bias, training, act, mode, on_intermediate",
    [
        (BWMMFunc.SHARD_ON_INTERMEDIATE, 512, 256, 2, 256, 2, 256, 0, False, False, ActFnType.SiLU, POST, False),
        (BWMMFunc.SHARD_ON_INTERMEDIATE, 512, 256, 4, 256, 2, 256, 1, False, False, ActFnType.SiLU, POST, False),
        (BWMMFunc.SHARD_ON_INTERMEDIATE, 512, 256, 4, 256, 2, 256, 1, True, False, ActFnType.Swish, POST, False),
        (BWMMFunc.SHARD_ON_INTERMEDIATE, 512, 256, 2, 256, 2, 512, 0, False, True, ActFnType.SiLU, POST, False),
        (BWMMFunc.SHARD_ON_INTERMEDIATE, 512, 256, 2, 256, 2, 512, 1, False, True, ActFnType.SiLU, POST, True),
        (BWMMFunc.SHARD_ON_INTERMEDIATE, 512, 256, 2, 256, 2, 256, 0, False, False, ActFnType.SiLU, PRE, False),
        (BWMMFunc.SHARD_ON_INTERMEDIATE_HW, 512, 256, 4, 256, 2, 256, 1, False, False, ActFnType.SiLU, POST, False),
        (
            BWMMFunc.SHARD_ON_INTERMEDIATE_DROPPING,
            512,
            1024,
            1,
            1024,
            1,
            256,
            0,
            False,
            True,
            ActFnType.SiLU,
            POST,
            True,
        ),
        (BWMMFunc.SHARD_ON_BLOCK, 512, 256, 4, 256, 2, 256, 0, False, False, ActFnType.SiLU, POST, False),
        (BWMMFunc.SHARD_ON_BLOCK, 512, 256, 4, 256, 2, 256, 1, True, False, ActFnType.Swish, POST, False),
    ],
)
def test_moe_forward(
    test_manager, collector, function, hidden, tokens, experts, block, top_k, intermediate, skip, bias, training, act,
    mode, on_intermediate,
):  # fmt: skip
    MoE().test_moe_blockwise_mm_kernel_lnc2(
        test_manager, collector, function, hidden, tokens, experts, block, top_k, intermediate, nl.bfloat16, skip,
        bias, training, None, act, mode, None, None, None, None, on_intermediate, Platforms.TRN2,
        SimpleNamespace(node=SimpleNamespace(callspec=SimpleNamespace(id="small"))),
    )  # fmt: skip


@pytest.mark.parametrize("tokens, experts", [(256, 4), (512, 3)])
def test_moe_forward_that_skips_weights_uses_a_flag_that_nothing_wrote(test_manager, collector, tokens, experts):
    """The last block of one core: its "same expert as before" is never computed (a count is rounded down), but used."""
    case = (BWMMFunc.SHARD_ON_BLOCK, 512, tokens, experts, 256, 2, 1536, 3, True, False, ActFnType.Swish, POST, False)
    with pytest.raises(Exception, match="never-written") as caught:
        test_moe_forward(test_manager, collector, *case)
    assert "bwmm_shard_on_block.py" in str(caught.value)


@pytest.mark.parametrize(
    "hidden, tokens, experts, block, top_k, intermediate, skip, training",
    [(512, 256, 2, 128, 1, 256, 0, False), (512, 256, 4, 256, 2, 192, 1, True)],
)
def test_moe_forward_on_hidden(
    test_manager, collector, hidden, tokens, experts, block, top_k, intermediate, skip, training
):
    from test.integration.nkilib.experimental.moe import test_bwmm_shard_on_H as names

    values = {
        names.TOKENS_DIM: tokens, names.HIDDEN_DIM: hidden, names.INTERMEDIATE_DIM: intermediate,
        names.EXPERT_DIM: experts, names.BLOCK_SIZE_DIM: block, names.TOP_K_DIM: top_k, names.DTYPE_DIM: nl.bfloat16,
        names.SKIP_DIM: skip, names.SCALING_MODE_DIM: POST, names.CHECKPOINT_ACTIVATION_DIM: training,
    }  # fmt: skip
    compiler = CompilerArgs(logical_nc_config=2)
    MoEShardH().run_bwmm_h_test(test_manager, compiler, Options(names.BWMM_H_CONFIG, values), 2, collector)


MOE_BACKWARD = [
    (512, 256, 2, 256, 1, 256, 0, None, False, BackwardActFnType.SiLU),
    (512, 256, 4, 256, 2, 256, 1, None, False, BackwardActFnType.SiLU),
    (512, 256, 2, 512, 2, 256, 0, ClampLimits(7.0, -7.0, 7.0, None), True, BackwardActFnType.Swish),
]


def moe_backward(test_manager, hidden, tokens, experts, block, top_k, intermediate, skip, limits, bias, act):
    MoEBackward().test_moe_blockwise_mm_bwd_shardH_affinityH_dropless_lnc2(
        test_manager, hidden, tokens, experts, block, top_k, intermediate, nl.bfloat16, skip,
        limits or ClampLimits(None, None, None, None), bias, act,
    )  # fmt: skip


@pytest.mark.parametrize("case", MOE_BACKWARD)
def test_moe_backward(test_manager, monkeypatch, case):
    """All gradients, with the barrier that the library forgets after zeroing them."""
    from nkilib_src.nkilib.experimental.moe.bwd import bwmm_bwd_dropless

    import nki.isa as nisa

    zero = bwmm_bwd_dropless._initialize_gradient_outputs_shard

    def zeroed(*args, **kwargs):
        zero(*args, **kwargs)
        tensors = [value for value in (*args, *kwargs.values()) if getattr(value, "buffer", None) == nl.shared_hbm]
        nisa.core_barrier(tensors[0], (0, 1))

    monkeypatch.setattr(bwmm_bwd_dropless, "_initialize_gradient_outputs_shard", zeroed)
    moe_backward(test_manager, *case)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("case", MOE_BACKWARD)
def test_moe_backward_races_on_the_affinity_gradient(test_manager, case, order):
    """Both cores zero a share of the experts and then write a share of the tokens, with no barrier between."""
    from trn_kernels import emulator

    with emulator.core_order(*order), pytest.raises(Exception, match="core-race") as caught:
        moe_backward(test_manager, *case)
    assert "bwmm_bwd_dropless.py" in str(caught.value)


@pytest.mark.parametrize(
    "batch, q_heads, kv_heads, length, head_dim, dtype, causal, window, sinks",
    [
        (1, 2, 2, 512, 64, nl.bfloat16, True, None, 0),
        (1, 4, 2, 512, 128, nl.bfloat16, False, None, 0),
        (1, 2, 1, 512, 64, nl.float32, True, 128, 2),
    ],
)
def test_attention_backward(test_manager, batch, q_heads, kv_heads, length, head_dim, dtype, causal, window, sinks):
    lnc = 2 if batch * kv_heads % 2 == 0 else 1
    AttentionBackward()._run_test(
        test_manager, CompilerArgs(enable_birsim=False, logical_nc_config=lnc), batch, q_heads, kv_heads, length,
        head_dim, dtype, causal, window, sinks, None,
    )  # fmt: skip


@pytest.mark.parametrize("cache_softmax", [False, True])
@pytest.mark.parametrize(
    "batch, kv_batch, length, head_dim, dtype, causal, tp_q, tp_out, window",
    [
        (2, 2, 512, 64, nl.bfloat16, True, True, False, 0),
        (2, 1, 512, 128, nl.bfloat16, True, True, False, 0),
        (3, 3, 256, 64, np.float32, False, False, True, 0),
        (2, 2, 512, 64, nl.bfloat16, True, True, False, 128),
    ],
)
def test_attention(
    test_manager, collector, batch, kv_batch, length, head_dim, dtype, causal, tp_q, tp_out, window, cache_softmax
):
    from test.integration.nkilib.core.attention import test_attention_cte as names

    flags = {
        names.CAUSAL_MASK_DIM_NAME: causal, names.TP_Q_DIM_NAME: tp_q, names.TP_OUT_DIM_NAME: tp_out,
        names.TP_K_DIM_NAME: False, names.SINK_DIM_NAME: False,
    }  # fmt: skip
    Attention().run_attention_cte_test(
        test_manager, CompilerArgs(), collector, flags, batch, kv_batch, cache_softmax, None, head_dim, dtype, length,
        None, length, window, 1.0, None, False,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("positions, vocabulary, per_batch, chunk", [(64, 1000, 32, 256), (33, 777, 16, 777)])
@pytest.mark.parametrize("names", [cross_entropy_forward, cross_entropy_backward], ids=["forward", "backward"])
@pytest.mark.parametrize("lnc", [1, 2])
def test_cross_entropy(test_manager, monkeypatch, names, positions, vocabulary, per_batch, chunk, dtype, lnc):
    values = {
        names.B_DIM: 1, names.T_DIM: positions, names.V_DIM: vocabulary, names.DTYPE_DIM: dtype,
        names.PB_DIM: per_batch, names.CS_DIM: chunk,
    }  # fmt: skip
    if names is cross_entropy_backward:
        # The gradient overwrites the logits, from which the reference is computed afterwards.
        make, reference, kept = names.generate_kernel_inputs, names.golden_cross_entropy_backward_ref, {}

        def made(case):
            inputs = make(case)
            kept.update({name: array.copy() for name, array in inputs.items()})
            return inputs

        monkeypatch.setattr(names, "generate_kernel_inputs", made)
        monkeypatch.setattr(names, "golden_cross_entropy_backward_ref", lambda inputs, *args: reference(kept, *args))
    runner = next(value for name, value in vars(names).items() if name.startswith("TestCrossEntropy"))
    compiler = CompilerArgs(logical_nc_config=lnc)
    runner().prepare_test_parametrized(test_manager, compiler, Options(names.CE_CONFIG, values))
