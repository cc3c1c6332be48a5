"""Mixed precision: dtypes, losses and gradients against torch's own autocast."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import torch_bridge
from tests.torch_bridge.oracle import Calls, arrays, loss_and_gradients
from tests.torch_bridge.test_transformers import bert, gpt2, images, masked_lm, resnet
from torch_bridge.precision import Autocast, gpu_rules, precision_of
from torch_bridge.tensors import to_jax

transformers = pytest.importorskip("transformers")
HALF, FULL = torch.bfloat16, torch.float32
# How much further from the exact gradient than torch's own mixed precision ours may be.
SLACK = 1.25


def llama() -> torch.nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=50, max_position_embeddings=16, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


class Recurrent(torch.nn.Module):
    def __init__(self, layer: type[torch.nn.Module]) -> None:
        super().__init__()
        self.layer = layer(6, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.head = torch.nn.Linear(10, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.layer(x)[0][:, -1]), labels)


def sequences(rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return {"x": torch.randn(rows, 7, 6, generator=generator), "labels": torch.arange(rows) % 3}


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[int], Any]]] = {
    "gpt2": (gpt2, masked_lm),
    "lstm": (lambda: Recurrent(torch.nn.LSTM), sequences),
    "gru": (lambda: Recurrent(torch.nn.GRU), sequences),
    "bert": (lambda: bert("BertForMaskedLM"), masked_lm),
    "llama": (llama, masked_lm),
    "resnet": (resnet, images),
}
FAST = ("gpt2", "lstm")


def models(*fast: str) -> list[Any]:
    return [pytest.param(n, marks=() if n in fast else pytest.mark.slow, id=n) for n in MODELS]


def torch_loss(module: torch.nn.Module, batch: Any, dtype: torch.dtype | None) -> torch.Tensor:
    """The loss under torch.autocast with the rules of GPUs, or without it; its gradients are in `.grad`."""
    module.zero_grad()
    with gpu_rules(), torch.autocast("cpu", dtype=dtype or HALF, enabled=dtype is not None):
        out = module(**batch)
        loss = out if isinstance(out, torch.Tensor) else out.loss
        loss.backward()
    return loss.detach()


def gradients_of(module: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: p.grad.numpy().copy() for name, p in module.named_parameters() if p.grad is not None}


def distance(a: Any, b: Any) -> float:
    return float(np.sqrt(sum(np.sum((np.asarray(a[k]) - np.asarray(b[k])) ** 2) for k in b)))


@pytest.mark.parametrize("name", models(*FAST))
def test_loss_and_gradients_are_as_close_to_the_exact_ones_as_those_of_torch(name: str) -> None:
    make, batch_of = MODELS[name]
    torch.manual_seed(0)
    module, batch = make().train(), batch_of(4)
    converted = torch_bridge.convert(module, kwargs=batch, precision="bf16")
    state = {key: value.clone() for key, value in module.state_dict().items()}
    extra = {"model_state": converted.model_state} if converted.model_state else {}
    loss, gradients, _ = loss_and_gradients(converted, arrays(batch), **extra)
    exact_loss, exact = torch_loss(module, batch, None), gradients_of(module)
    module.load_state_dict(state)
    want_loss, want = torch_loss(module, batch, HALF), gradients_of(module)
    assert {x.dtype for x in gradients.values()} == {jnp.dtype("float32")}
    assert float(loss) == pytest.approx(want_loss.item(), rel=2**-8)
    own, theirs = distance(gradients, exact), distance(want, exact)
    assert theirs > 1e-4 * distance(exact, {k: 0 * v for k, v in exact.items()}), "torch rounds"
    assert own <= SLACK * theirs, f"{own:.3e}, torch's {theirs:.3e}"
    assert own > 0.2 * theirs, "half precision must show"
    del exact_loss


@pytest.mark.parametrize("name", models(*FAST))
def test_every_value_has_the_dtype_that_torch_gives_it(name: str) -> None:
    """Hooks on all submodules: what each returns under autocast in eager mode, and in the program."""
    make, batch_of = MODELS[name]
    module, batch = make().eval(), batch_of(2)
    seen: dict[str, torch.dtype] = {}

    def note(path: str, out: Any) -> None:
        seen.setdefault(path, (out[0] if isinstance(out, tuple) else out).dtype)

    leaves = [(path, inner) for path, inner in module.named_modules() if path and not list(inner.children())]
    hooks = [inner.register_forward_hook(lambda *a, path=path: note(path, a[2])) for path, inner in leaves]
    torch_loss(module, batch, HALF)
    for hook in hooks:
        hook.remove()
    converted = torch_bridge.convert(module, kwargs=batch, precision="bf16")
    last = {node.path.replace("/", "."): node.dtypes[0] for node in converted.programs.first.graph.nodes}
    checked = {path: dtype for path, dtype in seen.items() if path in last}
    assert len(checked) >= min(2, len(leaves))
    assert {path: last[path] for path in checked} == checked


@pytest.mark.parametrize("name", models("gpt2"))
def test_training_goes_down_as_in_torch(name: str) -> None:
    make, batch_of = MODELS[name]
    torch.manual_seed(1)
    module, batch = make().train(), batch_of(4)
    converted = torch_bridge.convert(module, kwargs=batch, precision="bf16")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    params, state, values = converted.params, converted.model_state, arrays(batch)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            out = converted.loss_fn(params, values, **({"model_state": state} if state else {}))
            return (out.loss, out.model_state) if state else (out, state)

        (loss, new), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), new

    losses = []
    for _ in range(6):
        loss, params, state = step(params, state)
        losses.append((float(loss), torch_loss(module, batch, HALF).item()))
        optimizer.step()
    ours, theirs = np.array(losses).T
    np.testing.assert_allclose(ours, theirs, rtol=2e-2)
    assert ours[-1] < ours[0] - 0.5 * (theirs[0] - theirs[-1])


class Block(torch.nn.Module):
    """Its output's dtype under autocast, by torch's documentation of what GPUs do."""

    CASES: tuple[tuple[str, torch.dtype, Callable[..., torch.Tensor]], ...] = (
        ("linear", HALF, lambda h, w: F.linear(w, w)),
        ("matmul", HALF, lambda h, w: w @ w),
        ("einsum", HALF, lambda h, w: torch.einsum("ij,jk->ik", w, w)),
        ("baddbmm", HALF, lambda h, w: torch.baddbmm(w[None], w[None], w[None])),
        ("addmv", HALF, lambda h, w: torch.addmv(w[0], w, w[0])),
        ("convolution", HALF, lambda h, w: F.conv1d(w[None], w[:, :, None])),
        ("same convolution", HALF, lambda h, w: F.conv1d(w[None], w[:, :, None], padding="same")),
        ("prelu", HALF, lambda h, w: F.prelu(w, w[0, :1])),
        ("attention", HALF, lambda h, w: F.scaled_dot_product_attention(w[None], w[None], w[None])),
        ("relu", HALF, lambda h, w: F.relu(h)),
        ("gelu", HALF, lambda h, w: F.gelu(h)),
        ("mean", HALF, lambda h, w: h.mean(-1)),
        ("max pool", HALF, lambda h, w: F.max_pool3d(h[None, None, None], (1, 2, 2))),
        ("reflected", HALF, lambda h, w: F.pad(h[None], (1, 1), mode="reflect")),
        ("with a Python number", HALF, lambda h, w: 2.5 * h + 1),
        ("exp", FULL, lambda h, w: h.exp()),
        ("power", FULL, lambda h, w: h**2),
        ("square", FULL, lambda h, w: h.square()),
        ("softmax", FULL, lambda h, w: h.softmax(-1)),
        ("log softmax", FULL, lambda h, w: h.log_softmax(-1)),
        ("softmax of a stated dtype", HALF, lambda h, w: h.softmax(-1, dtype=HALF)),
        ("sum", FULL, lambda h, w: h.sum(0)),
        ("norm", FULL, lambda h, w: h.norm(dim=0)),
        ("cumsum", FULL, lambda h, w: h.cumsum(0)),
        ("layer norm", FULL, lambda h, w: F.layer_norm(h, (4,), w[0], w[1])),
        ("group norm", FULL, lambda h, w: F.group_norm(h, 2, w[0], w[1])),
        ("root mean square norm", FULL, lambda h, w: F.rms_norm(h, (4,), w[0])),
        ("batch norm", HALF, lambda h, w: F.batch_norm(h, w[0].detach(), w[1].detach().abs(), w[2], w[3])),
        ("softplus", FULL, lambda h, w: F.softplus(h)),
        ("squared error", FULL, lambda h, w: F.mse_loss(h, w)),
        ("cross entropy", FULL, lambda h, w: F.cross_entropy(h, torch.arange(4))),
        ("log likelihood", FULL, lambda h, w: F.nll_loss(h, torch.arange(4))),
        ("cosine similarity", FULL, lambda h, w: F.cosine_similarity(h, w)),
        ("bilinear resize", FULL, lambda h, w: F.interpolate(h[None, None], scale_factor=2, mode="bilinear")),
        ("joined", FULL, lambda h, w: torch.cat([h, w])),
        ("joined halves", HALF, lambda h, w: torch.cat([h, h])),
        ("addcmul", FULL, lambda h, w: torch.addcmul(w, h, h)),
        ("addcmul of halves", HALF, lambda h, w: torch.addcmul(h, h, h)),
        ("region that is off", FULL, lambda h, w: off("cpu", h.float(), w)),
        ("accelerator's region that is off", FULL, lambda h, w: off("cuda", h.float(), w)),
        ("embedding", FULL, lambda h, w: F.embedding(torch.arange(2), w)),
    )


def off(device: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.autocast(device, enabled=False):
        return a @ b


class Half(torch.nn.Module):
    """Hands each case a value in half precision, made by a product, and a parameter in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))
        self.calls = Calls([function for _, _, function in Block.CASES])

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return self.calls(x @ self.weight, self.weight)


def test_operators_have_the_dtypes_and_values_of_autocast_on_gpus() -> None:
    module, x = Half(), torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    converted = torch_bridge.convert(module, (x,), precision="bf16", batch_dims=(None,))
    got, _ = jax.jit(lambda p, x: converted.apply(p, converted.buffers, x))(converted.params, to_jax(x))
    with Autocast().region():
        want = module(x)
    for (name, dtype, _), mine, theirs in zip(Block.CASES, got, want, strict=True):
        assert mine.dtype == to_jax(torch.zeros((), dtype=dtype)).dtype, name
        assert theirs.dtype == dtype, name
        np.testing.assert_allclose(
            np.asarray(mine, np.float32),
            theirs.detach().float().numpy(),
            rtol=2**-6,
            atol=2**-6,
            err_msg=name,
        )


def test_the_hosts_own_lists_agree_where_both_have_a_rule() -> None:
    """Plain torch.autocast on the host, without our rules, for operators that both lists hold."""
    both = ("linear", "matmul", "baddbmm", "convolution", "prelu", "attention", "squared error")
    cases = [case for case in Block.CASES if case[0] in both]
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype=HALF):
        plain = [function(x @ x, x).dtype for _, _, function in cases]
    assert plain == [dtype for _, dtype, _ in cases]


def test_rules_hold_only_while_a_module_is_exported() -> None:
    h = torch.ones(2, dtype=HALF)

    def dtype() -> torch.dtype:
        with torch.autocast("cpu", dtype=HALF):
            return h.exp().dtype

    before = dtype()
    with gpu_rules(), gpu_rules():
        inside = dtype()
    torch_bridge.convert(torch.nn.Linear(2, 2), (torch.ones(2, 2),), precision="bf16")
    assert (before, inside, dtype()) == (HALF, FULL, HALF)
    with pytest.raises(ZeroDivisionError), Autocast().region():
        1 / 0
    assert dtype() is HALF
    assert torch.autocast("cuda", enabled=False).device == "cuda"


def test_float16_computes_in_float16() -> None:
    converted = torch_bridge.convert(torch.nn.Linear(3, 2), (torch.ones(4, 3),), precision="fp16")
    out, _ = converted.apply(converted.params, converted.buffers, jnp.ones((4, 3)))
    assert out.dtype == jnp.float16
    assert converted.params["weight"].dtype == jnp.float32


def test_a_module_without_precision_keeps_its_own_regions() -> None:
    class Regional(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.autocast("cpu", dtype=HALF):
                half = x @ x
            return half, x @ x

    converted = torch_bridge.convert(Regional(), (torch.ones(3, 3),), batch_dims=(None,))
    half, full = converted.apply({}, {}, jnp.ones((3, 3)))[0]
    assert (half.dtype, full.dtype) == (jnp.bfloat16, jnp.float32)


def test_an_unknown_precision_is_refused_with_what_is_known() -> None:
    with pytest.raises(torch_bridge.BridgeError, match="bf16"):
        precision_of("int3")
    with pytest.raises(torch_bridge.BridgeError, match="half precision"):
        precision_of(torch.float64)


def test_a_bias_gathers_its_gradient_in_float32() -> None:
    """4096 rows of 1: bfloat16 would stop counting at 256."""
    converted = torch_bridge.convert(torch.nn.Linear(2, 2), (torch.ones(4, 2),), precision="bf16")

    def total(params: Any) -> jax.Array:
        out, _ = converted.apply(params, {}, jnp.ones((4096, 2)))
        return jnp.sum(out.astype(jnp.float32))

    np.testing.assert_array_equal(jax.jit(jax.grad(total))(converted.params)["bias"], 4096.0)
