"""Importing and using torch_bridge changes nothing in torch."""

import subprocess
import sys

_CHECKS = """
import logging, os, sys, threading
import torch
import torch.nn.attention.flex_attention
from torch._functorch import eager_transforms
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils import _pytree

WATCHED = [
    (torch.autograd.Function, "apply"), (torch.autograd.Function.__base__, "apply"),
    (torch.autograd.grad_mode.inference_mode, "__enter__"),
    (torch.autograd.grad_mode.inference_mode, "__exit__"), (torch.amp.autocast_mode.autocast, "__init__"),
    (eager_transforms, "grad_and_value_impl"), (eager_transforms, "_vjp_with_argnums"),
    (eager_transforms, "_jvp_with_argnums"), (torch.nn.modules.batchnorm._BatchNorm, "forward"),
    (torch.nn.attention.flex_attention, "_validate_device"), (torch.Tensor, "data"),
    (torch.Tensor, "backward"), (torch.nn.Module, "__call__"), (torch, "cond"),
]

def state():
    return (
        torch._C._get_privateuse1_backend_name(), sorted(torch._C._dispatch_get_all_op_names()),
        [owner.__dict__.get(name) for owner, name in WATCHED], set(_pytree.SUPPORTED_NODES),
        torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"),
        torch.get_default_dtype(), logging.getLogger("torch._subclasses.fake_tensor").level,
        len(torch.overrides._get_current_function_mode_stack()),
    )

class Mine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, g):
        return g * 3

def torch_works():
    x = torch.ones(3, requires_grad=True)
    Mine.apply(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 3.0))
    with torch.random.fork_rng():
        torch.rand(1)
    with torch.inference_mode():
        assert (x * 2).is_inference()
    assert torch.equal(torch.func.grad(lambda x: (x * x).sum())(torch.ones(3)), torch.full((3,), 2.0))
    assert torch.equal(torch.func.jvp(torch.sin, (torch.zeros(3),), (torch.ones(3),))[1], torch.ones(3))
    assert torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (torch.ones(2),))[0] == 2
    assert while_loop(lambda i: i < 3, lambda i: (i + 1,), (torch.tensor(0),))[0] == 3
    assert scan(lambda c, x: (c + x, c * 1), torch.zeros(()), torch.ones(3))[0] == 3

class Net(torch.nn.Module):
    def __init__(self, bad=False):
        super().__init__()
        self.linear, self.bad = torch.nn.Linear(3, 3), bad
    def forward(self, x):
        if self.bad:
            return self.linear(x)[x > 0]
        with torch.no_grad():
            y = self.linear(x)
        return self.linear(x) + y
"""


def _run(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _CHECKS + code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr.strip(), done.stderr


def test_torch_is_as_before_after_import_a_conversion_and_a_failed_one() -> None:
    _run("""
before = state()
import torch_bridge
assert state() == before, "import"
torch_works()
before = state()  # eager cond and scan load parts of torch
torch_bridge.convert(Net(), (torch.ones(2, 3),))
assert state() == before, "convert"
try:
    torch_bridge.convert(Net(bad=True), (torch.ones(2, 3),))
except torch_bridge.BridgeError:
    pass
assert state() == before, "failed convert"
torch_works()
""")


def test_other_threads_train_and_convert_meanwhile() -> None:
    _run("""
import torch_bridge
errors, done = [], threading.Event()

def train():
    try:
        while not done.is_set():
            x = torch.ones(3, requires_grad=True)
            Mine.apply(x).sum().backward()
            assert torch.equal(x.grad, torch.full((3,), 3.0))
            with torch.inference_mode():
                assert (x * 2).is_inference()
            assert torch.equal(torch.func.grad(lambda x: (x * x).sum())(torch.ones(3)), torch.full((3,), 2.0))
    except BaseException as error:
        errors.append(error)

def convert(bad):
    try:
        torch_bridge.convert(Net(bad), (torch.ones(2, 3),))
        assert not bad
    except torch_bridge.BridgeError:
        assert bad
    except BaseException as error:
        errors.append(error)

torch_works()  # eager cond and scan load parts of torch
torch_bridge.convert(Net(), (torch.ones(2, 3),))
before = state()
trainer = threading.Thread(target=train)
trainer.start()
converters = [threading.Thread(target=convert, args=(bad,)) for bad in (False, True)]
for thread in converters:
    thread.start()
for thread in converters:
    thread.join()
done.set()
trainer.join()
assert not errors, errors
assert state() == before
""")
