"""Every example in a docstring runs and prints what it says."""

import doctest
import importlib
import pkgutil

import pytest

import rannc_jax

MODULES = sorted(info.name for info in pkgutil.walk_packages(rannc_jax.__path__, "rannc_jax."))


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_examples_in_docstrings_are_true(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder()
    assert any(test.examples for test in finder.find(importlib.import_module("rannc_jax.contract")))
