"""The tabulated Gaussian entropy against the quadrature, at its edges, and under transforms."""

import math

import numpy as np
import pytest
import torch

from acutance.rowstats.gaussian import (
    KEY_INTERVALS,
    SPREAD_INTERVALS,
    expected_entropy,
    spline_table,
)
from acutance.theory import expected_entropy_gauss, expected_max_gauss

ACCURACY = {torch.float64: 1e-6, torch.float32: 5e-6}  # nats


def quadrature(n, std):
    return torch.from_numpy(np.asarray(expected_entropy_gauss(n.double().numpy(), std.numpy())))


def random_rows(count, seed):
    """Rows with n log-uniform in 2 ... 1e7 and std dense near 0 and reaching 50."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(2, count, generator=generator, dtype=torch.float64)
    n = (2 * (5e6 ** uniform[0])).round()
    return n, 50 * uniform[1] ** 3


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ACCURACY)
def test_random_rows_match_quadrature(dtype):
    n, std = random_rows(250, seed=1)
    std = std.to(dtype)
    error = expected_entropy(n, std).double() - quadrature(n, std.double())
    assert error.abs().max() < ACCURACY[dtype]


@pytest.mark.parametrize("dtype", ACCURACY)
def test_corners_match_quadrature(dtype):
    n = torch.tensor([2, 3, 4, 5, 17, 10**4, 10**7, 10**8, 10**12])[:, None]
    std = torch.tensor([0, 1e-12, 1e-4, 0.01, 0.2, 50, 1e3, 1e6], dtype=dtype)
    result = expected_entropy(n, std)
    assert result.shape == (9, 8)
    assert (result.double() - quadrature(n, std.double())).abs().max() < ACCURACY[dtype]


@pytest.mark.parametrize("dtype", ACCURACY)
def test_exact_edges(dtype):
    n = torch.tensor([2, 512, 10**7, 10**8])
    std = torch.tensor([0.0, math.inf], dtype=dtype)
    flat, hard = expected_entropy(n[:, None], std).unbind(1)
    assert torch.equal(flat, n.to(dtype).log())
    assert (hard == 0).all()
    assert (expected_entropy(torch.tensor(1), torch.linspace(0, 60, 9, dtype=dtype)) == 0).all()


def test_tail_is_relatively_accurate():
    """Far out the entropy is pi² M_n / (6 std), so its error there shrinks with it."""
    n, std = torch.tensor([2, 64, 10**6]), torch.tensor(1e9, dtype=torch.float64)
    limit = math.pi**2 / 6 * torch.from_numpy(expected_max_gauss(n.numpy()))
    torch.testing.assert_close(expected_entropy(n, std) * std, limit, rtol=1e-5, atol=0)


def test_seam_of_the_table_is_continuous():
    std = torch.tensor([0.5, 3.0, 7.0, 20.0], dtype=torch.float64)
    n = 1e12 * torch.tensor([[1 - 1e-9], [1.0], [1 + 1e-9]], dtype=torch.float64)
    below, at, above = expected_entropy(n, std)
    torch.testing.assert_close(below, at, rtol=0, atol=1e-7)
    torch.testing.assert_close(above, at, rtol=0, atol=1e-7)


def test_beyond_the_table_only_the_scales_grow():
    """Past 1e12 keys, E H / log n depends on std / sqrt(2 + 2 log n) alone."""
    n = torch.tensor([[1e12], [1e15], [1e18]], dtype=torch.float64)
    ratio = torch.tensor([0.0, 0.3, 1.0, 2.0, 9.0], dtype=torch.float64)
    end, *beyond = expected_entropy(n, ratio * (2 + 2 * n.log()).sqrt()) / n.log()
    for share in beyond:
        torch.testing.assert_close(share, end, rtol=1e-12, atol=0)


def test_rows_without_an_answer_are_nan_and_stop_gradients():
    n = torch.tensor([0.0, -1.0, math.nan, math.inf, 8.0, 8.0, 8.0])
    std = torch.tensor([1.0, 1.0, 1.0, 1.0, math.nan, -1.0, 1.0], requires_grad=True)
    result = expected_entropy(n, std)
    assert result.isnan().tolist() == [True] * 6 + [False]
    result[-1].backward()
    assert std.grad.isfinite().all()
    assert (std.grad[:-1] == 0).all()
    assert std.grad[-1] < 0


def test_gradient_matches_differences_of_the_quadrature():
    n, std = random_rows(60, seed=2)
    std = std + 0.01
    step = 1e-3 * std
    slope = (quadrature(n, std + step) - quadrature(n, std - step)) / (2 * step)
    leaf = std.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(expected_entropy(n, leaf).sum(), leaf)
    assert (gradient - slope).abs().max() < 2e-5


def test_gradient_at_the_edges():
    std = torch.tensor([0.0, 1e-3, math.inf], dtype=torch.float64, requires_grad=True)
    expected_entropy(torch.tensor(100), std).sum().backward()
    expected = torch.tensor([0.0, -0.99e-3, 0.0], dtype=torch.float64)  # -std (1 - 1/n)
    torch.testing.assert_close(std.grad, expected, rtol=0, atol=1e-6)


def test_gradcheck_twice():
    n, std = random_rows(20, seed=3)
    std.requires_grad_()
    assert torch.autograd.gradcheck(lambda leaf: expected_entropy(n, leaf), (std,))
    assert torch.autograd.gradgradcheck(lambda leaf: expected_entropy(n, leaf), (std,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_result_has_the_shape_and_dtype_of_std(dtype):
    result = expected_entropy(torch.full((3, 1), 64), torch.ones(2, dtype=dtype))
    assert result.dtype == dtype
    assert result.shape == (3, 2)
    precise = expected_entropy(torch.tensor(64), torch.tensor(1.0, dtype=torch.float64))
    assert (result.double() - precise).abs().max() <= 4 * torch.finfo(dtype).eps
    assert expected_entropy(torch.ones(0), torch.ones(0)).shape == (0,)


def test_vmap_and_functional_gradient():
    n, std = random_rows(12, seed=4)
    direct = expected_entropy(n, std)
    torch.testing.assert_close(torch.func.vmap(expected_entropy)(n, std), direct)
    leaf = std.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(expected_entropy(n, leaf).sum(), leaf)
    mapped = torch.func.vmap(torch.func.grad(expected_entropy, argnums=1))(n, std)
    torch.testing.assert_close(mapped, gradient)


def test_compiles_as_one_graph():
    n, std = random_rows(12, seed=5)
    compiled = torch.compile(expected_entropy, fullgraph=True, backend="aot_eager")
    leaf, other = std.clone().requires_grad_(), std.clone().requires_grad_()
    result, direct = compiled(n, leaf), expected_entropy(n, other)
    torch.testing.assert_close(result, direct)
    result.sum().backward()
    direct.sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad)


def test_table_is_read_once_and_has_the_layout_the_code_expects():
    table = spline_table(torch.float32, torch.device("cpu"))
    assert table.numel() == (KEY_INTERVALS + 3) * (SPREAD_INTERVALS + 3)
    assert table.isfinite().all()
    assert spline_table(torch.float32, torch.device("cpu")) is table


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_agrees_with_cpu():
    n, std = random_rows(2000, seed=6)
    on_device = expected_entropy(n.cuda(), std.float().cuda())
    assert on_device.device.type == "cuda"
    assert (on_device.cpu() - expected_entropy(n, std)).abs().max() < ACCURACY[torch.float32]
