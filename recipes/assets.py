"""Debug assets made on the spot, without network: English text, a small tokenizer trained on it, tiny Qwen3 weights.

The text is Python's own language reference, which comes with the interpreter (`pydoc_data.topics`).
"""

import json
import shutil
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

VOCAB_SIZE = 2048
_DOCUMENT = 800  # characters, at least; some 250 tokens, so that a training sequence packs several documents
_BOS, _EOS = "<|begin_of_text|>", "<|end_of_text|>"


def debug_assets(folder: str | Path = "assets/debug") -> Path:
    """Make the debug assets, unless `folder` is already there.

    Any number of processes may call this at once: each builds aside, and the first to finish moves its result
    into place. The result depends on nothing but the versions of Python and of `tokenizers`.

    Args:
        folder: gets `tokenizer.json` and `tokenizer_config.json` (byte-level BPE of at most 2048 tokens) and
            `text/train.jsonl` (one document a line, field `text`). Relative to the current folder.

    Returns:
        `folder` as a path. It serves as torchtitan's `hf_assets_path`, and its `text` as a `dataset_path`.
    """
    return _made_once(Path(folder), _write_text_and_tokenizer)


def debug_model(
    folder: str | Path = "assets/debug_qwen3",
    *,
    moe: bool = False,
    tied: bool = True,
    shards: int = 1,
    dtype: str = "bfloat16",
    num_layers: int = 4,
    assets: str | Path = "assets/debug",
) -> Path:
    """Write a tiny random Qwen3 or Qwen3-MoE as Transformers does, with the debug tokenizer, unless it is there.

    Sizes are those of torchtitan's `debugmodel` and `debugmodel_moe` with few layers, and 8 experts, 2 per token. The
    weights are larger than at the start of a training, so that a wrong RoPE, gate or norm shows in the loss.

    Args:
        folder: gets `config.json`, `generation_config.json`, safetensors and the files of the tokenizer.
        moe: a mixture of experts.
        tied: the embedding serves as output layer too; `lm_head.weight` is not stored then.
        shards: at least so many files, with an index, if more than 1.
        dtype: of the stored weights.
        num_layers: of the model.
        assets: the debug assets, made if they are not there.

    Returns:
        `folder` as a path.
    """

    def write(draft: Path) -> None:
        _write_model(draft, moe, tied, shards, dtype, num_layers, debug_assets(assets))

    return _made_once(Path(folder), write)


def _made_once(folder: Path, write) -> Path:
    """`write(draft)` into a folder aside, and move it to `folder`, unless that is there."""
    if folder.exists():
        if not (folder / "tokenizer.json").exists():
            raise ValueError(f"{folder} is there but has no tokenizer.json; remove it to have the debug assets made")
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        draft.chmod(0o755)
        write(draft)
        try:
            draft.rename(folder)
        except OSError:
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _write_text_and_tokenizer(folder: Path) -> None:
    texts = documents()
    (folder / "text").mkdir()
    with open(folder / "text" / "train.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    _train_tokenizer(texts, folder)


def _write_model(folder: Path, moe: bool, tied: bool, shards: int, dtype: str, num_layers: int, assets: Path) -> None:
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(assets)
    facts = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 3072,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": tied,
        "initializer_range": 0.06,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.eos_token_id,
        "dtype": dtype,
    }
    if moe:
        facts |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768, "norm_topk_prob": True}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**facts)) if moe else Qwen3ForCausalLM(Qwen3Config(**facts))
    model = model.to(getattr(torch, dtype))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=size // shards + 1 if shards > 1 else size + 1)
    tokenizer.save_pretrained(folder)


def documents() -> list[str]:
    """The reference text, cut between paragraphs into documents of 800 characters or little more."""
    texts = []
    for _, topic in sorted(topics.items()):
        text = ""
        for paragraph in topic.split("\n\n"):
            text += ("\n\n" if text else "") + paragraph
            if len(text) >= _DOCUMENT:
                texts.append(text)
                text = ""
        if text.strip():
            texts.append(text)
    return texts


def _train_tokenizer(texts: list[str], folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[_BOS, _EOS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": _BOS, "eos_token": _EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
