"""Hugging Face checkpoints of Qwen3: checked before they are loaded, complete when they are written.

torchtitan reads and writes the tensors. What it leaves out is here: the tensors it would ignore or never miss, values
that are no numbers, and the files without which an export cannot be opened.
"""

import json
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.tools.logging import logger

INDEX = "model.safetensors.index.json"
MODEL_FILES = ("config.json", "generation_config.json", "LICENSE")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_FLOATS = ("F64", "F32", "F16", "BF16")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Stored(NamedTuple):
    """A tensor of a checkpoint, from the header of its file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """As safetensors names it: F32, BF16, ..."""


def read_config(folder: str | Path) -> dict:
    """`config.json` of a checkpoint, the number of experts under the published name.

    Raises:
        ValueError: it is missing or not JSON.
    """
    path = Path(folder, "config.json")
    try:
        config = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if "num_local_experts" in config:  # what Transformers 5 writes for it
        config.setdefault("num_experts", config["num_local_experts"])
    return config


def stored_tensors(folder: str | Path) -> tuple[dict[str, Stored], list[str]]:
    """Name -> tensor of all safetensors files in `folder`, from their headers alone, and what is wrong with them."""
    folder = Path(folder)
    found, problems = {}, []
    for file in sorted(folder.glob("*.safetensors")):
        try:
            tensors, complaints = _read_header(file)
        except ValueError as error:
            problems.append(str(error))
            continue
        problems += complaints
        for name, tensor in tensors.items():
            if name in found:
                problems.append(f"{name} is in {found[name].file.name} and in {file.name}")
            found[name] = tensor
    if (folder / INDEX).exists():
        problems += _compare_index(folder / INDEX, found)
    elif not found and not problems:
        problems.append(f"no safetensors file in {folder}")
    return found, problems


def _read_header(file: Path) -> tuple[dict[str, Stored], list[str]]:
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{file.name} is truncated or corrupt: {size} bytes, header of {length}")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise ValueError(f"{file.name} is corrupt: its header is not JSON ({error})") from error
    tensors, problems, end = {}, [], 0
    header.pop("__metadata__", None)
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = entry["data_offsets"]
        needed = math.prod(entry["shape"]) * _BYTES.get(entry["dtype"], 0)
        if entry["dtype"] not in _BYTES:
            problems.append(f"{name} in {file.name} is of dtype {entry['dtype']}, which no Qwen3 checkpoint has")
        elif last - first != needed or first != end:
            problems.append(f"{name} in {file.name} is at bytes {first}..{last}, but must be at {end}..{end + needed}")
        if 8 + length + last > size:
            problems.append(f"{name} in {file.name} ends at byte {8 + length + last}; the file is truncated at {size}")
        tensors[name] = Stored(file, tuple(entry["shape"]), entry["dtype"])
        end = last
    if 8 + length + end < size:
        problems.append(f"{file.name} has {size - 8 - length - end} bytes after its last tensor")
    return tensors, problems


def _compare_index(path: Path, found: dict[str, Stored]) -> list[str]:
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
    except (ValueError, KeyError) as error:
        return [f"{path.name} is corrupt: {error!r}"]
    problems = [f"{file} of {path.name} is not there" for file in sorted({*weight_map.values()}) if not _is(path, file)]
    for name, file in weight_map.items():
        if _is(path, file) and (name not in found or found[name].file.name != file):
            problems.append(f"{name} is not in {file}, where {path.name} has it")
    problems += [
        f"{name} is in {t.file.name}, but not in {path.name}" for name, t in found.items() if name not in weight_map
    ]
    return problems


def _is(index: Path, file: str) -> bool:
    return (index.parent / file).exists()


def expected_tensors(config: dict) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a Qwen3 or Qwen3-MoE checkpoint, from its config.json.

    Experts are by name and two-dimensional, as published and as Transformers writes them; a tied model's
    `lm_head.weight` is among them, although it may be left out.

    Raises:
        ValueError: another model type, or a field that is missing.
    """
    kind = config.get("model_type")
    if kind not in ("qwen3", "qwen3_moe"):
        raise ValueError(f"model_type is {kind!r} in config.json; this checks 'qwen3' and 'qwen3_moe'")
    try:
        return _expected_tensors(config, kind == "qwen3_moe")
    except (KeyError, TypeError) as error:
        raise ValueError(f"config.json has no usable field {error}") from error


def _expected_tensors(config: dict, moe: bool) -> dict[str, tuple[int, ...]]:
    vocab, dim, heads = config["vocab_size"], config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or dim // heads
    query, key = heads * head_dim, config["num_key_value_heads"] * head_dim
    tensors = {_EMBEDDING: (vocab, dim), "model.norm.weight": (dim,), _HEAD: (vocab, dim)}

    def mlp(prefix: str, hidden: int) -> None:
        tensors.update({f"{prefix}.{part}_proj.weight": (hidden, dim) for part in ("gate", "up")})
        tensors[f"{prefix}.down_proj.weight"] = (dim, hidden)

    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for part, shape in {"q": (query, dim), "k": (key, dim), "v": (key, dim), "o": (dim, query)}.items():
            tensors[f"{layer}.self_attn.{part}_proj.weight"] = shape
            if config.get("attention_bias"):
                tensors[f"{layer}.self_attn.{part}_proj.bias"] = shape[:1]
        tensors |= {f"{layer}.self_attn.{part}_norm.weight": (head_dim,) for part in ("q", "k")}
        tensors |= {f"{layer}.{part}_layernorm.weight": (dim,) for part in ("input", "post_attention")}
        step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
        if not moe or i in dense or (i + 1) % step:
            mlp(f"{layer}.mlp", config["intermediate_size"])
            continue
        tensors[f"{layer}.mlp.gate.weight"] = (config["num_experts"], dim)
        for expert in range(config["num_experts"]):
            mlp(f"{layer}.mlp.experts.{expert}", config["moe_intermediate_size"])
    return tensors


def header_problems(folder: str | Path, config: dict | None = None) -> list[str]:
    """What makes `folder` no loadable checkpoint, from headers alone: one line each, the tensor or field named.

    Missing, unexpected and mis-shaped tensors are judged by config.json (or `config`).
    """
    try:
        config = read_config(folder) if config is None else config
        expected = expected_tensors(config)
    except ValueError as error:
        return [str(error)]
    found, problems = stored_tensors(folder)
    optional = {_HEAD} if config.get("tie_word_embeddings") else set()
    for name, shape in expected.items():
        if name not in found:
            if name not in optional:
                problems.append(f"{name} is missing")
        elif found[name].shape != shape:
            problems.append(f"{name} has shape {list(found[name].shape)}, config.json says {list(shape)}")
        elif found[name].dtype not in _FLOATS:
            problems.append(f"{name} is of dtype {found[name].dtype}, must be one of {', '.join(_FLOATS)}")
    problems += [f"{name} is unexpected" for name in found if name not in expected]
    if (
        optional
        and found.keys() >= {_HEAD, _EMBEDDING}
        and not problems
        and not _equal(found[_HEAD], found[_EMBEDDING])
    ):
        problems.append(f"{_HEAD} differs from {_EMBEDDING}, although tie_word_embeddings is true")
    return problems


def _equal(head: Stored, embedding: Stored) -> bool:
    with safe_open(head.file, "pt") as first, safe_open(embedding.file, "pt") as second:
        return torch.equal(first.get_tensor(_HEAD), second.get_tensor(_EMBEDDING))


def check_before_loading(folder: str | Path) -> None:
    """Refuse a checkpoint that torchtitan would load in part, or not at all.

    Raises:
        ValueError: all that `header_problems` finds.
    """
    problems = header_problems(folder)
    if problems:
        shown = "\n  ".join(problems[:20] + ([f"... and {len(problems) - 20} more"] if len(problems) > 20 else []))
        raise ValueError(f"{folder} cannot be loaded:\n  {shown}")


def loaded_from(config) -> str | None:
    """Folder of the Hugging Face weights that a `Trainer.Config` starts from, None if it starts from none."""
    checkpoint = config.checkpoint
    if not (checkpoint.enable and checkpoint.initial_load_in_hf):
        return None
    return checkpoint.initial_load_path or config.hf_assets_path


class HFCheckpointManager(CheckpointManager):
    """torchtitan's checkpoints, with Hugging Face weights checked on the way in and complete on the way out.

    An export is built aside and moved to `step-N` when it is whole: `config.json` (with the exported dtype),
    `generation_config.json` and the tokenizer travel with it. A run resumes from the last whole checkpoint of its
    folder; where that folder holds an export already, the run is refused, since it would overwrite it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    def __init__(self, config: Config, **kwargs):
        super().__init__(config, **kwargs)
        if config.enable and config.last_save_in_hf and not config.load_only:
            self._export_dtype = config.export_dtype
            read_config(self._weights_folder())  # without it, training would end in an export that opens nowhere

    def _weights_folder(self) -> str:
        return self.initial_load_path if self.initial_load_in_hf and self.initial_load_path else self._assets()

    def _assets(self) -> str:
        return self.sd_adapter.hf_assets_path

    def dcp_load(self, state_dict, checkpoint_id, from_hf, from_quantized):
        if not from_hf:
            return super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        check_before_loading(checkpoint_id)
        super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        for name, tensor in self.sd_adapter.to_hf(self.states["model"].state_dict()).items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if not local.isfinite().all():
                raise ValueError(f"{name} in {checkpoint_id} has values that are not finite")

    def dcp_save(self, state_dict, checkpoint_id, async_mode, enable_garbage_collection=False, to_hf=False):
        if not to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        final = Path(checkpoint_id)
        draft = final.with_name(f".unfinished-{final.name.rpartition('-')[2]}")
        mapping = self.sd_adapter.fqn_to_index_mapping
        if mapping and _HEAD not in self.sd_adapter.to_hf(state_dict):
            # Tied: the index of the input may list it, but nothing is written for it.
            mapping.pop(_HEAD, None)
        _on_first_rank(lambda: shutil.rmtree(draft, ignore_errors=True))
        super().dcp_save(state_dict, str(draft), async_mode, enable_garbage_collection, to_hf)
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        for file in sorted(draft.glob("*.safetensors"))[rank::ranks]:
            mark_format(file)
        _barrier()
        _on_first_rank(lambda: self._finish_export(draft, final))

    def _finish_export(self, draft: Path, final: Path) -> None:
        shutil.rmtree(draft / "sharded", ignore_errors=True)
        complete_export(draft, self._weights_folder(), self._assets(), self._export_dtype)
        if problems := header_problems(draft):
            raise RuntimeError(f"the export in {draft} is not whole: {'; '.join(problems[:5])}")
        if final.exists():
            if (final / ".metadata").exists():
                raise FileExistsError(f"{final} holds a checkpoint of training; the export is whole in {draft}")
            shutil.rmtree(final)  # half a checkpoint, of a run that was killed
        draft.rename(final)
        logger.info(f"[Export] {final}: {self._export_dtype}, opens with AutoModelForCausalLM.from_pretrained")

    def _find_load_step(self, folder: str = "") -> int:
        folder = Path(folder or self.folder)
        steps = {int(path.name[5:]): path for path in folder.glob("step-*") if path.name[5:].isdigit()}
        for path in steps.values():
            if (path / INDEX).exists():
                raise FileExistsError(f"{path} is a finished export: move it, or give another --checkpoint.folder")
        # torch writes .metadata last.
        return max((step for step, path in steps.items() if (path / ".metadata").exists()), default=-1)


def complete_export(folder: Path, model: str | Path, tokenizer: str | Path, dtype: str) -> None:
    """Add the files that make exported weights a checkpoint.

    Args:
        folder: holds the exported weights.
        model: folder with config.json and, maybe, generation_config.json; only read.
        tokenizer: folder with the files of the tokenizer; only read.
        dtype: of the exported weights, as in config.json ("bfloat16").
    """
    for source, names in ((model, MODEL_FILES), (tokenizer, TOKENIZER_FILES)):
        for name in names:
            if Path(source, name).exists():
                shutil.copyfile(Path(source, name), folder / name)
    config = json.loads((folder / "config.json").read_text())
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def mark_format(file: Path) -> None:
    """Rewrite a safetensors file with the metadata `format: pt`, and its data aligned to 8 bytes.

    torch writes neither; releases of Transformers before 5 refuse a file without.
    """
    draft = file.with_suffix(".draft")
    with open(file, "rb") as source, open(draft, "wb") as target:
        header = json.loads(source.read(int.from_bytes(source.read(8), "little")))
        text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
        text += b" " * (-len(text) % 8)
        target.write(len(text).to_bytes(8, "little") + text)
        shutil.copyfileobj(source, target, 2**24)
    draft.replace(file)


def _on_first_rank(function) -> None:
    """Run once for all ranks, which wait for it."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        function()
    _barrier()


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def finetune(config, folder: str, weights: str | Path):
    """Make a `Trainer.Config` start from published weights and end with an export of the same kind, in place.

    Args:
        config: a recipe's; the checkpoint interval and the exported dtype stay.
        folder: for checkpoints and the export, below the dump folder.
        weights: folder of the Hugging Face checkpoint.

    Returns:
        `config`.
    """
    config.checkpoint.enable = True
    config.checkpoint.folder = folder
    config.checkpoint.initial_load_path = os.path.abspath(weights)
    config.checkpoint.initial_load_in_hf = True
    config.checkpoint.initial_load_model_only = True
    config.checkpoint.last_save_in_hf = True
    config.checkpoint.last_save_model_only = True
    return config
