"""The policy that keeps the outputs of our operators. That it does so in training, matrix.py counts."""

import pytest
import torch
from torchtitan.config import OverrideConfig, apply_overrides
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug

from trn_kernels.overrides import NKISelectiveAC, nki_selective_ac

NAMED = "trn_kernels.overrides.nki_selective_ac"


def policy(*imports, asked=None):
    config = qwen3_moe_debug()
    config.activation_checkpoint = asked or SelectiveAC.Config(preserve_rng_state=False, debug=True)
    apply_overrides(OverrideConfig(imports=[*imports]), config)
    return config.activation_checkpoint


def test_it_is_torchtitans_with_our_operators():
    config = policy("trn_kernels.overrides", NAMED)
    assert type(config) is NKISelectiveAC.Config
    assert (config.preserve_rng_state, config.debug) == (False, True)
    ours = {getattr(torch.ops.trn_kernels, name).default for name in ("rope", "rope_hf", "grouped_experts")}
    stock = SelectiveAC.Config().build().get_save_ops()
    assert not ours & stock
    assert config.build().get_save_ops() == stock | ours


def test_it_has_to_be_asked_for():
    assert type(policy("trn_kernels.overrides")) is SelectiveAC.Config


def test_other_policies_stay():
    assert type(policy("trn_kernels.overrides", NAMED, asked=FullAC.Config())) is FullAC.Config


def test_some_operators():
    config = policy((NAMED, {"save": ["grouped_experts"]}))
    kept = config.build().get_save_ops() - SelectiveAC.Config().build().get_save_ops()
    assert kept == {torch.ops.trn_kernels.grouped_experts.default}


@pytest.mark.parametrize("save", [("swiglu",), ["rope", "rope_backward"]])
def test_an_unknown_operator_is_refused(save):
    with pytest.raises(ValueError, match="must be some of .*'rope', 'rope_hf', 'grouped_experts'"):
        nki_selective_ac(SelectiveAC.Config(), save=save)


def test_a_name_is_not_a_list_of_letters():
    with pytest.raises(ValueError, match="save is 'rope', must be a list of some of"):
        nki_selective_ac(SelectiveAC.Config(), save="rope")
