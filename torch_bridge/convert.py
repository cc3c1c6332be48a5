"""The way in: a torch module and an example call become a `JaxModule`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import UninitializedParameter

from torch_bridge import lowerings  # noqa: F401 - fills the registry
from torch_bridge.errors import BridgeError, message
from torch_bridge.export import Exportable
from torch_bridge.initialise import Initialiser, held
from torch_bridge.inputs import describe
from torch_bridge.journal import stand_ins
from torch_bridge.module import JaxModule
from torch_bridge.offsets import OFFSET, offset_like
from torch_bridge.precision import precision_of
from torch_bridge.programs import make_programs
from torch_bridge.signature import names_of
from torch_bridge.tensors import to_jax


def convert(
    module: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[..., Any] | None = None,
    precision: Any = None,
    batch_dims: Any = None,
) -> JaxModule:
    """Turn a PyTorch module into pure JAX functions, as it stands in train or eval mode.

    One conversion serves every batch size; another sequence length is exported when it is first met.
    The module is not changed, and later changes to its values are not seen. It may have no values at all
    (built under `fake_init`, `torch.device("meta")` or a `FakeTensorMode`): then the leaves of the result
    are `jax.ShapeDtypeStruct`s, except buffers that its constructor computes, if it was built under
    `fake_init` or is a Hugging Face model.

    Args:
        module: any module that `torch.export` can follow.
        args: example positional arguments; batches of two rows or more are best.
        kwargs: example keyword arguments.
        loss: a torch callable on (outputs, *arguments that `forward` does not take). Without it the loss
            is the module's scalar output, or its `.loss`.
        precision: "bf16" or "fp16" for what `torch.autocast` does on a GPU (see `precision`): parameters
            and gradients stay float32. None: the module's own dtypes.
        batch_dims: structure of the call with the dim of each tensor that carries the batch rows, or
            None; found by itself if left out.

    Raises:
        BridgeError: for what torch.export cannot follow, with the source line.
        UnsupportedOpError: for operators without a lowering.

    Example:
        >>> import torch, jax
        >>> jax_module = convert(torch.nn.Linear(3, 2), (torch.ones(4, 3),))
        >>> out, _ = jax_module.apply(jax_module.params, jax_module.buffers, jax.numpy.ones((7, 3)))
        >>> out.shape
        (7, 2)
    """
    _check_call(module, args)
    inputs = describe(module, tuple(args), dict(kwargs or {}), loss)
    names = names_of(module)
    wrapper = Exportable(module, inputs, loss, precision_of(precision))
    stated = None if batch_dims is None else tuple(inputs.bind_batch(batch_dims, partial=True))
    programs = make_programs(wrapper, names, inputs.tensors, stated)
    written = set(programs.first.signature.written)

    recorded = stand_ins(module)

    def known(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: recorded.get(id(tensor), tensor) for name, tensor in tensors.items()}

    def arrays(tensors: Mapping[str, torch.Tensor], *, computed: bool = False) -> dict[str, Any]:
        return {name: held(name, tensor, computed=computed) for name, tensor in known(tensors).items()}

    params, frozen, buffers = arrays(names.params), arrays(names.frozen), arrays(names.buffers, computed=True)
    offsets = {n + OFFSET: offset_like(v) for n, v in params.items() if n + OFFSET in written}
    state = {**buffers, **frozen, **offsets}
    return JaxModule(
        params=params,
        frozen={name: value for name, value in frozen.items() if name not in written},
        model_state={name: value for name, value in state.items() if name in written},
        constants={name: value for name, value in buffers.items() if name not in written},
        aliases=dict(names.aliases),
        batch=inputs.batch(
            [to_jax(t, what=path) for t, path in zip(inputs.tensors, inputs.paths, strict=True)]
        ),
        batch_dims=inputs.batch(programs.dims),
        programs=programs,
        initialiser=Initialiser(known({**names.params, **names.frozen, **names.buffers})),
    )


def _check_call(module: Any, args: Any) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise BridgeError(
            message("a TorchScript module cannot be exported.", hint="pass the nn.Module itself")
        )
    if not isinstance(module, torch.nn.Module):
        raise BridgeError(message(f"got a {type(module).__qualname__}, expected a torch.nn.Module."))
    lazy = [name for name, p in module.named_parameters() if isinstance(p, UninitializedParameter)]
    if lazy:
        raise BridgeError(
            message(
                f"the module has lazy parameters without a shape: {', '.join(lazy[:5])}.",
                hint="call it once, module(*args), before convert",
            )
        )
    if not isinstance(args, tuple | list):
        raise BridgeError(
            message(f"args is a {type(args).__qualname__}, expected a tuple.", hint="convert(module, (x,))")
        )
