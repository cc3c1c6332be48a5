"""Behind a `RaNNCModule`: conversions, the deployment, and torch's view of forward and backward."""

import warnings
from collections.abc import Mapping
from typing import Any

import jax
import optax
import torch

from torch_bridge.drop_in import functions
from torch_bridge.drop_in.calls import Call, Conversions, call_of, gradient_paths, twin_of
from torch_bridge.drop_in.deployment import Deployment, array_of_tensor, no_weak_references
from torch_bridge.drop_in.device_tensor import DeviceTensor, plain
from torch_bridge.drop_in.storage import Storage
from torch_bridge.drop_in.updates import Updates, replace_step, rule_of, warn_of_host
from torch_bridge.module import JaxModule, rebuilt
from torch_bridge.signature import names_of
from torch_bridge.tensors import TORCH_DTYPES


class Door:
    """Runs the calls of one module.

    Args:
        module: the user's.
        optimizer: the user's, or None.
        settings: for `rannc_jax.auto_partition`.
        precision: as in `torch_bridge.convert`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        settings: Mapping[str, Any],
        precision: str | None,
    ) -> None:
        self.module, self.optimizer, self.settings = module, optimizer, settings
        self.precision = precision
        self._conversions: Conversions | None = None
        self._deployed: Deployment | None = None
        self._anchor = torch.zeros((), requires_grad=True)
        self._has_warned = False

    @property
    def is_deployed(self) -> bool:
        return self._deployed is not None

    @property
    def deployment(self) -> Deployment:
        assert self._deployed is not None, "nothing is deployed before the first call with gradients"
        return self._deployed

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module returns; gradients come with it where they are enabled."""
        grad = torch.is_grad_enabled()
        if not grad and not self.is_deployed:
            return self.module(*args, **kwargs)  # nothing is planned before the first training call
        if self._conversions is None:
            self._conversions = Conversions(self.module, twin_of(self.module), self.precision)
        call = call_of(self.module, args, kwargs)
        jm = self._conversions.of(call)
        if self._deployed is None or set(jm.params) != set(self._deployed.home.params):
            self._deploy(jm, call)
        rng = _key() if "rng" in jm.takes else None
        if grad:
            return self._with_gradients(jm, call, rng)
        outcome = self.deployment.forward(jm, call, rng)
        return _together(jm, [DeviceTensor(storage) for storage in _storages(jm, outcome.results)])

    def _with_gradients(self, jm: JaxModule, call: Call, rng: Any) -> Any:
        deployment = self.deployment
        state = deployment.state
        has_loss = jm.programs.first.loss is not None
        outcome = (deployment.train if has_loss else deployment.forward)(jm, call, rng)
        pending = Pending(self, jm, call, rng, state, outcome)
        inputs = [tensor for _, tensor in gradient_paths(jm, call)]
        return _together(jm, _Backward.apply(pending, _storages(jm, outcome.results), self._anchor, *inputs))

    def _deploy(self, jm: JaxModule, call: Call) -> None:
        names = names_of(self.module)
        transformation, updates = optax.identity(), None
        if self.optimizer is not None:
            rule = rule_of(self.optimizer, names.params)
            if rule is None:
                warn_of_host(self.optimizer)
            else:
                updates = Updates(self.optimizer, rule, names.params)
                transformation = updates.transformation()
        with no_weak_references(self.module):
            deployment = self._deployed = Deployment(jm, call, names, transformation, self.settings)
        if updates is not None:
            replace_step(updates, deployment)

    def say_twice(self) -> None:
        """Warn, once, of a module that runs twice."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "other results than the module's own loss are differentiated as well: the module runs twice "
                "for it. One loss, inside or outside of the module, is faster.",
                stacklevel=2,
            )


class Pending:
    """What a forward left for its backward.

    Args:
        owner: who ran it.
        jm, call, rng: what it ran.
        state: before it.
        outcome: what it gave.
    """

    def __init__(self, owner: Door, jm: JaxModule, call: Call, rng: Any, state: Any, outcome: Any) -> None:
        self.owner, self.jm, self.call, self.rng, self.state = owner, jm, call, rng, state
        self.gradients, self.inputs = outcome.gradients, outcome.inputs

    def backward(self, cotangents: tuple[torch.Tensor | None, ...]) -> list[Any]:
        """Add to `.grad` of the parameters; gradients of the inputs, in the order of `gradient_paths`."""
        index = self.jm.programs.first.returned.loss
        given = {k: ct for k, ct in enumerate(cotangents) if ct is not None}
        total: dict[str, Any] = {}
        inputs: dict[str, Any] = {}
        if index is not None and index in given:
            scale = _scale(given.pop(index))
            total = _scaled(self.gradients, scale)
            inputs = _scaled(self.inputs, scale)
        others = {k: array_of_tensor(ct) for k, ct in given.items()}
        if others:
            if index is not None:
                self.owner.say_twice()
            grads, more = self.owner.deployment.backward(self.jm, self.call, self.rng, self.state, others)
            total, inputs = _added(total, grads), _added(inputs, more)
        self._accumulate(total)
        paths = gradient_paths(self.jm, self.call)
        return [None if path not in inputs else _tensor(inputs[path], like) for path, like in paths]

    def _accumulate(self, total: Mapping[str, Any]) -> None:
        parameters = self.owner.deployment.names.params
        held = {name: parameters[name].grad for name in total}
        mine = {name: grad.storage_ for name, grad in held.items() if isinstance(grad, DeviceTensor)}
        sums = _added({name: s.array for name, s in mine.items()}, {name: total[name] for name in mine})
        for name, value in total.items():
            grad = held[name]
            if name in mine:
                mine[name].replace(sums[name])
            elif grad is None:
                parameters[name].grad = _tensor(value, parameters[name])
            else:
                grad.add_(_tensor(value, parameters[name]))  # a plain tensor that the user put there


class _Backward(torch.autograd.Function):
    """Torch's view of the whole module: results that depend on an anchor and on the inputs."""

    @staticmethod
    def forward(ctx: Any, pending: Pending, storages: list[Storage], anchor: Any, *inputs: Any) -> Any:
        ctx.pending = pending
        ctx.save_for_backward(anchor)  # so that a second backward is refused as torch refuses it
        ctx.set_materialize_grads(False)
        results = tuple(DeviceTensor(storage) for storage in storages)
        ctx.mark_non_differentiable(*(r for r in results if not r.is_floating_point()))
        return results

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        ctx.saved_tensors  # noqa: B018  # raises where the graph was freed
        return None, None, None, *ctx.pending.backward(cotangents)


def _key() -> jax.Array:
    """A key from torch's generator, so that torch.manual_seed decides the run."""
    return jax.random.key(int(torch.randint(2**31 - 1, ()).item()))


def _storages(jm: JaxModule, results: Any) -> list[Storage]:
    dtypes = functions.result_dtypes(jm)
    return [
        Storage(array, dtype or TORCH_DTYPES[array.dtype])
        for array, dtype in zip(results, dtypes, strict=True)
    ]


def _together(jm: JaxModule, tensors: Any) -> Any:
    return rebuilt(jm.programs.first, tuple(tensors))


def _tensor(value: Any, like: torch.Tensor) -> torch.Tensor:
    """A gradient like a tensor: on the devices, or on the host where the tensor is."""
    made = DeviceTensor(Storage(value, like.dtype), device=like.device)
    return made if isinstance(like, DeviceTensor) else plain(made)


def _scale(cotangent: torch.Tensor) -> Any:
    return cotangent.item()


def _scaled(arrays: Mapping[str, Any], scale: float) -> dict[str, Any]:
    return dict(arrays) if scale == 1.0 else _each(_times, arrays, scale)


def _added(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    both = {name: value for name, value in first.items() if name in second}
    return {**first, **second, **_each(_plus, both, second)}


def _each(function: Any, arrays: Mapping[str, Any], other: Any) -> dict[str, Any]:
    """`function` of all arrays, one call for those that lie together."""
    together: dict[Any, list[str]] = {}
    for name, array in arrays.items():
        together.setdefault(frozenset(array.devices()), []).append(name)
    out: dict[str, Any] = {}
    for names in together.values():
        more = [other[name] for name in names] if isinstance(other, Mapping) else other
        out.update(zip(names, function([arrays[name] for name in names], more), strict=True))
    return out


@jax.jit
def _times(arrays: Any, factor: Any) -> Any:
    return [array * factor for array in arrays]


@jax.jit
def _plus(arrays: Any, others: Any) -> Any:
    return [array + other for array, other in zip(arrays, others, strict=True)]
