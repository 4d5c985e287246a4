"""The accuracy table in the documentation is true, and within its limit."""

import re
from pathlib import Path

import trn_kernels
from trn_kernels.benchmarks import accuracy


def test_the_table_is_true_and_within_the_limit():
    text = (Path(trn_kernels.__file__).parent / "docs" / "accuracy.md").read_text()
    assert text.startswith(accuracy.HEADER)
    published = {}
    for line in text.removeprefix(accuracy.HEADER).splitlines():
        *key, kernel, pytorch, _ = (cell.strip() for cell in re.fullmatch(r"\|(.*)\|", line)[1].split("|"))
        published[tuple(key)] = float(kernel), float(pytorch)
    measured = {tuple(e[:4]): e for e in accuracy.errors()}
    assert measured.keys() == published.keys()
    for key, error in measured.items():
        assert error.ratio <= accuracy.LIMIT, error
        # The BLAS of another machine sums in another order. In the small dtypes their rounding outweighs that.
        factor = 2 if error.dtype == "float32" else 1.2
        for now, then in zip(error[4:], published[key], strict=True):
            assert then / factor <= now <= then * factor, (error, then)
