"""NumPy arrays and torch tensors as arguments and results."""

import ml_dtypes
import numpy as np
import pytest
import torch

from trn_kernels import emulator
from trn_kernels.emulator import interop

emulator.install()

import nki  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

TORCH = ["float32", "float16", "bfloat16", "float8_e5m2", "int8", "int16", "int32", "uint8", "uint16", "uint32"]


def copy(x):
    out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    nisa.dma_copy(out, x)
    return out


def of_bytes(dtype, shape=(4, 6)):
    """A tensor of random bits."""
    size = torch.empty((), dtype=dtype).element_size()
    return torch.randint(0, 256, (shape[0], shape[1] * size), dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("name", TORCH)
def test_torch_in_torch_out_bit_for_bit(name):
    x = of_bytes(getattr(torch, name))
    seen = []

    def kernel(x):
        seen.append(x.dtype)
        return copy(x)

    out = nki.simulate(kernel)(x)
    assert isinstance(out, torch.Tensor) and out.dtype == x.dtype and out.is_contiguous()
    assert torch.equal(out.view(torch.uint8), x.view(torch.uint8)) and seen == [name]


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3, np.int8, np.uint32]
)
def test_numpy_in_numpy_out(dtype):
    x = np.random.default_rng(0).integers(0, 256, (4, 24), np.uint8).view(dtype)
    out = nki.simulate(copy)(x)
    assert type(out) is np.ndarray and out.dtype == x.dtype and out.tobytes() == x.tobytes()


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_bool_is_a_byte(kind):
    x = np.array([[True, False]])

    def kernel(x):
        assert x.dtype == nl.bool_
        return copy(x)

    out = nki.simulate(kernel)(torch.from_numpy(x) if kind == "torch" else x)
    assert np.array_equal(np.asarray(out), [[1, 0]]) and str(out.dtype).endswith("uint8")


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (2, 3, 4, 5, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes(shape, dtype):
    out = nki.simulate(copy)(torch.ones(shape, dtype=dtype))
    assert tuple(out.shape) == (shape or (1,)) and out.dtype == dtype and (out == 1).all()


def test_an_argument_is_updated_in_place():
    def kernel(x):
        nisa.dma_copy(x[0], x[1])
        return x

    for x in (torch.arange(4, dtype=torch.bfloat16).reshape(2, 2), np.arange(4, dtype=np.float32).reshape(2, 2)):
        out = nki.simulate(kernel)(x)
        assert float(x[0, 0]) == 2 and (out == x).all()


def test_the_result_may_be_a_view():
    def kernel(x):
        return copy(x)[:, 1:4:2], copy(x).reshape((6, 4)), None

    x = torch.arange(24.0).reshape(4, 6)
    part, reshaped, nothing = nki.simulate(kernel)(x)
    assert torch.equal(part, x[:, 1:4:2]) and torch.equal(reshaped, x.reshape(6, 4)) and nothing is None
    assert part.is_contiguous()


@pytest.mark.parametrize("wrap", [tuple, list])
def test_several_results_are_a_tuple(wrap):
    out = nki.simulate(lambda x: wrap([copy(x), copy(x)]))(np.ones(3, np.float32))
    assert isinstance(out, tuple) and len(out) == 2


def test_mixed_arguments_give_torch():
    def kernel(x, y):
        return copy(x), copy(y)

    outs = nki.simulate(kernel)(np.ones(2, np.float32), y=torch.ones(2))
    assert all(isinstance(out, torch.Tensor) for out in outs)


def test_a_tensor_that_requires_grad_is_an_argument():
    x = torch.ones(3, requires_grad=True)
    out = nki.simulate(copy)(x)
    assert not out.requires_grad and (out == 1).all()


@pytest.mark.parametrize(
    "x, rule, says",
    [
        (torch.ones(3, 4).T, "argument", "strides (1, 4)"),
        (torch.ones(1, 4).expand(3, 4), "argument", "strides (0, 1)"),
        (torch.ones(2, device="meta"), "argument", "meta"),
        (torch.ones(2, dtype=torch.float64), "dtype", "argument 'x': dtype 'float64'"),
        (torch.ones(2, dtype=torch.int64), "dtype", "argument 'x': dtype 'int64'"),
        (torch.ones(2, dtype=torch.complex64), "dtype", "argument 'x': dtype 'complex64'"),
        (torch.ones(2).to(torch.float8_e4m3fn), "dtype", "float8_e4m3fn"),
    ],
)
def test_torch_arguments_refused(x, rule, says):
    with pytest.raises(emulator.NKIError) as caught:
        nki.simulate(copy)(x)
    assert caught.value.rule == rule and says in str(caught.value)


def test_a_wrong_dtype_says_of_which_argument():
    def kernel(x, scale, table=None):
        return None

    good, bad = np.ones((2, 2), np.float32), np.ones((2, 2))
    for arguments, name in (((good, bad, good), "scale"), ((good, good, bad), "table")):
        with pytest.raises(emulator.NKIError, match=f"argument '{name}': dtype 'float64' is not one .*\\[dtype\\]"):
            nki.simulate(kernel)(*arguments)


@pytest.mark.usefixtures("poisoned")
def test_a_result_that_torch_has_no_dtype_for():
    def kernel(x):
        return nl.ndarray((2,), nl.float8_e4m3, nl.shared_hbm)

    with pytest.raises(emulator.NKIError, match="torch has no dtype float8_e4m3"):
        nki.simulate(kernel)(torch.ones(2))


def test_a_read_only_argument_can_be_read():
    x = np.ones((2, 2), np.float32)
    x.flags.writeable = False
    assert (nki.simulate(copy)(x) == 1).all()


def test_the_storage_can_still_be_freed():
    """FSDP frees a parameter by resizing its storage, which ``Tensor.numpy()`` would forbid."""
    tensor = torch.ones(4, 4, dtype=torch.bfloat16)
    interop.to_numpy(tensor)
    tensor.untyped_storage().resize_(0)
