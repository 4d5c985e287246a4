"""Our kernels in Hugging Face's own Qwen3 and Qwen3-MoE, for one model at a time. Needs no torchtitan.

    from trn_kernels.overrides.transformers import use_nki_kernels

    kernels = use_nki_kernels(model)     # any model that contains Transformers' Qwen3 or Qwen3-MoE
    ...                                  # model(...), model.generate(...), loss.backward()
    kernels.restore()                    # or: with use_nki_kernels(model): ...

Scope: RoPE (forward, backward, and one position at a time in generation) and the experts of Qwen3-MoE in their fused
layout of Transformers 5. The router, its logits and the auxiliary loss stay Transformers' own. Plain tensors only:
parallelism by FSDP is fine, tensor parallelism inside Transformers is not.

Parameters and buffers stay as they are, so checkpoints are those of the stock model.
"""

import copy
import inspect
from types import CellType, FunctionType, MethodType

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention, Qwen3MoeExperts

from trn_kernels import ops

EXPERTS = "trn_kernels"
"""Our name among Transformers' experts implementations (`experts_implementation=` of `from_pretrained`)."""

_ROPE = "apply_rotary_pos_emb"


class Kernels:
    """What `use_nki_kernels` switched on. `restore()`, or the end of a `with` block, switches it off.

    Attributes:
        modules: name of each switched module in the model -> the operator that it calls now.
    """

    def __init__(self):
        self.modules: dict[str, str] = {}
        self._undo = []

    def restore(self) -> None:
        """Give every module back what it had; more than one call does nothing more."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> "Kernels":
        return self

    def __exit__(self, *exception) -> None:
        self.restore()


def use_nki_kernels(model: nn.Module) -> Kernels:
    """Let the RoPE and the experts of `model` run in our kernels; no other model changes, of whatever class.

    Attention (eager, sdpa, ...), KV caches, gradient checkpointing and `torch.compile` work as before. RoPE equals
    Transformers' bit for bit in float32; in bfloat16 ours rounds once where Transformers rounds after each operation.

    Args:
        model: a `Qwen3ForCausalLM`, `Qwen3MoeForCausalLM`, or any module around their layers.

    Returns:
        The switch, to turn it off again, and the names of the switched modules.

    Raises:
        ValueError: nothing to switch in `model`, already switched, or experts that our operator does not compute.
        RuntimeError: the installed Transformers applies RoPE in another way.
    """
    kernels = Kernels()
    try:
        for name, module in model.named_modules():
            if isinstance(module, Qwen3Attention | Qwen3MoeAttention):
                _switch_rope(kernels, name, module)
            elif isinstance(module, Qwen3MoeExperts):
                _switch_experts(kernels, name, module)
    except Exception:
        kernels.restore()
        raise
    if not kernels.modules:
        raise ValueError(f"model is a {type(model).__name__} without attention of Qwen3 or Qwen3-MoE in it")
    return kernels


# -- RoPE -----------------------------------------------------------------------------------------------


def _switch_rope(kernels: Kernels, name: str, module: nn.Module) -> None:
    if "forward" in vars(module):
        raise ValueError(f"{name} has a forward of its own already (switched twice?); restore() it first")
    # Transformers calls its function as a global of the module that all models share. This attention gets the same
    # code with another global, so that nothing changes for the other models.
    module.forward = MethodType(_with_global(type(module).forward, _ROPE, _apply_rope), module)
    kernels.modules[name] = "trn_kernels::rope"
    kernels._undo.append(lambda: vars(module).pop("forward"))


def _apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Transformers' `apply_rotary_pos_emb` by `ops.rope`.

    Args:
        q, k: `[batch, heads, seq, head_dim]`; with unsqueeze_dim=2 `[batch, seq, heads, head_dim]`.
        cos, sin: `[batch, seq, head_dim]` or `[1, seq, head_dim]`, in the dtype of q or float32.

    Returns:
        Rotated q and k, in the promoted dtype of q and cos, as in Transformers.
    """
    if unsqueeze_dim not in (1, 2):
        raise ValueError(f"unsqueeze_dim is {unsqueeze_dim}; it must be 1 (heads before seq) or 2 (seq before heads)")
    dtype = torch.promote_types(q.dtype, cos.dtype)
    heads_first = unsqueeze_dim == 1
    if heads_first:  # a view: Transformers made q and k by transposing [batch, seq, heads, head_dim]
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    q, k = ops.rope(q.to(dtype), k.to(dtype), torch.cat((cos, sin), dim=-1).to(dtype))
    return (q.transpose(1, 2), k.transpose(1, 2)) if heads_first else (q, k)


def _with_global(function: FunctionType, name: str, value) -> FunctionType:
    """A copy of `function`, inside the same decorators, that finds `value` under the global `name`.

    Raises:
        RuntimeError: `function` uses no such global, or a decorator hides it.
    """
    if name not in inspect.unwrap(function).__code__.co_names:
        raise RuntimeError(f"{function.__module__}.{function.__qualname__} does not call {name} in this Transformers")
    inner = getattr(function, "__wrapped__", None)
    scope, cells = function.__globals__, function.__closure__ or ()
    if inner is None:
        # Without __name__, torch.compile looks names up here and not in the imported module of that name.
        scope = {key: item for key, item in scope.items() if key != "__name__"} | {name: value}
    else:
        if all(cell.cell_contents is not inner for cell in cells):
            raise RuntimeError(f"a decorator of {function.__module__}.{function.__qualname__} hides what it wraps")
        wrapped = CellType(_with_global(inner, name, value))
        cells = tuple(wrapped if cell.cell_contents is inner else cell for cell in cells)
    new = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, tuple(cells) or None)
    new.__kwdefaults__ = function.__kwdefaults__
    new.__dict__.update(function.__dict__)
    new.__module__, new.__qualname__, new.__doc__ = function.__module__, function.__qualname__, function.__doc__
    return new


# -- experts --------------------------------------------------------------------------------------------


def _switch_experts(kernels: Kernels, name: str, module: nn.Module) -> None:
    config = module.config
    if config._experts_implementation == EXPERTS:
        raise ValueError(f"{name} has experts_implementation={EXPERTS!r} already (switched twice?); restore() it first")
    _check_experts(module)
    # The config is shared by all layers, and maybe by other models: this module gets one of its own.
    module.config = copy.copy(config)
    module.config._experts_implementation = EXPERTS
    kernels.modules[name] = "trn_kernels::grouped_experts"
    kernels._undo.append(lambda: setattr(module, "config", config))


def _check_experts(module: nn.Module) -> None:
    """Refuse experts that are not w2(silu(w1 x) * w3 x) with gate and up rows one after the other."""
    facts = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    for fact, needed in (facts | {"has_post_expert_norm": False}).items():
        if getattr(module, fact) is not needed:
            raise ValueError(f"{type(module).__name__}.{fact} is {getattr(module, fact)}; our experts need {needed}")
    if module.config.hidden_act not in ("silu", "swish"):
        raise ValueError(f"hidden_act is {module.config.hidden_act!r}; our experts compute 'silu'")
    if type(module)._apply_gate is not Qwen3MoeExperts._apply_gate:
        raise ValueError(f"{type(module).__name__} has a gate of its own; our experts compute silu(gate) * up")


def _nki_experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Transformers' experts by `ops.grouped_experts`.

    Multiplies in the dtype of the weights, or in autocast's where that is on. Routing weights are applied after the
    experts and the sum over the chosen experts is taken in float32, in the order of the choices, with one rounding.

    Args:
        module: holds `gate_up_proj` `[E, 2F, D]`, gate rows first, and `down_proj` `[E, D, F]`.
        hidden_states: `[tokens, D]`.
        top_k_index: `[tokens, K]` integers; E marks an expert that another rank has.
        top_k_weights: `[tokens, K]`.

    Returns:
        `[tokens, D]` in the dtype of hidden_states.
    """
    _check_experts(module)
    num_tokens, num_chosen = top_k_index.shape
    device = hidden_states.device.type
    weight = module.gate_up_proj
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    w1, w3 = weight.to(dtype).chunk(2, dim=1)  # views; their gradients add up in gate_up_proj

    experts = top_k_index.flatten()
    order = torch.argsort(experts, stable=True)
    counts = torch.zeros(module.num_experts + 1, dtype=torch.int64, device=experts.device)
    counts = counts.scatter_add(0, experts.long(), torch.ones_like(experts, dtype=torch.int64))[:-1]
    rows = ops.grouped_experts(hidden_states.to(dtype)[order // num_chosen], w1, module.down_proj.to(dtype), w3, counts)
    rows = rows[torch.argsort(order)].view(num_tokens, num_chosen, -1)
    return (rows.float() * top_k_weights.float()[..., None]).sum(1).to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _nki_experts)
