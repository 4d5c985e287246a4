"""The check of kernel source: constructs, lines, versions, and the commands."""

from pathlib import Path

import pytest

from trn_kernels import emulator
from trn_kernels.emulator import source
from trn_kernels.emulator.__main__ import main

KERNELS = Path(emulator.__file__).parents[1] / "kernels"
HEAD = "import nki\nimport nki.language as nl\nimport nki.isa as nisa\n"


def body(*lines):
    return HEAD + "@nki.jit\ndef kernel(x):\n" + "".join(f"    {line}\n" for line in lines)


# What is found in line 6, the first of the body, and the versions in which that is legal.
CONSTRUCTS = {
    "for i in nl.dynamic_range(4): pass": ("dynamic_range", "0.3", "0.6"),
    "nl.fori_loop(0, 4, step)": ("fori_loop", "0.6", "0.7"),
    "nisa.topk(a, b, c, 8)": ("topk", "0.6", "0.7"),
    "nisa.activate2(a)": ("trn3", "0.4", "0.7"),
    "nisa.tensor_copy_dynamic_src(a, b)": ("tensor_copy_dynamic_src", "0.3", "0.3"),
    "i = nl.arange(4)": ("arange", "", ""),
    "nisa.memset(a, 0, mask=b)": ("mask", "", ""),
    "nisa.sendrecv(a, b, 0, 1, 0, use_gpsimd_dma=True)": ("dma_engine=", "", ""),
    "nisa.dma_copy(a, b, dge_mode=3)": ("dge_mode=3", "", ""),
    "nisa.dma_copy(a, b, priority=1)": ("priority", "0.6", "0.7"),
    "nisa.dma_compute(a, [b], nl.add, oob_mode=c)": ("oob_mode", "0.4", "0.7"),
    "nisa.tensor_scalar_reduce(a, b, c, d, e, reduce_cmd=f)": ("reduce_cmd", "0.6", "0.7"),
    "t = nl.ndarray((2, 2), nl.float32, buffer='sbuf')": ("nl.sbuf", "", ""),
    "y = x.permute((0, 2, 1))": ("permute", "0.5", "0.7"),
    "y = x.indirect(i)": ("trn3", "0.5", "0.7"),
    "n = sum(i for i in range(4))": ("generator", "0.7", "0.7"),
    "yield x": ("yield", "0.7", "0.7"),
    "import neuronxcc.nki.language": ("neuronxcc.nki", "0.3", "0.3"),
}


@pytest.mark.parametrize("line", CONSTRUCTS)
def test_construct(line):
    words, first, last = CONSTRUCTS[line]
    (found,) = source.findings(body(line))
    assert (found.line, found.first, found.last) == (6, first, last) and words in str(found)


# Imports, and the names of nki.language, nki.isa and nki.jit under them.
IMPORTS = {
    "import nki.isa, nki.language": ("nki.language", "nki.isa", "nki.jit"),
    "from nki import isa, language, jit": ("language", "isa", "jit"),
    "from nki import language as L, isa as I, jit as J": ("L", "I", "J"),
    "import nki as n": ("n.language", "n.isa", "n.jit"),
    "import nki.language as L, nki.isa as I, nki as n": ("L", "I", "n.jit"),
}


@pytest.mark.parametrize("line", IMPORTS)
@pytest.mark.parametrize("at", ("above", "below"))
def test_every_style_of_import_is_understood(line, at):
    language, isa, jit = IMPORTS[line]
    code = f"""@{jit}
def kernel(x, *, y):
    for i in {language}.dynamic_range(4):
        {isa}.nc_matmul(a, b, c, mask=1, psumAccumulateFlag=1)
    t = {language}.ndarray((2, 2), {language}.float32, buffer="sbuf")
    {language}.select(t)
"""
    text = f"{line}\n{code}" if at == "above" else f"{code}{line}\n"
    found = [(one.line - (at == "above"), str(one).split(" [")[0].split(":")[0]) for one in source.findings(text)]
    assert found == [
        (2, "a bare * in the signature of a kernel"),
        (3, "dynamic_range"),
        (4, "nc_matmul(mask=)"),
        (4, "nc_matmul(psumAccumulateFlag=)"),
        (5, "ndarray(buffer='sbuf')"),
    ]


def test_a_function_imported_under_another_name():
    found = source.findings("from nki.isa import nc_matmul as mm\ndef f(x):\n    mm(x, is_moving_zero=1)\n")
    assert [(one.line, str(one)[:25]) for one in found] == [(3, "nc_matmul(is_moving_zero=")]


@pytest.mark.parametrize(
    "text", ["from neuronxcc import nki\n", "from neuronxcc.nki import isa, language\n", "import neuronxcc.nki as n\n"]
)
def test_imports_of_the_first_nki(text):
    assert [one.last for one in source.findings(text)] == ["0.3"]
    (_, found) = source.findings("import neuronxcc.nki\ndef f(x):\n    neuronxcc.nki.language.arange(4)\n")
    assert "arange" in str(found)


def test_while_on_a_register():
    found = source.findings(body("r = nisa.register_alloc(3)", "while r:", "    pass", "while x:", "    break"))
    assert [(one.line, one.last) for one in found] == [(7, "0.6")]


def test_class_and_signature():
    text = HEAD + "class A(Base): pass\nclass B(nl.NKIObject): pass\n@nki.jit\ndef kernel(x, *, y): pass\n"
    assert [(one.line, one.first) for one in source.findings(text)] == [(4, "0.7"), (7, "0.7")]


@pytest.mark.parametrize(
    "text",
    [
        "import numpy as np\nx = np.arange(4)\n",
        HEAD + "TABLE = sum(i for i in range(4))\n",
        "import torch\ndef f(x):\n    return x.permute(1, 0)\n",
        body("nisa.dma_copy(a, b, dge_mode=nisa.dge_mode.hwdge)", "t = nl.ndarray((2, 2), nl.float32, buffer=nl.sbuf)"),
    ],
)
def test_what_is_no_construct_of_nki(text):
    assert source.findings(text) == [] and source.versions([]) == ["0.3", "0.4", "0.5", "0.6", "0.7"]


def test_verdicts_and_status(tmp_path, capsys):
    good, narrow, none, broken = (tmp_path / f"{name}.py" for name in ("good", "narrow", "none", "broken"))
    good.write_text(body("return x"))
    narrow.write_text(body("nl.fori_loop(0, 4, step)", "for i in nl.dynamic_range(4): pass"))
    none.write_text(body("nl.mgrid[0:4]"))
    broken.write_text("def kernel(:\n")
    assert main(["check", str(good)]) == 0
    assert capsys.readouterr().out == f"{good}: legal in NKI 0.3 to 0.7\n"
    assert main(["check", str(narrow)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{narrow}: legal in NKI 0.6"
    assert main(["check", str(good), str(none)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"{none}: legal in no NKI from 0.3 on"
    assert main(["check", str(broken)]) == 1
    assert "not Python" in capsys.readouterr().out


def test_what_cannot_be_read_is_one_line_and_the_rest_is_checked(tmp_path, capsys):
    missing, folder, latin, nulls, good = (tmp_path / name for name in ("missing", "folder", "latin", "nulls", "good"))
    folder.mkdir()
    latin.write_bytes("x = 'é'\n".encode("latin-1"))
    nulls.write_bytes(b"x = 1\0\n")
    good.write_text("\ufeff" + body("return x"), encoding="utf-8")
    assert main(["check", *map(str, (missing, folder, latin, nulls, good))]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{missing}: No such file or directory",
        f"{folder}: Is a directory",
        f"{latin}: not UTF-8: byte 5 is 0xe9",
        f"{nulls}: not a text: it has null bytes",
        f"{good}: legal in NKI 0.3 to 0.7",
    ]


def test_our_kernels_are_legal_in_the_current_version(capsys):
    assert main(["check", *map(str, sorted(KERNELS.glob("*.py")))]) == 0
    for line in capsys.readouterr().out.splitlines():
        assert " legal in " not in line or line.endswith("0.7")


def test_the_table_of_rules_is_printed(capsys):
    assert main(["rules"]) == 0
    assert capsys.readouterr().out.startswith("# Rules of the emulator")
