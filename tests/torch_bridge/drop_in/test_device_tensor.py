"""Tensors over device arrays: what runs where, and that writes from either side reach the other."""

import copy
import io
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torch_bridge.drop_in.device_tensor import DeviceTensor, plain
from torch_bridge.drop_in.storage import TRAFFIC, Storage


def on_device(tensor: torch.Tensor, device: int = 0) -> DeviceTensor:
    sharding = NamedSharding(Mesh([jax.devices()[device]], ("data",)), PartitionSpec())
    array = jax.device_put(jnp.asarray(tensor.detach().numpy().copy()), sharding)
    return DeviceTensor(Storage(array, tensor.dtype))


def parameter(tensor: torch.Tensor, device: int = 0) -> Any:
    return torch.nn.Parameter(on_device(tensor, device))


@pytest.mark.parametrize("foreach", [False, True])
def test_clipping_stays_on_the_devices_of_each_gradient(foreach: bool) -> None:
    torch.manual_seed(0)
    grads = [torch.randn(5, 6) for _ in range(3)]
    reference = [torch.nn.Parameter(torch.zeros(5, 6)) for _ in grads]
    mine = [parameter(torch.zeros(5, 6), device) for device in range(3)]
    for p, q, grad, device in zip(reference, mine, grads, range(3), strict=True):
        p.grad, q.grad = grad.clone(), on_device(grad, device)
    expected = torch.nn.utils.clip_grad_norm_(reference, 1.0)
    before = TRAFFIC.to_host
    norm = torch.nn.utils.clip_grad_norm_(mine, 1.0, foreach=foreach)
    assert TRAFFIC.to_host == before
    assert norm.item() == pytest.approx(expected.item())
    for p, q, device in zip(reference, mine, range(3), strict=True):
        assert q.grad.storage_.array.devices() == {jax.devices()[device]}
        torch.testing.assert_close(plain(q.grad), p.grad)


def test_writes_through_views_and_below_autograd_reach_the_device() -> None:
    q = on_device(torch.zeros(4, 3))
    q[1].fill_(2.0)
    assert float(q.storage_.array.sum()) == 6.0
    q.mul_(2.0)
    q.data[0] = 1.0
    q.t()[2].add_(1.0)
    q.index_fill_(0, torch.tensor([3]), 5.0)
    expected = np.array([[1, 1, 2], [4, 4, 5], [0, 0, 1], [5, 5, 5]], np.float32)
    np.testing.assert_array_equal(q.storage_.array, expected)


def test_python_sees_ordinary_tensors() -> None:
    q = parameter(torch.ones(2, 2))
    assert q.detach().numpy().sum() == 4
    assert q.tolist() == [[1, 1], [1, 1]]
    assert "tensor(" in repr(q)
    copied = copy.deepcopy(q)
    assert type(copied) is torch.nn.Parameter
    file = io.BytesIO()
    torch.save({"parameter": q, "tensor": q.detach()}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert type(loaded["parameter"]) is torch.nn.Parameter
    assert type(loaded["tensor"]) is torch.Tensor


def test_autograd_goes_through() -> None:
    q = parameter(torch.ones(2, 2))
    ((q * 3).sum() / 2 + q[0].sum()).backward()
    torch.testing.assert_close(torch.as_tensor(q.grad), torch.tensor([[2.5, 2.5], [1.5, 1.5]]))


def test_a_scaler_unscales_and_skips_what_is_not_finite() -> None:
    q = parameter(torch.ones(2, 2))
    optimizer = torch.optim.SGD([q], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for grad, expected in ((8.0, 0.0), (float("inf"), 0.0)):
        q.grad = on_device(torch.full((2, 2), grad))
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        assert q.sum().item() == expected
    assert scaler.get_scale() == 4.0


def test_an_optimizer_that_nobody_knows_runs_on_them() -> None:
    p, q = torch.nn.Parameter(torch.ones(3, 3)), parameter(torch.ones(3, 3))
    for x in (p, q):
        optimizer = torch.optim.Rprop([x], lr=0.1)
        for sign in (1.0, 1.0, -1.0):
            grad = torch.full((3, 3), sign)
            x.grad = grad if x is p else on_device(grad)
            optimizer.step()
    torch.testing.assert_close(plain(q).detach(), p.detach())
