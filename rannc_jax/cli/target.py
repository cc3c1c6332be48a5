"""What `plan` plans: an object that a module or a Python file holds, and constraints as text.

rannc-jax plan train.py:problem --mesh mesh.toml --cuts layer.4 --replicas 2,auto --remat head=save_all
"""

import argparse
import importlib
import importlib.util
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import optax

from rannc_jax.api import make_plan
from rannc_jax.contract import TrainableModel
from rannc_jax.errors import ConfigError, message
from rannc_jax.progress import StderrProgress

_FORMS = (
    "an object with loss_fn, params and batch, a dict of make_plan's arguments (fn, params, batch, ...), or "
    "a function without arguments that returns one"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `plan` takes."""
    parser.add_argument(
        "target", nargs="?", help="package.module:name or file.py:name; see docs/how-to/plan.md"
    )
    parser.add_argument("--mesh", help="a mesh file; the devices that are here without it")
    parser.add_argument(
        "--optimizer", default=None, help='of optax, for its state: "adamw" (default), "none"'
    )
    parser.add_argument("--out", help="save the plan there")
    parser.add_argument("--explain", action="store_true", help="say why the plan is as it is")
    parser.add_argument("--everything", action="store_true", help="plan what is not run yet, too")
    fixed = parser.add_argument_group("constraints; what is left out is searched")
    fixed.add_argument("--num-stages", type=int)
    fixed.add_argument("--num-microbatches", type=number_or_range, metavar="N or N-M")
    fixed.add_argument("--cuts", type=cuts, metavar="MODULE,...")
    fixed.add_argument("--schedule")
    for name, read in (("replicas", int), ("remat", str), ("sharding", str), ("offload", yes_or_no)):
        fixed.add_argument(f"--{name}", type=by_stage(read), metavar="BY_STAGE")
    fixed.add_argument("--memory-limit-gib", type=float)
    fixed.add_argument("--memory-margin", type=float)
    graph = parser.add_argument_group("in the place of a model")
    graph.add_argument("--graph", help="a JSON file with nodes and edges")
    graph.add_argument("--devices", type=int, help="how many there are")
    graph.add_argument("--objective", default="max_load", help="max_load (default) or step_time")
    graph.add_argument("--microbatches", type=int, default=None, help="for step_time; default 4 a device")
    graph.add_argument("--json", action="store_true", help="print the answer as JSON")


_CONSTRAINTS = (
    "num_stages", "num_microbatches", "cuts", "schedule", "replicas", "remat", "sharding", "offload",
    "memory_margin",
)  # fmt: skip


def main(options: argparse.Namespace) -> int:
    """Plan a model, print the plan, and save it where that is asked for.

    Raises:
        RanncError: there is no such model, or it cannot be planned so.
    """
    if options.target is None:
        raise ConfigError(message("nothing to plan.", hint="package.module:name, file.py:name, or --graph."))
    given = load_target(options.target)
    if options.optimizer is not None or "optimizer" not in given:
        given["optimizer"] = optimizer_named(options.optimizer or "adamw")
    if options.mesh is not None:
        given["mesh"] = options.mesh
    given |= {name: getattr(options, name) for name in _CONSTRAINTS if getattr(options, name) is not None}
    if options.memory_limit_gib is not None:
        given["memory_limit_bytes"] = int(options.memory_limit_gib * 2**30)
    plan = make_plan(**given, runnable=not options.everything, progress=StderrProgress())
    print(plan.explain() if options.explain else plan)
    if options.out is not None:
        plan.save(options.out)
    return 0


def load_target(text: str) -> dict[str, Any]:
    """The arguments of `make_plan` that a target stands for.

    Args:
        text: "package.module:name" or "file.py:name".

    Raises:
        ConfigError: it is not there, or is nothing that can be planned.
    """
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise ConfigError(
            message(f"{text!r} names no model.", hint='"package.module:name" or "file.py:name".')
        )
    module = _module(place)
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(message(f"{place} has no {name!r}.", hint=f"{_FORMS}."))
        found = getattr(found, part)
    if callable(found) and not isinstance(found, TrainableModel):
        found = found()
    if isinstance(found, Mapping) and "fn" in found:
        return dict(found)
    if isinstance(found, TrainableModel):
        return {"fn": found}
    raise ConfigError(
        message(f"{text} is {type(found).__name__}, which cannot be planned.", hint=f"{_FORMS}.")
    )


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise ConfigError(message(f"there is no module {error.name!r}.", hint="file.py:name.")) from error
    if not Path(place).is_file():
        raise ConfigError(message(f"there is no file {place}."))
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def optimizer_named(name: str) -> optax.GradientTransformation | None:
    """An optimizer of optax, of which only the size of its state matters; None for "none".

    Raises:
        ConfigError: optax has none that is called so and takes a learning rate.
    """
    if name == "none":
        return None
    make = getattr(optax, name, None)
    try:
        made = make(1e-3) if callable(make) else None
    except (TypeError, ValueError):
        made = None
    if not isinstance(made, optax.GradientTransformation):
        raise ConfigError(
            message(f"optax has no optimizer {name!r}.", hint='"adamw", "adam", "sgd", ..., or "none".')
        )
    return made


def by_stage(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser of settings by stage: "2", "2,auto,1", or "0=2,encoder.layer.3=1"."""

    def parse(text: str) -> Any:
        items = [item.strip() for item in text.split(",")]
        if all("=" in item for item in items):
            pairs = [item.rpartition("=") for item in items]
            return {_place(key): _or_auto(read, value) for key, _, value in pairs}
        if len(items) == 1:
            return _or_auto(read, items[0])
        return tuple(_or_auto(read, item) for item in items)

    return parse


def number_or_range(text: str) -> Any:
    """A parser of 8 and of 4-16."""
    least, dash, most = text.partition("-")
    return (int(least), int(most)) if dash else int(least)


def cuts(text: str) -> tuple[str | int, ...]:
    """A parser of encoder.layer.4,head; numbers are those of blocks."""
    return tuple(_place(item.strip()) for item in text.split(","))


def yes_or_no(text: str) -> bool:
    """A parser of yes and no."""
    words = {"yes": True, "no": False}
    if text not in words:
        raise argparse.ArgumentTypeError(f"{text!r} is neither yes nor no")
    return words[text]


def _place(text: str) -> str | int:
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def _or_auto(read: Callable[[str], Any], text: str) -> Any:
    return text if text == "auto" else read(text)
