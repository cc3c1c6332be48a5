"""`import rannc_jax` is harmless: no device, no environment variable, no optional package."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
# flax is a dependency, but only `interop` needs it, and loading it takes longer than everything else.
ONLY_WHEN_ASKED = (
    "torch", "torch_bridge", "transformers", "safetensors", "orbax", "typer", "rich", "flax", "equinox",
)  # fmt: skip

PROBE = """
import json, os, sys
before = dict(os.environ)
{statement}
import jax.extend.backend, jax.numpy, jax
loaded = sorted({{name.partition(".")[0] for name in sys.modules}})
# A setting that only a backend which has not started accepts: it raises once a device was touched.
try:
    jax.config.update("jax_num_cpu_devices", 3)
    untouched = len(jax.devices()) == 3
except RuntimeError:
    untouched = False
print(json.dumps([loaded, dict(os.environ) == before, untouched]))
"""


def look_after(statement: str) -> tuple[set[str], bool, bool]:
    """Run `statement` in a fresh Python: loaded packages, environment unchanged, no device touched."""
    environment: dict[str, Any] = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    probe = [sys.executable, "-c", PROBE.format(statement=statement)]
    done = subprocess.run(probe, env=environment, capture_output=True, text=True, check=True, timeout=300)
    loaded, same_environment, untouched = json.loads(done.stdout)
    return set(loaded), same_environment, untouched


@pytest.mark.parametrize("module", ["rannc_jax", "rannc_jax.config", "rannc_jax.plan", "rannc_jax.cli"])
def test_importing_touches_nothing(module: str) -> None:
    loaded, same_environment, untouched = look_after(f"import {module}")
    assert module.partition(".")[0] in loaded
    assert loaded.isdisjoint(ONLY_WHEN_ASKED)
    assert same_environment
    assert untouched


def test_the_probe_would_notice() -> None:
    loaded, same_environment, untouched = look_after(
        "import os, flax, jax; os.environ['A_NEW_ONE'] = '1'; jax.devices()"
    )
    assert not loaded.isdisjoint(ONLY_WHEN_ASKED)
    assert not same_environment
    assert not untouched
