"""The debug assets: what torchtitan and transformers make of them, and many processes making them at once."""

import json
import subprocess
import sys

import pytest
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset

from trn_kernels.recipes.assets import VOCAB_SIZE, debug_assets

FILES = ["text/train.jsonl", "tokenizer.json", "tokenizer_config.json"]


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return debug_assets(tmp_path_factory.mktemp("assets") / "debug")


def test_tokenizer(assets):
    from transformers import AutoTokenizer

    ours = HuggingFaceTokenizer(tokenizer_path=str(assets))
    theirs = AutoTokenizer.from_pretrained(assets)
    text = "An augmented assignment: x += 1  # \u00e9\u4e2d\n"
    ids = ours.encode(text, add_bos=False, add_eos=False)
    assert ours.decode(ids) == text
    assert theirs.encode(text, add_special_tokens=False) == ids
    assert ours.encode("x", add_bos=True, add_eos=True)[::2] == [ours.bos_id, ours.eos_id]
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)
    assert ours.get_vocab_size() == len(theirs) == VOCAB_SIZE


def test_documents_pack(assets, tmp_path, monkeypatch):
    """Positions restart inside most training sequences."""
    lines = (assets / "text" / "train.jsonl").read_text().splitlines()
    assert len(lines) > 300
    assert all(json.loads(line)["text"].strip() for line in lines)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))
    tokenizer = HuggingFaceTokenizer(tokenizer_path=str(assets))
    data = iter(HuggingFaceTextDataset("c4_test", str(assets / "text"), tokenizer, seq_len=256))
    restarts = 0
    for _ in range(20):
        inputs, _ = next(data)
        restarts += int((inputs["positions"][1:] == 0).sum())
    assert restarts > 20


def test_deterministic_and_made_once(assets, tmp_path):
    again = debug_assets(tmp_path / "again")
    for file in FILES:
        assert (again / file).read_bytes() == (assets / file).read_bytes()
    (again / "mark").touch()
    assert debug_assets(tmp_path / "again") == again
    assert (again / "mark").exists()


def test_made_by_several_processes_at_once(assets, tmp_path):
    code = "from trn_kernels.recipes.assets import debug_assets; print(debug_assets())"
    processes = [
        subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    assert {process.communicate()[0].strip() for process in processes} == {"assets/debug"}
    assert [process.returncode for process in processes] == [0] * 4
    assert [path.name for path in (tmp_path / "assets").iterdir()] == ["debug"]
    for file in FILES:
        assert (tmp_path / "assets" / "debug" / file).read_bytes() == (assets / file).read_bytes()


def test_an_incomplete_folder_is_refused(tmp_path):
    (tmp_path / "debug").mkdir()
    with pytest.raises(ValueError, match=r"debug is there but has no tokenizer.json; remove it"):
        debug_assets(tmp_path / "debug")
