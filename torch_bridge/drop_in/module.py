"""`RaNNCModule`: the one line that is added to a PyTorch training loop."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rannc_jax.plan import Plan
from torch_bridge.drop_in.device_tensor import DeviceTensor, plain
from torch_bridge.drop_in.door import Door
from torch_bridge.drop_in.updates import groups_of
from torch_bridge.errors import BridgeError, message


class RaNNCModule(torch.nn.Module):
    """A module whose forward, backward and optimizer run on the JAX runtime.

    Everything else stays as it was: `loss.backward()`, `clip_grad_norm_`, `optimizer.step()`, schedulers,
    `state_dict`, `train()` and `eval()` do what they do in PyTorch. The first call with gradients exports
    the module, plans, and moves its parameters to the devices.

    Args:
        model: any module that `torch.export` can follow. It stays the user's: its parameters become device
            tensors, in place.
        optimizer: of torch.optim, made from the model's parameters; its `step` is replaced. None: the
            module is evaluated, or an optimizer of another kind reads the gradients.
        mesh: as in `rannc_jax.auto_partition`: a mesh file, a `ClusterSpec`, a `jax.sharding.Mesh`, or
            nothing: all local devices.
        precision: as in `torch_bridge.convert`; `torch.autocast` around a call does the same.
        **settings: constraints and options of `rannc_jax.auto_partition`.

    Raises:
        BridgeError: the model is wrapped already, or the optimizer has none of its parameters; at the first
            call, what torch.export cannot follow.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> model = RaNNCModule(net, optimizer)
        >>> loss = model(torch.ones(8, 4)).square().mean()
        >>> loss.backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        mesh: Any = None,
        precision: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        _check_unwrapped(model)
        if optimizer is not None:
            groups_of(optimizer, dict(model.named_parameters()))
        # Not registered: names, modules and parameters are those of the user's model.
        self.__dict__["module"] = model
        self.__dict__["_door"] = Door(model, optimizer, {"mesh": mesh, **settings}, precision)
        self.__dict__["training"] = model.training
        model.__dict__["_rannc_wrapped"] = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns; tensors lie on the devices."""
        return self._door.call(args, kwargs)

    @property
    def plan(self) -> Plan:
        """The plan.

        Raises:
            BridgeError: before the first call with gradients.
        """
        if not self._door.is_deployed:
            raise BridgeError(
                message("nothing is planned yet.", hint="the first call with gradients enabled plans")
            )
        return self._door.deployment.step.plan

    # --- what a module does ---------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__[name]
        except KeyError:
            return getattr(self.__dict__["module"], name)

    def train(self, mode: bool = True) -> "RaNNCModule":
        self.module.train(mode)
        self.__dict__["training"] = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state_dict with plain tensors on the host."""
        found = self.module.state_dict(*args, **kwargs)
        if not kwargs.get("keep_vars"):
            copies: dict[int, torch.Tensor] = {}
            for name, value in list(found.items()):
                if isinstance(value, DeviceTensor):
                    found[name] = copies.setdefault(id(value.storage_), plain(value))
        return found

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As in torch; values go to the devices. `assign` copies, since parameters stay where they are."""
        return self.module.load_state_dict(state_dict, strict=strict)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self.module.named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Module]]:
        return self.module.named_modules(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, torch.nn.Module]]:
        return self.module.named_children()

    def _apply(self, fn: Any, recurse: bool = True) -> "RaNNCModule":
        """`to`, `cuda`, `float`: nothing moves once the parameters are on the devices."""
        if not self._door.is_deployed:
            self.module._apply(fn, recurse)
        elif fn(torch.zeros(1)).dtype != torch.float32:
            raise BridgeError(
                message(
                    "the dtype of a module on the devices is fixed.",
                    hint="model.half() or .bfloat16() before RaNNCModule, or precision= for mixed precision",
                )
            )
        return self


def _check_unwrapped(model: torch.nn.Module) -> None:
    if isinstance(model, RaNNCModule) or model.__dict__.get("_rannc_wrapped"):
        raise BridgeError(
            message(
                f"this {type(model).__name__} is wrapped already.",
                hint="keep the RaNNCModule that was made first; a copy (copy.deepcopy(model)) can be wrapped",
            )
        )
