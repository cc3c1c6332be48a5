"""A module on the devices: its step, and the torch tensors that stand for what it holds.

The values live in the storages of the user's own parameters and buffers, which become device tensors in
place: objects, names, ties and places in an optimizer stay. Whatever the user does to them is what the
next call uses.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import optax
import torch

import rannc_jax
from rannc_jax.runtime.state import TrainState
from torch_bridge.drop_in import functions
from torch_bridge.drop_in.calls import CALL, Call, batch_of, gradient_paths
from torch_bridge.drop_in.device_tensor import DeviceTensor
from torch_bridge.drop_in.storage import Storage
from torch_bridge.errors import BridgeError, message
from torch_bridge.module import JaxModule
from torch_bridge.offsets import OFFSET, with_offsets
from torch_bridge.signature import Names
from torch_bridge.tensors import to_jax

Gradients = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run of the module gave.

    Args:
        results: flat, in the order of the module's own structure.
        gradients: of the loss, by parameter name; None where no loss was differentiated.
        inputs: of the loss, by pytree path of the batch leaf.
    """

    results: Sequence[Any]
    gradients: Gradients | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)


class Deployment:
    """Runs conversions of one module on one plan.

    Args:
        jm: the conversion of the first call.
        call: the first call; its batch decides the plan.
        names: the user's tensors by name and role.
        optimizer: the update, over all trainable parameters.
        settings: for `auto_partition`.
    """

    def __init__(
        self,
        jm: JaxModule,
        call: Call,
        names: Names,
        optimizer: optax.GradientTransformation,
        settings: Mapping[str, Any],
    ) -> None:
        self.home, self.names = jm, names
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._zeros: dict[str, jax.Array] = {}
        batch = batch_of(jm, call)
        loss, dims = functions.loss_with_results(jm), jm.batch_dims
        if jm.programs.first.loss is None:
            loss, batch, dims = self._product_of(jm, batch)
        self.step = rannc_jax.auto_partition(
            loss, optimizer=optimizer, takes=jm.takes, batch_dims=dims, **settings
        )
        held = {
            role: {name: to_jax(tensor.detach(), what=name) for name, tensor in tensors.items()}
            for role, tensors in self._held.items()
        }
        held["model_state"] |= {n: _zeros(v) for n, v in jm.model_state.items() if n.endswith(OFFSET)}
        given = {name: held[name] for name in ("frozen", "model_state") if name in jm.takes}
        rng = jax.random.key(0) if "rng" in jm.takes else None
        self._state = self.step.init(held["params"], batch, rng=rng, **given)
        self._adopt()

    @property
    def _held(self) -> dict[str, dict[str, torch.Tensor]]:
        names, jm = self.names, self.home
        written = {n: t for n, t in {**names.frozen, **names.buffers}.items() if n in jm.model_state}
        frozen = {name: t for name, t in names.frozen.items() if name not in written}
        return {"params": names.params, "frozen": frozen, "model_state": written}

    def _adopt(self) -> None:
        """Make the user's tensors device tensors over the arrays of the state; torch's memory is freed."""
        for tensor, array in self._pairs(self._state):
            become(tensor, Storage(array, tensor.dtype))

    def _pairs(self, state: TrainState) -> Iterator[tuple[torch.Tensor, jax.Array]]:
        """The user's tensors and what a state has for them."""
        for role, tensors in self._held.items():
            arrays: Mapping[str, jax.Array] | None = getattr(state, role)
            if arrays is not None:
                yield from ((tensor, arrays[name]) for name, tensor in tensors.items())

    # --- state --------------------------------------------------------------------------------

    @property
    def state(self) -> TrainState:
        """The state as the user's tensors hold it now."""
        values = {
            role: {**arrays, **{name: array_of_tensor(tensor) for name, tensor in tensors.items()}}
            for role, tensors in self._held.items()
            if (arrays := getattr(self._state, role)) is not None
        }
        return self._state.replace(**values)

    def keep(self, state: TrainState) -> None:
        """Put a new state into the user's tensors."""
        self._state = state
        for tensor, array in self._pairs(state):
            if isinstance(tensor, DeviceTensor) and tensor.storage_.array is not array:
                tensor.storage_.replace(array)

    def gradient(self, name: str) -> jax.Array:
        """The gradient that torch has of a parameter, for the update; zeros, made once, where it has none."""
        grad = self.names.params[name].grad
        if grad is not None:
            return array_of_tensor(grad)
        if name not in self._zeros:
            self._zeros[name] = jax.numpy.zeros_like(self._state.params[name])
        return self._zeros[name]

    # --- running ------------------------------------------------------------------------------

    def evaluate(self, jm: JaxModule, call: Call, rng: Any) -> Outcome:
        """Results alone; buffers stay."""
        self._check(jm)
        run = self._function(
            "results", jm, lambda: self.step.evaluate(functions.results(jm), batch_dims=jm.batch_dims)
        )
        return Outcome(results=run(self.state, batch_of(jm, call), rng=rng))

    def forward(self, jm: JaxModule, call: Call, rng: Any) -> Outcome:
        """Results, and the buffers that the module writes, without gradients."""
        if not jm.model_state:
            return self.evaluate(jm, call, rng)
        self._check(jm)
        product, batch, dims = self._product_of(jm, batch_of(jm, call))
        run = self._function("value", jm, lambda: self.step.value(product, takes=jm.takes, batch_dims=dims))
        out = run(self.state, batch, rng=rng)
        self._written(out.model_state)
        return Outcome(results=out.aux)

    def train(self, jm: JaxModule, call: Call, rng: Any) -> Outcome:
        """Results of a module with a loss, buffers, and gradients of the loss."""
        self._check(jm)
        paths = [path for path, _ in gradient_paths(jm, call)]
        run = self._function(
            "loss", jm, lambda: self._differentiate(functions.loss_with_results(jm), jm, jm.batch_dims)
        )
        out, grads = run(self.state, batch_of(jm, call), wrt_batch=paths, rng=rng)
        self._written(out.model_state)
        grads, inputs = grads if paths else (grads, {})
        used = functions.used_parameters(jm, None)
        kept = {name: grads[name] for name in grads if name in used}
        return Outcome(results=out.aux, gradients=kept, inputs=inputs)

    def backward(
        self, jm: JaxModule, call: Call, rng: Any, state: TrainState, cotangents: Mapping[int, Any]
    ) -> tuple[Gradients, Mapping[str, Any]]:
        """Gradients of the sum of results times cotangents, for parameters and batch leaves.

        Args:
            jm, call, rng: as they were in forward.
            state: of then (buffers matter; parameters are those of now).
            cotangents: by number of the result.
        """
        numbers = tuple(sorted(cotangents))
        dims = {CALL: jm.batch_dims, "cotangents": [self._dims(jm, call)[k] for k in numbers]}
        batch = {CALL: batch_of(jm, call), "cotangents": [cotangents[k] for k in numbers]}
        run = self._function(
            ("product", numbers), jm, lambda: self._differentiate(functions.product(jm, numbers), jm, dims)
        )
        paths = [f"['{CALL}']{path}" for path, _ in gradient_paths(jm, call)]
        now = self.state.replace(model_state=state.model_state)
        _, grads = run(now, batch, wrt_batch=paths, rng=rng)
        grads, inputs = grads if paths else (grads, {})
        used = functions.used_parameters(jm, numbers)
        kept = {name: grads[name] for name in grads if name in used}
        return kept, {path.removeprefix(f"['{CALL}']"): value for path, value in inputs.items()}

    def _differentiate(self, fn: Callable[..., Any], jm: JaxModule, dims: Any) -> Callable[..., Any]:
        return self.step.differentiate(fn, takes=jm.takes, batch_dims=dims)

    def _function(self, kind: Any, jm: JaxModule, make: Callable[[], Any]) -> Callable[..., Any]:
        if jm is self.home and kind == "loss":
            return self.step.value_and_grad
        key = (kind, id(jm))
        if key not in self._functions:
            self._functions[key] = make()
        return self._functions[key]

    def _written(self, model_state: Any) -> None:
        """Keep what forward wrote; what it wrote of parameters goes into them, as in torch."""
        if model_state is None:
            return
        state = self.state.replace(model_state=model_state)
        offsets = {name: value for name, value in model_state.items() if name.endswith(OFFSET)}
        if offsets:
            state = state.replace(
                params=with_offsets({**state.params, **offsets}),
                model_state={**model_state, **{name: _zeros(value) for name, value in offsets.items()}},
            )
        self.keep(state)

    def _check(self, jm: JaxModule) -> None:
        """Refuse what the first call did not show."""
        new = sorted(set(jm.model_state) - set(self.home.model_state))
        if new:
            raise BridgeError(
                message(
                    f"this call writes buffers that the first one did not: {', '.join(new[:5])}.",
                    hint="let the first call with gradients be one in which all of the model trains",
                )
            )

    # --- products -----------------------------------------------------------------------------

    def _product_of(self, jm: JaxModule, batch: Any) -> tuple[Callable[..., Any], Any, Any]:
        """The product with all floating results, a batch of zero cotangents for it, and its dims."""
        shapes = results_shapes(jm, batch)
        numbers = tuple(k for k, s in enumerate(shapes) if jax.numpy.issubdtype(s.dtype, jax.numpy.floating))
        zeros = [jax.numpy.zeros(shapes[k].shape, jax.numpy.float32) for k in numbers]
        every = results_dims(jm, batch, shapes)
        dims = {CALL: jm.batch_dims, "cotangents": [every[k] for k in numbers]}
        return functions.product(jm, numbers), {CALL: batch, "cotangents": zeros}, dims

    def _dims(self, jm: JaxModule, call: Call) -> list[int | None]:
        batch = batch_of(jm, call)
        return results_dims(jm, batch, results_shapes(jm, batch))


def results_shapes(jm: JaxModule, batch: Any) -> list[Any]:
    """Shapes and dtypes of the results for a batch (arrays or shapes)."""
    given = {name: value for name, value in _abstract_state(jm).items() if name in jm.takes}
    fn = functions.results(jm)
    return jax.eval_shape(lambda params, batch, given: fn(params, batch, **given), jm.params, batch, given)


def _abstract_state(jm: JaxModule) -> dict[str, Any]:
    return {"rng": jax.random.key(0), "model_state": jm.model_state, "frozen": jm.frozen}


def results_dims(jm: JaxModule, batch: Any, shapes: Sequence[Any]) -> list[int | None]:
    """Which dim of each result carries the batch rows: the one that grows with them."""
    leaves, tree = jax.tree.flatten(batch)
    dims = jax.tree.leaves(jm.batch_dims, is_leaf=lambda x: x is None)
    if not jm.one_export or len(dims) != len(leaves):
        return [0 if shape.shape else None for shape in shapes]
    doubled = tree.unflatten(
        [
            leaf
            if dim is None
            else jax.ShapeDtypeStruct(
                tuple(2 * n if d == dim else n for d, n in enumerate(leaf.shape)), leaf.dtype
            )
            for leaf, dim in zip(leaves, dims, strict=True)
        ]
    )
    more = results_shapes(jm, doubled)
    return [
        next((d for d, (n, m) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n), None)
        for a, b in zip(shapes, more, strict=True)
    ]


@contextlib.contextmanager
def no_weak_references(module: torch.nn.Module) -> Iterator[None]:
    """Without the weak references that recurrent modules keep of their parameters.

    `swap_tensors` refuses them. The parameters stay the same objects, so the references are made again.
    """
    recurrent = [m for m in module.modules() if isinstance(m, torch.nn.RNNBase)]
    for m in recurrent:
        m._flat_weight_refs = []
    yield
    for m in recurrent:
        m._flat_weight_refs = [None if w is None else weakref.ref(w) for w in m._flat_weights]


def become(tensor: torch.Tensor, storage: Storage) -> None:
    """Turn the user's tensor, in place, into a device tensor; its own memory is freed."""
    if isinstance(tensor, DeviceTensor):
        tensor.storage_.replace(storage.array)
        return
    grad, requires_grad = tensor.grad, tensor.requires_grad
    made: torch.Tensor = DeviceTensor(storage, device=tensor.device)
    if isinstance(tensor, torch.nn.Parameter):
        made = torch.nn.Parameter(made, requires_grad=requires_grad)
    made.__dict__.update({**tensor.__dict__, **made.__dict__})
    try:
        torch.utils.swap_tensors(tensor, made)
    except RuntimeError as error:
        raise BridgeError(
            message(
                "a parameter is in use elsewhere and cannot be moved to the devices.",
                str(error).splitlines()[0],
                hint="wrap the model before anything holds a graph or a weak reference of its parameters",
            )
        ) from error
    tensor.grad = grad


def _zeros(like: Any) -> jax.Array:
    return jax.numpy.zeros(like.shape, like.dtype, device=getattr(like, "sharding", None))


def array_of_tensor(tensor: torch.Tensor) -> Any:
    """The value as a JAX array: where it lies, or a copy of what the host has."""
    return tensor.storage_.array if isinstance(tensor, DeviceTensor) else to_jax(tensor.detach())
