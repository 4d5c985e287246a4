"""Debug assets made on the spot, without network: English text and a small tokenizer trained on it.

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
    folder = Path(folder)
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        draft.chmod(0o755)
        texts = documents()
        (draft / "text").mkdir()
        with open(draft / "text" / "train.jsonl", "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        _train_tokenizer(texts, draft)
        try:
            draft.rename(folder)
        except OSError:
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


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
