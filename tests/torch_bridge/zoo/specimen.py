"""A specimen: how to build a network and what to call it with, at any number of rows.

Specimens register themselves under their name when their file is imported (`catalogue` imports all).
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Batch = tuple[Any, ...] | dict[str, Any]
# What is called a rate of dropout in a configuration; skipping whole layers is a Python branch instead.
_DROPS = "drop"
_LAYER_DROPS = ("layerdrop", "layer_drop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Specimen:
    """A network of the zoo.

    Args:
        name: unique.
        group: the file it is from.
        make: the module with this rate of dropout, in training mode.
        batch: args or kwargs of the call, at this many rows.
        listed: whether the project promises it by name.
        random: draws random numbers in training although dropout is off: values cannot equal torch's.
        drops: whether `make` makes use of the rate.
        modes: "eval", "train", or both.
        batch_dims: as `convert` takes it; None to find them.
        input_gradients: whether gradients with respect to floating inputs are compared, too.
    """

    name: str
    group: str
    make: Callable[[float], nn.Module]
    batch: Callable[[int], Batch]
    listed: bool = False
    random: bool = False
    drops: bool = True
    modes: tuple[str, ...] = ("eval", "train")
    batch_dims: Any = None
    input_gradients: bool = True


SPECIMENS: dict[str, Specimen] = {}


def add(specimen: Specimen) -> None:
    """Register a specimen."""
    assert specimen.name not in SPECIMENS, f"two specimens are called {specimen.name}"
    SPECIMENS[specimen.name] = specimen


def network(batch: Callable[[int], Batch], **options: Any) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Register a module class that is built without arguments, or with the rate of dropout if it drops."""

    def register(cls: type[nn.Module]) -> type[nn.Module]:
        add(
            Specimen(
                name=options.pop("name", cls.__name__.lower()),
                group=cls.__module__.rsplit(".", 1)[-1],
                make=lambda dropout: cls(dropout) if options.get("drops") else cls(),
                batch=batch,
                **{"drops": False, **options},
            )
        )
        return cls

    return register


def hugging_face(
    name: str,
    architecture: str,
    batch: Callable[[int], Batch],
    *,
    group: str,
    listed: bool = False,
    adjust: Callable[[Any], None] | None = None,
    modes: tuple[str, ...] = ("eval", "train"),
    random: bool = False,
    input_gradients: bool = True,
    **sizes: Any,
) -> None:
    """Register a class of transformers with a small configuration.

    Args:
        name: of the specimen.
        architecture: class name in transformers.
        batch: keyword arguments at a number of rows.
        group: the file it is from.
        listed: whether the project promises it by name.
        adjust: last word on the configuration.
        modes: "eval", "train", or both.
        random: draws random numbers in training although dropout is off.
        input_gradients: see `Specimen`.
        **sizes: fields of its configuration class.
    """

    def make(dropout: float) -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()
        cls = getattr(transformers, architecture)
        config = cls.config_class(**sizes)
        _set_dropout(config, dropout)
        if adjust is not None:
            adjust(config)
        return cls(config)

    add(
        Specimen(
            name=name,
            group=group,
            make=make,
            batch=batch,
            listed=listed,
            modes=modes,
            random=random,
            input_gradients=input_gradients,
        )
    )


def _set_dropout(config: Any, rate: float) -> None:
    for key, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            _set_dropout(value, rate)
        elif any(word in key for word in _LAYER_DROPS):
            setattr(config, key, 0.0)
        elif _DROPS in key and isinstance(value, float | int) and not isinstance(value, bool):
            with contextlib.suppress(TypeError, ValueError):  # some are checked against others
                setattr(config, key, type(value)(rate))


def build(specimen: Specimen, *, dropout: float = 0.0, seed: int = 0) -> nn.Module:
    """The module with reproducible weights, in training mode.

    Fresh networks have zero biases and unit scales, where no deviation is relative: floats are moved
    off them a little.
    """
    torch.manual_seed(seed)
    module = specimen.make(dropout).train()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point() and not isinstance(parameter, nn.UninitializedParameter):
                parameter += 0.05 * torch.randn_like(parameter)
    return module


def split(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments."""
    return ((), dict(batch)) if isinstance(batch, Mapping) else (tuple(batch), {})


def integers(below: int, *shape: int, least: int = 0) -> torch.Tensor:
    """Reproducible integers in [least, below)."""
    generator = torch.Generator().manual_seed(sum(shape) + below)
    return torch.randint(least, below, shape, generator=generator)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Reproducible numbers of a normal distribution."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def images(
    rows: int, size: int = 32, channels: int = 3, classes: int | None = 5, **more: Any
) -> dict[str, Any]:
    """Pixels and, if there are classes, labels."""
    batch = {"pixel_values": normal(rows, channels, size, size), **more}
    return batch if classes is None else {**batch, "labels": torch.arange(rows) % classes}


def tokens(rows: int, length: int = 8, vocabulary: int = 50) -> dict[str, Any]:
    """Token ids of uneven lengths with labels."""
    ids = integers(vocabulary, rows, length, least=3)
    mask = torch.ones_like(ids)
    mask[0, length - 3 :] = 0
    labels = torch.where(mask.bool(), ids, -100)
    labels[:, 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
