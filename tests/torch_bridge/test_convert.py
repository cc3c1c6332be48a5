"""Conversion: structures, names, randomness, barriers, batch sizes, errors."""

import inspect
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import torch_bridge
from tests.torch_bridge.oracle import assert_same_gradients, loss_and_gradients
from torch_bridge import BridgeError, UnsupportedOpError, convert


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.arange(6.0))
        self.register_buffer("scratch", torch.ones(6), persistent=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.body(self.embed(ids) + self.offset * self.scratch)))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def ids(rows: int, length: int = 5) -> torch.Tensor:
    return torch.arange(rows * length).reshape(rows, length) % 11


def test_tied_weights_are_one_parameter_with_one_gradient() -> None:
    module = Tied()
    converted = convert(module, kwargs={"ids": ids(3), "labels": ids(3)})
    assert list(converted.params) == ["embed.weight", "body.weight", "body.bias"]
    assert converted.aliases == {"head.weight": "embed.weight"}
    loss, gradients, _ = loss_and_gradients(converted, converted.batch)
    want = module(ids(3), ids(3))["loss"]
    want.backward()
    assert float(loss) == pytest.approx(want.item(), rel=1e-5)
    assert_same_gradients(gradients, module)


def test_state_dict_makes_an_exact_round_trip_with_ties_and_buffers() -> None:
    module = Tied()
    converted = convert(module, (ids(2),))
    saved = converted.to_state_dict(converted.params)
    assert list(saved) == list(module.state_dict())
    for name, value in module.state_dict().items():
        assert torch.equal(saved[name], value)
        assert saved[name].dtype == value.dtype
    other = Tied()
    other.load_state_dict(saved)
    again = converted.from_state_dict(other.state_dict())
    assert all(np.array_equal(again.params[k], converted.params[k]) for k in converted.params)


def test_a_foreign_state_dict_is_refused_with_every_difference() -> None:
    converted = convert(Tied(), (ids(2),))
    wrong = {"embed.weight": torch.zeros(3, 3), "other": torch.zeros(1)}
    with pytest.raises(BridgeError) as caught:
        converted.from_state_dict(wrong)
    for part in ("missing: body.bias", "unknown: other", "shape of embed.weight: got (3, 3)"):
        assert part in str(caught.value)


def test_the_module_may_change_afterwards_without_changing_the_conversion() -> None:
    module = nn.Linear(3, 2)
    converted = convert(module, (torch.ones(2, 3),))
    before = np.array(converted.params["weight"])
    with torch.no_grad():
        module.weight.add_(1.0)
    np.testing.assert_array_equal(converted.params["weight"], before)


def test_one_export_serves_every_number_of_rows() -> None:
    module = Tied()
    converted = convert(module, kwargs={"ids": ids(4), "labels": ids(4)})
    assert converted.one_export
    assert converted.batch_dims == {"ids": 0, "labels": 0}
    for rows in (2, 3, 7):
        want = module(ids(rows), ids(rows))
        batch = {"ids": jnp.asarray(ids(rows).numpy()), "labels": jnp.asarray(ids(rows).numpy())}
        outputs, _ = jax.jit(lambda b: converted.apply(converted.params, converted.buffers, **b))(batch)
        np.testing.assert_allclose(outputs["logits"], want["logits"].detach(), rtol=1e-5, atol=1e-6)
        assert float(converted.loss_fn(converted.params, batch)) == pytest.approx(
            want["loss"].item(), rel=1e-5
        )
    assert len(converted.programs.cache) == 1


def test_an_example_of_one_row_is_enough() -> None:
    module = nn.Linear(3, 2)
    converted = convert(module, (torch.ones(1, 3),))
    assert converted.one_export
    out, _ = converted.apply(converted.params, {}, jnp.ones((4, 3)))
    assert out.shape == (4, 2)


def test_another_sequence_length_is_exported_when_met() -> None:
    module = Tied()
    converted = convert(module, (ids(2, 5),))
    out, _ = converted.apply(converted.params, converted.buffers, jnp.asarray(ids(3, 7).numpy()))
    np.testing.assert_allclose(out["logits"], module(ids(3, 7))["logits"].detach(), rtol=1e-5, atol=1e-6)
    assert len(converted.programs.cache) == 2


class BatchSecond(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        return self.out(x.cumsum(0) + start[None]).view(x.shape[0] * x.shape[1], 2)


def test_batch_dims_can_be_stated() -> None:
    x, start = torch.randn(5, 3, 4), torch.randn(3, 4)
    module = BatchSecond()
    converted = convert(module, (x, start), batch_dims=(1, 0))
    assert converted.batch_dims == (1, 0)
    x, start = torch.randn(5, 6, 4), torch.randn(6, 4)
    out, _ = converted.apply(converted.params, {}, jnp.asarray(x.numpy()), jnp.asarray(start.numpy()))
    np.testing.assert_allclose(out, module(x, start).detach(), rtol=1e-5, atol=1e-6)
    assert len(converted.programs.cache) == 1


def test_batch_leaves_that_disagree_are_listed() -> None:
    converted = convert(Tied(), kwargs={"ids": ids(4), "labels": ids(4)})
    batch = {"ids": jnp.zeros((4, 5), int), "labels": jnp.zeros((3, 5), int)}
    with pytest.raises(BridgeError, match=r"ids: shape \(4, 5\), batch dim 0"):
        converted.loss_fn(converted.params, batch)


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.out = nn.Linear(4, 1)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.dropout(self.frozen(self.norm(x))))


def mse(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((outputs[:, 0] - target) ** 2).mean()


def test_the_signature_of_the_loss_says_what_it_takes() -> None:
    x, y = torch.randn(6, 4), torch.randn(6)
    module = Regression()
    training = convert(module, (x, y), loss=mse)
    assert list(inspect.signature(training.loss_fn).parameters) == [
        "params",
        "batch",
        "rng",
        "model_state",
        "frozen",
    ]
    assert training.loss_fn.takes == ("rng", "model_state", "frozen")
    evaluation = convert(module.eval(), (x, y), loss=mse)
    takes = inspect.signature(evaluation.loss_fn).parameters
    assert list(takes) == ["params", "batch", "frozen", "model_state"]
    assert [name for name in takes if takes[name].default is not inspect.Parameter.empty] == ["model_state"]
    assert set(evaluation.constants) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    with pytest.raises(TypeError, match="frozen"):
        evaluation.loss_fn(evaluation.params, evaluation.batch)


def test_a_batch_norm_step_returns_the_new_statistics_and_torchs_gradients() -> None:
    x, y = torch.randn(6, 4), torch.randn(6)
    module = Regression()
    module.dropout.p = 0.0
    converted = convert(module, (x, y), loss=mse)
    loss, gradients, state = loss_and_gradients(
        converted, converted.batch, model_state=converted.model_state, frozen=converted.frozen
    )
    want = mse(module(x), y)
    want.backward()
    assert float(loss) == pytest.approx(want.item(), rel=1e-5)
    assert_same_gradients(gradients, module)
    assert set(gradients) == {"norm.weight", "norm.bias", "out.weight", "out.bias"}
    for name, value in state.items():
        np.testing.assert_allclose(value, dict(module.named_buffers())[name], rtol=1e-5, err_msg=name)
    saved = converted.to_state_dict(converted.params, state)
    assert saved["norm.num_batches_tracked"].dtype == torch.int64
    assert saved["norm.num_batches_tracked"].item() == 1


def test_dropout_drops_the_stated_share_and_follows_the_key() -> None:
    converted = convert(nn.Dropout(0.25), (torch.ones(8, 500),))
    x = jnp.ones((64, 500))
    out, _ = converted.apply({}, {}, x, rng=jax.random.key(0))
    assert abs(float((out == 0).mean()) - 0.25) < 0.01
    np.testing.assert_allclose(np.unique(out), [0.0, 4 / 3], rtol=1e-6)
    same, _ = converted.apply({}, {}, x, rng=jax.random.key(0))
    other, _ = converted.apply({}, {}, x, rng=jax.random.key(1))
    assert np.array_equal(out, same)
    assert not np.array_equal(out, other)
    with pytest.raises(BridgeError, match="no key"):
        converted.apply({}, {}, x)


def test_two_dropouts_draw_different_masks() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [nn.functional.dropout(x, 0.5), nn.functional.dropout(x, 0.5)]

    converted = convert(Twice(), (torch.ones(4, 50),))
    (a, b), _ = converted.apply({}, {}, jnp.ones((4, 50)), rng=jax.random.key(0))
    assert not np.array_equal(a, b)


class Barriers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            silent = self.a(x)
        with torch.no_grad():
            shared = x * 2
            with torch.enable_grad():
                loud = self.d(shared)
        return (silent * self.b(x) + self.b(x).detach() * self.c(x).data + loud).square().mean()


def test_detach_no_grad_and_data_stop_gradients_as_in_torch() -> None:
    x = torch.randn(4, 3)
    module = Barriers()
    _, gradients, _ = loss_and_gradients(convert(module, (x,)), (jnp.asarray(x.numpy()),))
    module(x).backward()
    assert_same_gradients(gradients, module)
    assert not np.any(gradients["a.weight"])
    assert not np.any(gradients["c.weight"])
    assert np.any(gradients["d.weight"])


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g.numpy() * 3


def test_a_backward_outside_torch_is_refused_with_the_way_out() -> None:
    class Uses(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Doubling.apply(x)

    with pytest.raises(BridgeError) as caught:
        convert(Uses(), (torch.ones(2, 2),))
    assert "Doubling, an autograd.Function, cannot be followed" in str(caught.value)
    assert "return g.numpy() * 3" in str(caught.value)
    assert "jax.custom_vjp" in str(caught.value)


def test_checkpointed_regions_are_inlined_with_their_gradients() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.utils.checkpoint.checkpoint(self.a, x, use_reentrant=True)
            return torch.utils.checkpoint.checkpoint(self.a, y, use_reentrant=False).square().sum()

    x = torch.randn(2, 3, requires_grad=True)
    module = Checkpointed()
    converted = convert(module, (x,))
    _, gradients, _ = loss_and_gradients(converted, converted.batch)
    module(x).backward()
    assert_same_gradients(gradients, module)


def test_data_dependent_python_names_the_line_and_the_way_out() -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() > 0:
                return x
            return -x

    with pytest.raises(BridgeError) as caught:
        convert(Branches(), (torch.ones(2, 2),))
    assert "if x.sum() > 0" in str(caught.value)
    assert "torch.where" in str(caught.value)


@torch.library.custom_op("bridge_tests::unheard_of", mutates_args=())
def unheard_of(x: torch.Tensor) -> torch.Tensor:
    """An operator that nobody lowers."""
    return x + 1


@unheard_of.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_an_operator_without_lowering_says_where_it_is_and_what_to_do() -> None:
    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return unheard_of(x)

    with pytest.raises(UnsupportedOpError) as caught:
        convert(nn.Sequential(nn.Identity(), Inner()), (torch.ones(2, 3, 3),))
    text = str(caught.value)
    assert "bridge_tests.unheard_of" in text
    assert "in module 1" in text
    assert "return unheard_of(x)" in text
    assert "register_lowering" in text
    assert isinstance(caught.value, NotImplementedError)


def test_a_registered_lowering_is_used() -> None:
    @torch.library.custom_op("bridge_tests::tripled", mutates_args=())
    def tripled(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @tripled.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    @torch_bridge.register_lowering(torch.ops.bridge_tests.tripled.default)
    def _(x: jax.Array) -> jax.Array:
        return x * 3

    class Uses(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return tripled(x)

    converted = convert(Uses(), (torch.ones(2, 2),))
    np.testing.assert_array_equal(converted.apply({}, {}, jnp.full((2, 2), 2.0))[0], 6.0)


def test_fixed_arguments_may_be_left_out_but_not_changed() -> None:
    class Scales(nn.Module):
        def forward(self, x: torch.Tensor, factor: int = 1, *, mode: str | None = None) -> torch.Tensor:
            return x * factor

    converted = convert(Scales(), (torch.ones(2, 2), 3), {"mode": None})
    assert converted.batch[1] is None
    x = jnp.ones((2, 2))
    np.testing.assert_array_equal(converted.apply({}, {}, x)[0], 3.0)
    np.testing.assert_array_equal(converted.apply({}, {}, x, 3, mode=None)[0], 3.0)
    with pytest.raises(BridgeError, match="fixed at 3"):
        converted.apply({}, {}, x, 4)
    with pytest.raises(BridgeError, match="not exported with 'other'"):
        converted.apply({}, {}, x, other=1)


def test_nested_inputs_and_outputs_keep_their_structure() -> None:
    class Nested(nn.Module):
        def forward(self, pair: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> Any:
            a, named = pair
            return {"sum": a + named["b"], "parts": [a, (named["b"], None)], "word": "done", "max": a.max(1)}

    a, b = torch.randn(2, 3), torch.randn(2, 3)
    converted = convert(Nested(), ((a, {"b": b}),))
    out, _ = converted.apply({}, {}, (jnp.asarray(a.numpy()), {"b": jnp.asarray(b.numpy())}))
    np.testing.assert_allclose(out["sum"], a + b, rtol=1e-6)
    assert out["word"] == "done"
    assert out["parts"][1][1] is None
    np.testing.assert_array_equal(out["max"].indices, a.max(1).indices)


def test_mutated_inputs_do_not_shift_the_outputs() -> None:
    class Mutates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x.add_(1)
            self.count += 1
            return x * 2, self.count * 3

    converted = convert(Mutates(), (torch.ones(2, 2),))
    (doubled, tripled), buffers = converted.apply({}, converted.buffers, jnp.ones((2, 2)))
    np.testing.assert_array_equal(doubled, 4.0)
    assert float(tripled) == 3.0
    assert float(buffers["count"]) == 1.0


def test_integers_that_do_not_fit_are_an_error_not_a_wrap() -> None:
    class Adds(nn.Module):
        def __init__(self, value: int) -> None:
            super().__init__()
            self.register_buffer("big", torch.tensor([value]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.big

    with pytest.raises(BridgeError, match="do not fit into int32"):
        convert(Adds(2**40), (torch.ones(2, 1, dtype=torch.int64),))
    converted = convert(Adds(5), (torch.ones(2, 1, dtype=torch.int64),))
    assert converted.apply({}, converted.buffers, jnp.ones((2, 1), jnp.int32))[0].dtype == jnp.int32
    with pytest.raises(BridgeError, match="do not fit into int32"):
        converted.apply({}, converted.buffers, np.array([[2**40]] * 2))


def test_float64_asks_for_x64() -> None:
    with pytest.raises(BridgeError, match="jax_enable_x64"):
        convert(nn.Linear(2, 2).double(), (torch.ones(2, 2, dtype=torch.float64),))


def test_module_paths_are_the_names_of_the_equations() -> None:
    converted = convert(nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh())), (torch.ones(2, 3),))
    jaxpr = jax.make_jaxpr(lambda p, x: converted.apply(p, {}, x)[0])(converted.params, jnp.ones((2, 3)))
    paths = {e.primitive.name: str(e.source_info.name_stack) for e in jaxpr.jaxpr.eqns}
    assert paths["dot_general"] == "0"
    assert paths["tanh"] == "1/0"


def test_a_linear_layer_contracts_its_weight_where_it_lies() -> None:
    converted = convert(nn.Linear(3, 2), (torch.ones(4, 3),))
    jaxpr = jax.make_jaxpr(lambda p, x: converted.apply(p, {}, x)[0])(converted.params, jnp.ones((4, 3)))
    assert "transpose" not in {e.primitive.name for e in jaxpr.jaxpr.eqns}


def test_a_module_without_loss_says_how_to_give_one() -> None:
    converted = convert(nn.Linear(3, 2), (torch.ones(4, 3),))
    with pytest.raises(BridgeError, match=r"convert\(module, ..., loss=fn\)"):
        _ = converted.loss_fn


def test_an_unwanted_conversion_half_is_not_imported_and_torch_is_left_alone() -> None:
    code = """
import sys, torch
before = torch._C._get_privateuse1_backend_name(), torch.autograd.Function.__dict__["apply"]
import torch_bridge
assert not any(name.split(".")[0] == "rannc_jax" for name in sys.modules)
torch_bridge.convert(torch.nn.Linear(2, 2), (torch.ones(2, 2),))
assert before == (torch._C._get_privateuse1_backend_name(), torch.autograd.Function.__dict__["apply"])
with torch.random.fork_rng():
    torch.rand(1)
class Conditional(torch.nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))
exported = torch.export.export(Conditional(), (torch.ones(2),), strict=False)
assert torch.equal(exported.module()(torch.ones(2)), torch.full((2,), 2.0))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_coverage_lists_operators_and_what_is_missing() -> None:
    class Mixed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return unheard_of(x.tanh().tanh())

    table = torch_bridge.coverage(Mixed(), (torch.ones(2, 3, 3),))
    assert [use.operator for use in table.missing] == ["bridge_tests.unheard_of.default"]
    counts = {use.operator: use.count for use in table.uses}
    assert counts["aten.tanh.default"] == 2
    assert "NO" in str(table)
