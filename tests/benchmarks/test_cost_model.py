"""The page on the cost model is true; the model is near what AWS measured."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import trn_kernels
from trn_kernels import emulator
from trn_kernels.benchmarks import cost_model


def test_the_page_is_true(tmp_path):
    cost_model.main(tmp_path / "page.md")
    page = Path(trn_kernels.__file__).parent / "docs" / "cost-model.md"
    assert (tmp_path / "page.md").read_text() == page.read_text()


@pytest.mark.parametrize("comparison", cost_model.comparisons(), ids=lambda c: c.what)
def test_the_model_is_near_the_measurement(comparison):
    if comparison.unit == "cycles":  # latency, which is not modelled
        assert comparison.model < comparison.measured
    else:
        assert comparison.model == pytest.approx(comparison.measured, rel=0.06)


def test_the_matmul_that_is_compared_is_one():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((256, n)).astype(ml_dtypes.bfloat16) for n in (384, 1024))
    truth = a.astype(np.float64).T @ b.astype(np.float64)
    got = emulator.simulate(cost_model.matmul)(a, b, 2).astype(np.float64)
    assert np.abs(got - truth).max() <= 2.0**-8 * np.abs(truth).max()
