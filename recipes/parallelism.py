"""Refuses what the ranks, a model, its sequences or the installed torch cannot be split by, before anything is built.

torchtitan finds some of these out late, in the middle of the first step, or without the numbers.
"""

import inspect
import math
import os


def check_parallelism(config, processes: int | None = None) -> None:
    """Check the degrees of a `Trainer.Config` against its ranks and, of a torchtitan decoder (Qwen3, ...), its model.

    Args:
        config: its paths and flags are final; its model may have been updated from it, or not yet.
        processes: of the run; by default those of torch.distributed, or that torchrun announces.

    Raises:
        ValueError: names the field, the degree and the size or the version that it does not fit.
    """
    model, parallelism = config.model_spec.model, config.parallelism
    processes = _processes(config) if processes is None else processes
    _check_ranks(parallelism, processes)
    if getattr(model, "layers", None) is None:
        return
    _check_torch(config, processes)
    attention = model.layers[0].attention
    context, tensor = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
    expert, pipeline = parallelism.expert_parallel_degree, parallelism.pipeline_parallel_degree
    if context > 1 and type(attention.inner_attention).__qualname__.startswith("ScaledDotProductAttention"):
        raise ValueError(
            f"parallelism.context_parallel_degree is {context}; it must be 1: the attention of this model is "
            "scaled_dot_product_attention, of which torch splits the sequence only in CUDA's own kernels"
        )
    key_heads = getattr(attention, "n_kv_heads", None) or attention.n_heads
    for name, heads in (("n_heads", attention.n_heads), ("n_kv_heads", key_heads)):
        if heads % tensor:
            raise ValueError(
                f"parallelism.tensor_parallel_degree is {tensor}; it must divide the model's {name}, {heads}"
            )
    mixtures = [layer.moe for layer in model.layers if layer.moe is not None]
    _check_compile(config, tensor, expert if mixtures else 1, processes)
    _check_sequence(config, tensor, expert if mixtures else 1)
    if mixtures and tensor > 1 and expert == 1:
        _check_rows(config)
    replicas, shards = parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree
    if shards < 0:
        shards = processes // (replicas * context * tensor * pipeline)
    if parallelism.spmd_backend == "full_dtensor" and replicas * shards > 1 and not shards_typed_parameters():
        _warn_of_losses(replicas * shards)
    for moe in mixtures:
        if moe.num_experts % expert:
            raise ValueError(
                f"parallelism.expert_parallel_degree is {expert}; it must divide the model's {moe.num_experts} experts"
            )
        # Where torchtitan counts more ranks than experts, FSDP shards their hidden dimension, and that evenly.
        inner = moe.routed_experts.inner_experts if hasattr(moe, "routed_experts") else moe.experts
        ranks = shards * context * tensor
        parts = ranks // expert
        if expert == 1:
            ranks = replicas * shards * context * (1 if parallelism.spmd_backend == "partial_dtensor" else tensor)
        if ranks > moe.num_experts and shards > 1 and inner.hidden_dim % parts:
            raise ValueError(
                f"data parallelism shards {moe.num_experts} experts over {ranks} ranks, and then their hidden "
                f"dimension, {inner.hidden_dim}, into {parts} parts, which do not divide it"
            )


def _processes(config) -> int:
    import torch.distributed as dist

    if dist.is_initialized():
        return dist.get_world_size()
    # torchtitan's rehearsals of many ranks in one process take the number from another variable.
    one_process = getattr(config.comm, "mode", "default") != "default"
    return int(os.environ.get("NGPU" if one_process else "WORLD_SIZE", 1))


def _check_ranks(parallelism, processes: int) -> None:
    """The degrees are positive and multiply to the ranks; torchtitan has assertions for some of this."""
    fields = [f"{axis}_degree" for axis in ("data_parallel_replicate", "data_parallel_shard")]
    fields += [f"{axis}_parallel_degree" for axis in ("context", "tensor", "pipeline", "expert")]
    degrees = {field: getattr(parallelism, field) for field in fields}
    shards, expert = degrees["data_parallel_shard_degree"], degrees["expert_parallel_degree"]
    for field, degree in degrees.items():
        if degree < 1 and (field, degree) != ("data_parallel_shard_degree", -1):
            or_rest = ", or -1 for the ranks that are left" if field == "data_parallel_shard_degree" else ""
            raise ValueError(f"parallelism.{field} is {degree}, must be at least 1{or_rest}")
    dense = {field: degree for field, degree in degrees.items() if field != "expert_parallel_degree" and degree > 0}
    product = math.prod(dense.values())
    if processes % product or (shards > 0 and product != processes):
        named = " x ".join(f"{field} {degree}" for field, degree in dense.items())
        raise ValueError(
            f"parallelism has {named} = {product}, which must {'be' if shards > 0 else 'divide'} the number of ranks, "
            f"{processes}"
        )
    # Experts are split over the ranks that share the data's and the sequence's shards.
    inner = processes // (degrees["data_parallel_replicate_degree"] * degrees["pipeline_parallel_degree"])
    if inner % expert:
        replicas, stages = degrees["data_parallel_replicate_degree"], degrees["pipeline_parallel_degree"]
        raise ValueError(
            f"parallelism.expert_parallel_degree is {expert}, must divide {inner}, the number of ranks, {processes}, "
            f"by data_parallel_replicate_degree {replicas} and pipeline_parallel_degree {stages}"
        )


def _check_sequence(config, tensor: int, expert: int) -> None:
    length = config.training.seq_len
    sequence_parallel = getattr(config.parallelism, "enable_sequence_parallel", True)
    # Expert parallelism splits the sequence over the ranks of tensor parallelism, also without sequence parallelism.
    if (sequence_parallel or expert > 1) and length % tensor:
        reason = "sequence parallelism" if sequence_parallel else f"expert parallelism of degree {expert}"
        raise ValueError(
            f"training.seq_len is {length}; {reason} splits it over parallelism.tensor_parallel_degree {tensor}, "
            "which must divide it"
        )
    chunks = getattr(config.loss, "num_chunks", 1)
    if length % chunks:
        raise ValueError(f"training.seq_len is {length}; loss.num_chunks, {chunks}, must divide it")


def _check_compile(config, tensor: int, expert: int, processes: int) -> None:
    """Refuse compiled blocks of DTensors under activation checkpointing, which torch 2.13 cannot do.

    Measured with torchtitan's own modules too, and with aot_eager and inductor: autograd is handed the graph's
    DeviceMesh, among the tensors to save.
    """
    checkpointing = config.activation_checkpoint
    checkpointing = checkpointing is not None and getattr(checkpointing, "mode", "") != "none"
    full = config.parallelism.spmd_backend == "full_dtensor" and processes > 1
    compiled = config.compile.enable and "model" in config.compile.components
    if compiled and checkpointing and (tensor > 1 or expert > 1 or full) and not shards_typed_parameters():
        import torch

        raise ValueError(
            f"compile.enable is on with activation checkpointing, parallelism.tensor_parallel_degree {tensor}, "
            f"expert_parallel_degree {expert} and spmd_backend {config.parallelism.spmd_backend!r}; blocks of DTensors "
            f"need torch 2.14 or newer for that, and this is {torch.__version__}: leave out one of the three"
        )


def _warn_of_losses(ranks: int) -> None:
    import torch
    from torchtitan.tools.logging import logger

    logger.warning(
        f"[Recipe] with torch {torch.__version__} and spmd_backend 'full_dtensor' torchtitan logs {ranks} times the "
        f"loss, once for each of {ranks} data-parallel ranks; gradients and their norm are right"
    )


def _check_rows(config) -> None:
    """Refuse one row at a time through experts under tensor parallelism alone, where weights are DTensors.

    Measured with torch 2.13 and 2.14 and torchtitan's own experts too: a gradient of the router is then sharded on the
    sequence, and the experts' partial sums, of the same tensor, are lost beside it. The norm before the experts gets
    a tenth of its gradient. With more rows, expert parallelism, no sequence parallelism or spmd_types all is right.
    """
    parallelism = config.parallelism
    if parallelism.spmd_backend == "spmd_types" or not getattr(parallelism, "enable_sequence_parallel", True):
        return
    pipeline = parallelism.pipeline_parallel_degree > 1
    rows = parallelism.pipeline_parallel_microbatch_size if pipeline else config.training.local_batch_size
    if rows == 1:
        name = "parallelism.pipeline_parallel_microbatch_size" if pipeline else "training.local_batch_size"
        raise ValueError(
            f"{name} is 1; with parallelism.tensor_parallel_degree {parallelism.tensor_parallel_degree}, "
            f"expert_parallel_degree 1 and spmd_backend {parallelism.spmd_backend!r} torchtitan loses gradients of "
            "experts then: it must be 2 or more, or the expert degree"
        )


def _check_torch(config, processes: int) -> None:
    import torch

    parallelism = config.parallelism
    if parallelism.spmd_backend == "spmd_types" and not shards_typed_parameters():
        checked = getattr(config.debug, "spmd_typechecking", False)
        if processes > 1 or checked:
            where = "with debug.spmd_typechecking" if checked else "in more than one process"
            raise ValueError(
                f"parallelism.spmd_backend is 'spmd_types', which {where} needs torch 2.14 or newer; "
                f"with torch {torch.__version__} it must be 'partial_dtensor'"
            )
    split_by_experts = parallelism.tensor_parallel_degree > 1 and parallelism.expert_parallel_degree > 1
    if (
        split_by_experts
        and not getattr(parallelism, "enable_sequence_parallel", True)
        and not shards_typed_parameters()  # the same release: DTensor then also redistributes to partial sums
    ):
        raise ValueError(
            f"parallelism.expert_parallel_degree is {parallelism.expert_parallel_degree} and tensor_parallel_degree "
            f"{parallelism.tensor_parallel_degree}; together they need enable_sequence_parallel with torch "
            f"{torch.__version__}, and do without from torch 2.14"
        )
    if parallelism.pipeline_parallel_degree > 1 and not schedules_take_microbatches():
        raise ValueError(
            f"parallelism.pipeline_parallel_degree is {parallelism.pipeline_parallel_degree}; torchtitan's pipelines "
            f"need torch 2.14 or newer, and this is {torch.__version__}: it must be 1"
        )


def shards_typed_parameters() -> bool:
    """Can FSDP shard the plain, typed parameters of torchtitan's default backend `spmd_types`? From torch 2.14."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    return hasattr(FSDPParam, "_restore_spmd_types")


def schedules_take_microbatches() -> bool:
    """Do pipeline schedules take micro-batches as torchtitan 0.3 hands them over? From torch 2.14."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    return "arg_mbs" in inspect.signature(PipelineScheduleSingle.step).parameters


def fit_torch(config) -> None:
    """Choose torchtitan's older backend, in place, where the installed torch has no other. Other fields stay.

    For the functions that make a config: what a command line asks for later is checked, not changed.
    """
    if config.parallelism.spmd_backend == "spmd_types" and not shards_typed_parameters():
        config.parallelism.spmd_backend = "partial_dtensor"
