"""What every test stands on: eight fake CPU devices, quick compiles, one compilation cache.

Everything under tests/torch_bridge needs PyTorch and is left out where it is not installed; elsewhere a
test that needs it carries the mark `torch` and imports it inside.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import tests.environment  # noqa: F401 - before jax

import jax  # isort: skip
import pytest
from hypothesis import settings

# A first call may compile; a test that fails on CI must fail again on a desk.
settings.register_profile("house", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("house")

HAS_TORCH = importlib.util.find_spec("torch") is not None

# Rooms whose own code must not lean on implicit promotion. Elsewhere optax's Adam runs, which does
# (decay ** count mixes float and int32).
STRICT_ROOMS = ("ir", "cost", "partition", "schedule", "config")


@pytest.fixture(autouse=True)
def _strict_promotion(request: pytest.FixtureRequest) -> Iterator[None]:
    room = Path(str(request.node.path)).parent.name
    with jax.numpy_dtype_promotion("strict" if room in STRICT_ROOMS else "standard"):
        yield


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if collection_path.name == "torch_bridge" and not HAS_TORCH else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons = {}
    if not HAS_TORCH:
        reasons["torch"] = "needs PyTorch, which is not installed"
    if any(item.get_closest_marker("gpu") for item in items) and jax.default_backend() != "gpu":
        reasons["gpu"] = f"needs a GPU, found {jax.default_backend()!r}"
    for item in items:
        for mark, reason in reasons.items():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))
