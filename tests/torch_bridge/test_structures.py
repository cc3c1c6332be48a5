"""What a module may take and return: every structure, kept as it is."""

import collections
import dataclasses
import enum
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from torch_bridge import BridgeError, convert
from torch_bridge.tensors import to_jax


class Pair(NamedTuple):
    a: Any
    b: Any = None


@dataclasses.dataclass
class Record:
    """Known to neither torch nor JAX."""

    a: Any
    b: Any = None
    n: int = 3


@dataclasses.dataclass
class Known:
    a: Any
    b: Any = None


torch.export.register_dataclass(Known, serialized_type_name="tests.Known")


class Mode(enum.Enum):
    DOUBLE = 2
    TRIPLE = 3


class Holder:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("offset", torch.ones(3))

    def forward(
        self, x: Any, tree: Any, record: Any, known: Any, *rest: Any, mode: Any, flag: Any = True, **more: Any
    ) -> Any:
        y = self.linear(x) * mode.value if flag else x
        return {
            "pair": Pair(y, (tree["k"][0], None)),
            "record": Record(y + record.a, known.b, record.n),
            "known": Known(known.a * 2, [Record(y)]),
            "ordered": collections.OrderedDict(z=more["z"], a=y),
            "same": (y, y, [x, self.linear.weight, self.offset]),
            "constants": (x.shape[1], 2.5, True, "text", None, torch.float16, mode, (), {}, []),
            "rest": rest,
        }


def _tensors(rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x, y = torch.randn(rows, 3), torch.randn(rows, 3)
    args = (x, {"k": [x, None]}, Record(x, None, 7), Known(x, y), y, 4)
    return args, {"mode": Mode.TRIPLE, "z": y}


def _arrays(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: to_jax(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def _same(got: Any, want: Any, path: str = "") -> None:
    if isinstance(want, torch.Tensor):
        np.testing.assert_allclose(got, want.detach(), rtol=1e-5, atol=1e-6, err_msg=path)
        return
    assert type(got) is type(want), path
    if dataclasses.is_dataclass(want):
        want = {f.name: getattr(want, f.name) for f in dataclasses.fields(want)}
        got = {name: getattr(got, name) for name in want}
    if isinstance(want, dict):
        assert list(got) == list(want), path
        for key in want:
            _same(got[key], want[key], f"{path}/{key}")
    elif isinstance(want, tuple | list):
        assert len(got) == len(want), path
        for i, item in enumerate(want):
            _same(got[i], item, f"{path}/{i}")
    else:
        assert got == want, path


def test_every_structure_comes_back_as_torch_returns_it_for_any_batch() -> None:
    module = Everything()
    args, kwargs = _tensors(4)
    converted = convert(module, args, kwargs)
    assert converted.one_export
    for rows in (2, 5):
        args, kwargs = _tensors(rows)
        got, _ = converted.apply(converted.params, converted.buffers, *_arrays(args), **_arrays(kwargs))
        _same(got, module(*args, **kwargs))


def test_the_same_tensor_in_two_places_of_the_example_is_two_inputs() -> None:
    class Differs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: Any, y: Any, z: Any) -> Any:
            return x - y * self.scale + z

    module, x = Differs(), torch.randn(4, 3)
    converted = convert(module, (x, x, module.scale.detach()))
    assert converted.one_export
    got, _ = converted.apply(converted.params, {}, jnp.full((2, 3), 5.0), jnp.full((2, 3), 3.0), jnp.zeros(3))
    np.testing.assert_array_equal(got, 2.0)
    shared = convert(module, (x, torch.randn(4, 3), module.scale))
    got, _ = shared.apply(shared.params, {}, jnp.full((2, 3), 5.0), jnp.full((2, 3), 3.0), jnp.full(3, 9.0))
    np.testing.assert_array_equal(got, 11.0)


def test_outputs_in_a_dataclass_pass_through_jit() -> None:
    class Makes(nn.Module):
        def forward(self, x: Any) -> Any:
            return Record(x * 2, None, 1)

    converted = convert(Makes(), (torch.ones(2, 3),))
    got = jax.jit(lambda x: converted.apply({}, {}, x)[0])(jnp.ones((2, 3)))
    assert isinstance(got, Record)
    np.testing.assert_array_equal(got.a, 2.0)


@pytest.mark.parametrize("what", [Holder(torch.ones(3)), nn.Linear(3, 3)])
def test_tensors_hidden_in_an_argument_are_refused_not_fixed(what: Any) -> None:
    class Takes(nn.Module):
        def forward(self, x: Any, hidden: Any) -> Any:
            return x

    with pytest.raises(BridgeError, match=r"args\[1\] is a (Holder|Linear) that holds tensors"):
        convert(Takes(), (torch.ones(2, 3), what))


@pytest.mark.parametrize("shape", [(), (3,)])
def test_inputs_without_a_batch_dim_work(shape: tuple[int, ...]) -> None:
    module = Everything()
    x = torch.randn(shape)

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = module.linear

        def forward(self, x: Any) -> Any:
            return self.linear(x.expand(3)), x

    converted = convert(Plain(), (x,))
    for got, want in zip(converted.apply(converted.params, {}, to_jax(x))[0], Plain()(x), strict=True):
        np.testing.assert_allclose(got, want.detach(), rtol=1e-5)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: convert(lambda x: x, (torch.ones(2),)), "expected a torch.nn.Module"),  # type: ignore[arg-type]
        (lambda: convert(nn.ReLU(), torch.ones(2, 2)), "expected a tuple"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_call_of_convert_says_what_it_takes(call: Any, words: str) -> None:
    with pytest.raises(BridgeError, match=words):
        call()


class Plain:
    def __init__(self, value: Any, more: Any) -> None:
        self.value, self.more, self.name = value, more, "plain"


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Items(dict[str, Any]):
    pass


class Parts(list[Any]):
    pass


class MakesObjects(nn.Module):
    def forward(self, x: Any) -> Any:
        return Plain(x + 1, [Slotted(x * 2), Items(a=x * 3, b=None), Parts([x, 1])]), types.SimpleNamespace(
            y=x
        )


def test_objects_of_plain_classes_come_back_with_their_attributes() -> None:
    converted = convert(MakesObjects(), (torch.ones(2, 3),))
    assert converted.one_export
    plain, space = jax.jit(lambda x: converted.apply({}, {}, x)[0])(jnp.ones((4, 3)))
    slotted, items, parts = plain.more
    assert (type(plain), type(slotted), type(items), type(parts)) == (Plain, Slotted, Items, Parts)
    assert plain.name == "plain"
    assert items["b"] is None
    for got, want in ((plain.value, 2), (slotted.value, 2), (items["a"], 3), (parts[0], 1), (space.y, 1)):
        np.testing.assert_array_equal(got, np.full((4, 3), want))


class Cycle(nn.Module):
    def forward(self, x: Any) -> Any:
        made = Plain(x, None)
        made.more = made
        return made


class ReturnsModule(nn.Module):
    def forward(self, x: Any) -> Any:
        return x, nn.ReLU()


@pytest.mark.parametrize("make, why", [(Cycle, "holds itself"), (ReturnsModule, "returns a ReLU")])
def test_what_cannot_be_returned_is_refused_and_never_left_out(make: Any, why: str) -> None:
    with pytest.raises(BridgeError, match=why):
        convert(make(), (torch.ones(2, 3),))
