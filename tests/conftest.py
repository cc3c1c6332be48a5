"""What every test stands on: eight fake CPU devices, quick compiles, one compilation cache.

The environment is set before jax is imported. A value that is already there wins, so one command can
run the same tests with other settings (`XLA_FLAGS= pytest ...` takes XLA's default flags,
`JAX_PLATFORMS=cuda pytest -m gpu` a GPU).

Everything under tests/torch_bridge needs PyTorch and is left out where it is not installed; elsewhere a
test that needs it carries the mark `torch` and imports it inside.
"""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

# Tests compile many programs that run once: optimising them costs more than it saves.
QUICK_COMPILES = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("XLA_FLAGS", QUICK_COMPILES)
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

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
