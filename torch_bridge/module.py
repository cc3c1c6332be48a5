"""`JaxModule`: a PyTorch module as pure JAX functions over plain dicts.

Trainable parameters, frozen parameters, buffers that forward writes (`model_state`) and buffers that it
only reads (`constants`) are dicts under torch's names, tied tensors once. Nothing here holds a torch
tensor that a step could change; the module itself is kept to export it at shapes not seen yet.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from torch_bridge.errors import BridgeError, message
from torch_bridge.initialise import Initialiser, Variables
from torch_bridge.inputs import split_batch
from torch_bridge.interpret import draws_random, run
from torch_bridge.offsets import as_offsets, with_offsets, without_offsets
from torch_bridge.programs import Program, Programs
from torch_bridge.signature import Destination, Source
from torch_bridge.tensors import to_jax, to_torch
from torch_bridge.weights import (
    SHARD_BYTES,
    Reader,
    as_held,
    check_have_values,
    filled,
    saved_values,
    sources,
    write,
)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("loss", "aux", "model_state", "weight"),
    meta_fields=(),
)
@dataclass(frozen=True, slots=True)
class ModuleLoss:
    """What the loss function of a module that writes buffers returns.

    Args:
        loss: scalar.
        aux: always None (outputs are not carried along).
        model_state: the new buffers, same structure as the `model_state` the function took.
        weight: always None (the loss is what the module says it is).
    """

    loss: Any
    aux: Any = None
    model_state: Any = None
    weight: Any = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class JaxModule:
    """A converted module; made by `torch_bridge.convert`.

    Args:
        params: trainable parameters, by torch's names.
        frozen: parameters with requires_grad=False.
        model_state: buffers that forward writes, and what it writes of parameters (see `offsets`).
        constants: buffers that it only reads.
        aliases: other name of a tied tensor -> the name it has here.
        batch: the example call: a tuple of args, a dict of kwargs, or {"args": ..., "kwargs": ...}.
        batch_dims: the same structure; the dim that carries the batch rows, or None.
        programs: the exported programs.
        initialiser: makes first values where only shapes are held.

    The leaves of a module that was built without memory are `jax.ShapeDtypeStruct`s: enough to trace, to
    plan and to cut; `init` makes values, `from_state_dict` and `load_safetensors` read them.
    """

    params: dict[str, Any]
    frozen: dict[str, Any]
    model_state: dict[str, Any]
    constants: dict[str, Any]
    aliases: dict[str, str]
    batch: Any
    batch_dims: Any
    programs: Programs
    initialiser: Initialiser

    @property
    def buffers(self) -> dict[str, Any]:
        """`model_state` and `constants` together."""
        return {**self.model_state, **self.constants}

    @property
    def one_export(self) -> bool:
        """Whether one program serves every batch size (else each size is exported when met).

        `programs.reason` says why not. A program with symbolic sizes (`programs.dynamic_reason`) may leave
        some sizes to exports of their own: those that torch says are a case apart.
        """
        return self.programs.reason is None

    def __repr__(self) -> str:
        sizes = [
            sum(math.prod(leaf.shape) for leaf in part.values())
            for part in (self.params, self.frozen, self.buffers)
        ]
        name = type(self.programs.wrapper.module).__name__
        return f"JaxModule({name}: {sizes[0]:,} parameters, {sizes[1]:,} frozen, {sizes[2]:,} in buffers)"

    def apply(
        self,
        params: Mapping[str, Any],
        buffers: Mapping[str, Any],
        *args: Any,
        frozen: Mapping[str, Any] | None = None,
        rng: Any = None,
        **kwargs: Any,
    ) -> tuple[Any, dict[str, Any]]:
        """The module's outputs, in torch's own structure, and the buffers after the call.

        Args:
            params: as `self.params`.
            buffers: as `self.buffers`.
            *args: the module's arguments (arrays; torch tensors are taken too).
            frozen: as `self.frozen`, which stands in if left out.
            rng: PRNG key; needed if the module draws random numbers as exported.
            **kwargs: the module's keywords.

        Raises:
            BridgeError: for arguments of another structure, and for a missing key.
        """
        tensors = [array_of(value) for value in self.programs.wrapper.inputs.bind(args, kwargs)]
        program, rows = self.programs.at(shapes_of(tensors))
        results = program.outputs(Destination.RESULT)[: num_tensors(program)]
        known = {**params, **(self.frozen if frozen is None else frozen), **buffers}
        inputs = graph_inputs(program, known, tensors)
        values = run(program.graph, inputs, (results, program.written), rows=rows, rng=rng)
        outputs = rebuilt(program, values[0])
        return outputs, {**buffers, **new_state(program, values[1], params)}

    def init(self, rng: Any) -> Variables:
        """First values of everything, from the distributions that the module's constructor draws from.

        Values that are held are returned as they are. Pure: under `jax.jit` with `out_shardings` each leaf
        is made where it lives, and what is not used is not made.

        Args:
            rng: PRNG key.

        Raises:
            BridgeError: no initialisation was recorded of a leaf (see `fake_init`), or it cannot be
                replayed; names the leaf and the operator.
        """
        return Variables(
            *(
                {name: make(rng) if callable(make) else make for name, make in part.items()}
                for part in self.initialisers
            )
        )

    @property
    def initialisers(self) -> Variables:
        """Everything that the module holds, with a function of a key in the place of every shape.

        `step.init(rng=key)` calls each on the devices of its leaf; one jitted program serves all leaves that
        are initialised alike.

        Raises:
            BridgeError: as `init`.
        """
        maker = self.initialiser.maker
        parts = (self.params, self.frozen, self.model_state, self.constants)
        return Variables(*({name: maker(name, value) for name, value in part.items()} for part in parts))

    @property
    def takes(self) -> tuple[str, ...]:
        """Which of rng, model_state, frozen the loss function needs."""
        program = self.programs.first
        wanted = (program.loss, program.written)
        needed = {
            "rng": draws_random(program.graph, program.graph.needed(wanted)),
            "model_state": bool(self.model_state),
            "frozen": bool(self.frozen),
        }
        return tuple(name for name, is_needed in needed.items() if is_needed)

    @property
    def loss_fn(self) -> Callable[..., Any]:
        """`loss_fn(params, batch, *, ...)` with exactly those of rng, model_state and frozen it needs.

        It returns the scalar loss, or a `ModuleLoss` if the module writes buffers. Constant buffers are
        closed over.

        Raises:
            BridgeError: if the module returns no scalar loss.
        """
        if self.programs.first.loss is None:
            raise BridgeError(
                message(
                    "the module returns no loss.",
                    'looked for: a scalar floating output, `.loss`, or ["loss"]',
                    hint="pass labels, or convert(module, ..., loss=fn) with fn(outputs, *more_of_the_batch)",
                )
            )
        return self.pure(self.takes, self._loss)

    @property
    def outputs_fn(self) -> Callable[..., Any]:
        """`outputs_fn(params, batch, *, ...)`: what the module returns, in torch's structure.

        It takes the keywords of `loss_fn`, buffers written or not: `step.evaluate` hands a module that was
        converted in eval mode the running statistics of training.
        """

        def outputs(params: Mapping[str, Any], batch: Any, **given: Any) -> Any:
            args, kwargs = split_batch(batch)
            buffers = {**self.buffers, **(given.get("model_state") or {})}
            return self.apply(
                params, buffers, *args, frozen=given.get("frozen"), rng=given.get("rng"), **kwargs
            )[0]

        return self.pure(self.takes, outputs)

    def pure(self, takes: tuple[str, ...], call: Callable[..., Any]) -> Callable[..., Any]:
        """`call` with a signature that says which keywords it takes.

        A module that only reads its buffers takes `model_state` if it is given: values in their place.
        """
        optional = ("model_state",) if self.constants and "model_state" not in takes else ()

        def fn(params: Mapping[str, Any], batch: Any, **given: Any) -> Any:
            if set(given) - set(optional) != set(takes):
                raise TypeError(f"the function takes the keywords {takes}, got {tuple(given)}")
            return call(params, batch, **given)

        parameter = inspect.Parameter
        fn.__name__ = fn.__qualname__ = type(self.programs.wrapper.module).__name__
        fn.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                parameter("params", parameter.POSITIONAL_OR_KEYWORD),
                parameter("batch", parameter.POSITIONAL_OR_KEYWORD),
                *(parameter(name, parameter.KEYWORD_ONLY) for name in takes),
                *(parameter(name, parameter.KEYWORD_ONLY, default=None) for name in optional),
            ]
        )
        fn.takes = takes  # type: ignore[attr-defined]
        return fn

    def _loss(
        self,
        params: Mapping[str, Any],
        batch: Any,
        *,
        rng: Any = None,
        model_state: Mapping[str, Any] | None = None,
        frozen: Mapping[str, Any] | None = None,
    ) -> Any:
        tensors = [array_of(value) for value in self.programs.wrapper.inputs.bind_batch(batch)]
        program, rows = self.programs.at(shapes_of(tensors))
        known = {**params, **(frozen or {}), **self.constants, **(model_state or {})}
        inputs = graph_inputs(program, known, tensors)
        loss, new = run(program.graph, inputs, (program.loss, program.written), rows=rows, rng=rng)
        if not self.model_state:
            return loss
        state = new_state(program, new, params)
        return ModuleLoss(loss=loss, model_state={name: state[name] for name in self.model_state})

    def to_state_dict(
        self,
        state: Any,
        buffers: Mapping[str, Any] | None = None,
        frozen: Mapping[str, Any] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Values as a torch state_dict: torch's names and dtypes, every tied name.

        Args:
            state: params, or a train state (anything with `params`, and perhaps `model_state` and
                `frozen`). Leaves may lie on different devices.
            buffers: buffers that differ from this module's own.
            frozen: frozen parameters that differ from this module's own.

        Example:
            ``torch_module.load_state_dict(jax_module.to_state_dict(state))``
        """
        values = self._values(state, buffers, frozen)
        check_have_values(values)
        names = self.programs.names
        owned: dict[str, torch.Tensor] = {}
        for name, value, dtype in saved_values(names, values):
            owned[names.owner(name)] = to_torch(value, dtype=dtype)
        return {name: owned[names.owner(name)] for name in names.saved}

    def _values(
        self, state: Any, buffers: Mapping[str, Any] | None = None, frozen: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Values by owner name: those of a state, and this module's own for the rest."""
        if not isinstance(state, Mapping):
            buffers = buffers or getattr(state, "model_state", None)
            frozen = frozen or getattr(state, "frozen", None)
            state = state.params
        return with_offsets({**self.frozen, **self.buffers, **(frozen or {}), **(buffers or {}), **state})

    def from_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> "JaxModule":
        """This module with the values of a torch state_dict.

        Raises:
            BridgeError: for missing names, unknown names and shapes that differ, all in one message.
        """
        given = {name: tuple(value.shape) for name, value in state_dict.items()}
        found = sources(given, self.programs.names, "")
        return self._with(found, lambda name, held: as_held(state_dict[name], held, name))

    def load_safetensors(
        self, path: str | Path, state: Any = None, *, shardings: Mapping[str, Any] | None = None
    ) -> Any:
        """Values from safetensors, tensor by tensor, each straight to its devices.

        Args:
            path: a file, a Hugging Face index, or a directory with one of them.
            state: a train state whose params, frozen and model_state are to be replaced, each where it lies;
                None for this module's own values.
            shardings: without a state, where leaves go: name -> `jax.sharding.Sharding`; the default device
                for names left out.

        Returns:
            The state, or this module, with the values.

        Raises:
            BridgeError: as `from_state_dict`; or a buffer that the state does not hold has another value in
                the file than here.
        """
        prefix = getattr(self.programs.wrapper.module, "base_model_prefix", "")
        with Reader(path) as reader:
            given = {name: reader.shape(name) for name in reader.names}
            found = sources(given, self.programs.names, prefix)
            if state is None:
                owners = {name: owner for owner, name in found.items()}
                where = shardings or {}
                return self._with(found, lambda n, held: reader.placed(n, held, where.get(owners[n])))
            for owner in self.constants.keys() & found.keys():
                _check_same(owner, self.constants[owner], reader.whole(found[owner]))

            roles = ("params", "frozen", "model_state")
            parts = {role: getattr(state, role) for role in roles if getattr(state, role) is not None}
            read = {role: filled(part, found, reader.in_place_of) for role, part in parts.items()}
            if "model_state" in read:
                read["model_state"] = without_offsets(read["model_state"], read["params"])
            return state.replace(**read)

    def save_safetensors(self, state: Any, path: str | Path, *, shard_bytes: int = SHARD_BYTES) -> None:
        """Write what the module's state_dict would hold, tied tensors once, one tensor at a time.

        Args:
            state: as in `to_state_dict`.
            path: a file that ends with .safetensors; or a directory, which gets Hugging Face's layout
                (`from_pretrained` reads it beside a config.json).
            shard_bytes: in a directory, the most bytes of one file.
        """
        values = self._values(state)
        check_have_values(values)
        write(path, list(saved_values(self.programs.names, values)), shard_bytes=shard_bytes)

    def _with(self, found: Mapping[str, str], read: Callable[[str, Any], Any]) -> "JaxModule":
        params = filled(self.params, found, read)
        return replace(
            self,
            params=params,
            frozen=filled(self.frozen, found, read),
            model_state=without_offsets(filled(self.model_state, found, read), params),
            constants=filled(self.constants, found, read),
        )


def _check_same(name: str, held: Any, tensor: torch.Tensor) -> None:
    if isinstance(held, jax.ShapeDtypeStruct) or not np.array_equal(held, as_held(tensor, held, name)):
        raise BridgeError(
            message(
                f"the buffer {name}, which forward only reads, has another value in the file.",
                hint="jax_module = jax_module.load_safetensors(path) before the step is made",
            )
        )


def array_of(value: Any) -> Any:
    """An argument as a JAX array; None stays."""
    return value if value is None or isinstance(value, jax.Array) else to_jax(value, what="an argument")


def shapes_of(tensors: list[Any]) -> tuple[tuple[int, ...] | None, ...]:
    """Shapes of arguments; None for those left out."""
    return tuple(None if tensor is None else tuple(tensor.shape) for tensor in tensors)


def graph_inputs(program: Program, known: Mapping[str, Any], tensors: list[Any]) -> list[Any]:
    """Values in the order of the program's inputs: arguments by slot, the rest by name."""
    values: list[Any] = []
    known = with_offsets(known)
    for source, key in program.signature.inputs:
        if source is Source.ARGUMENT:
            values.append(tensors[key])
        elif source is Source.LITERAL:
            values.append(to_jax(program.signature.literals[key], what=key))
        else:
            values.append(known.get(key))
    return values


def new_state(program: Program, values: Sequence[Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """What a call has written, by name, from the values of `program.written`."""
    return as_offsets(dict(zip(program.signature.written, values, strict=True)), params)


def num_tensors(program: Program) -> int:
    """How many tensors the module returns."""
    return sum(leaf is ... for leaf in program.returned.leaves)


def rebuilt(program: Program, tensors: tuple[Any, ...]) -> Any:
    """The module's results in its own structure, with these tensors in their places."""
    remaining = iter(tensors)
    leaves = (next(remaining) if leaf is ... else leaf for leaf in program.returned.leaves)
    return program.returned.structure.unflatten(leaves)
