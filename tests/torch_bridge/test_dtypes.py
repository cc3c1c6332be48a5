"""Dtypes other than float32: whole numbers and their extremes, half precision, 64 bits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import torch_bridge
from tests.torch_bridge.oracle import Calls, assert_same_functions
from tests.torch_bridge.test_operators import seeded
from torch_bridge.tensors import to_jax


def test_whole_numbers_keep_torchs_rules() -> None:
    base = torch.tensor([-2, -1, 0, 1, 2, 3])
    exponent = torch.tensor([-3, -3, 2, -1, -1, 4])
    highest = torch.iinfo(torch.int64).max
    assert_same_functions(
        {
            "power": lambda a, b: a**b,
            "power of one number": lambda a, b: 6**b,
            "digamma at its poles": lambda a, b: torch.digamma(a),
            "ceil of what a float does not hold": lambda a, b: torch.ceil(a * 2**24 + 1),
            "least of what is positive": lambda a, b: torch.where(a > 0, a, highest).amin(),
            "least of a masked tensor": lambda a, b: a.masked_fill(a < 2, highest).amin(),
            "linspace": lambda a, b: torch.linspace(-5, 4, 7, dtype=torch.int64),
            "linspace of one": lambda a, b: torch.linspace(-2, 4, 1, dtype=torch.int64),
            "bool product": lambda a, b: (a > 0).prod(),
            "uint8 wraps": lambda a, b: a.to(torch.uint8) * 200,
            "int8 wraps": lambda a, b: a.to(torch.int8) * 100,
        },
        [base, exponent],
    )


def test_booleans_that_are_added_or_multiplied_are_or_and_and() -> None:
    x = torch.tensor([True, False, False, True])
    source, index = torch.tensor([True, True, False, True]), torch.tensor([1, 1, 3, 3])
    cases: dict[str, Any] = {
        f"scatter_reduce {way}": lambda x, s, i, way=way: x.scatter_reduce(0, i, s, way)
        for way in ("sum", "prod", "amax", "amin")
    }
    assert_same_functions(
        {
            **cases,
            "scatter_add": lambda x, s, i: x.scatter_add(0, i, s),
            "index_add": lambda x, s, i: x.index_add(0, i, s),
            "index_put": lambda x, s, i: x.index_put((i,), s, accumulate=True),
            "put": lambda x, s, i: x.put(i, s, accumulate=True),
            "kron": lambda x, s, i: torch.kron(x, s),
            "sign": lambda x, s, i: torch.sign(x),
        },
        [x, source, index],
    )


def test_extremes_of_int64_stand_for_those_of_int32_and_other_large_values_are_errors() -> None:
    extremes = torch.tensor([torch.iinfo(torch.int64).min, -1, torch.iinfo(torch.int64).max])
    np.testing.assert_array_equal(to_jax(extremes), [-(2**31), -1, 2**31 - 1])
    with pytest.raises(torch_bridge.BridgeError, match=r"do not fit into int32\.\n  range: 1099511627776 to"):
        to_jax(torch.tensor([1, 2**40, torch.iinfo(torch.int64).max]))
    module = Calls([lambda x: torch.where(x > 0, x, 2**40)])
    x = torch.arange(3)
    with pytest.raises((torch_bridge.BridgeError, OverflowError)):
        torch_bridge.convert(module, (x,)).apply({}, {}, jnp.arange(3))


def test_special_functions_of_half_precision_are_computed_in_single() -> None:
    (x,) = seeded((64,))
    cases: dict[str, Any] = {
        "gammainc": lambda x: torch.special.gammainc(x.abs() + 0.5, x.abs()),
        "digamma": lambda x: torch.digamma(x.abs() + 0.5),
        "polygamma": lambda x: torch.polygamma(1, x.abs() + 0.5),
        "lgamma": lambda x: torch.lgamma(x.abs() + 0.5),
        "erfinv": lambda x: torch.erfinv(x.clamp(-0.9, 0.9)),
        "i0": lambda x: torch.special.i0(x),
        "i1e": lambda x: torch.special.i1e(x),
        "cumprod": lambda x: torch.cumprod(x.abs().clamp(0.9, 1.1), 0),
    }
    # One rounding of bfloat16 is 2**-8 of the value.
    assert_same_functions(
        {name: lambda x, call=call: call(x.detach().bfloat16()) for name, call in cases.items()},
        [x],
        tolerance=2**-7,
    )


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_half_precision_are_summed_in_single(mode: str) -> None:
    (weight,) = seeded((300, 4))
    index = torch.arange(300).reshape(2, 150)
    assert_same_functions(
        {
            mode: lambda w, i: torch.nn.functional.embedding_bag(
                i, (w.detach() + 1).bfloat16(), mode=mode
            ).float()
        },
        [weight, index],
        tolerance=2**-7,
    )


def test_float64_that_is_asked_for_needs_64_bit_jax_and_has_it_then() -> None:
    module, (x,) = Calls([lambda x: x.softmax(-1, dtype=torch.float64)]), seeded((2, 3))
    with pytest.raises(torch_bridge.BridgeError, match=r"float64 needs 64-bit JAX\.[\s\S]*jax_enable_x64"):
        torch_bridge.convert(module, (x,))
    with jax.enable_x64(True):
        converted = torch_bridge.convert(module, (x,))
        (out,), _ = converted.apply({}, {}, to_jax(x))
    assert out.dtype == np.float64
    np.testing.assert_allclose(out, module(x)[0], rtol=1e-12)


def test_the_next_float_moves_as_the_first_argument_does() -> None:
    a, b = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 1.0, 3.0])
    assert_same_functions({"nextafter": torch.nextafter}, [a, b])
