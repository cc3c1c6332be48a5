"""PyTorch modules in JAX, unchanged: `convert(module, args)` and what comes back, a `JaxModule`.

Importing this package changes nothing in torch: no device is registered, nothing is patched. Whoever only
converts does not import rannc_jax; `RaNNCModule`, which trains on it, is imported when it is first named.
"""

import importlib
from typing import TYPE_CHECKING, Any

from torch_bridge.convert import convert as convert
from torch_bridge.coverage import Coverage as Coverage
from torch_bridge.coverage import coverage as coverage
from torch_bridge.errors import BridgeError as BridgeError
from torch_bridge.errors import UnsupportedOpError as UnsupportedOpError
from torch_bridge.initialise import Variables as Variables
from torch_bridge.journal import fake_init as fake_init
from torch_bridge.lowerings.registry import register_lowering as register_lowering
from torch_bridge.module import JaxModule as JaxModule
from torch_bridge.module import ModuleLoss as ModuleLoss

if TYPE_CHECKING:
    from torch_bridge.drop_in import RaNNCModule as RaNNCModule


def __getattr__(name: str) -> Any:
    if name == "RaNNCModule":
        return importlib.import_module("torch_bridge.drop_in").RaNNCModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), "RaNNCModule"]
