"""Importing this sets eight fake CPU devices, quick compiles and one compilation cache.

It comes before the first import of jax. A value that is already there wins, so one command can run the
same tests with other settings (`XLA_FLAGS= pytest ...` takes XLA's default flags, `JAX_PLATFORMS=cuda
pytest -m gpu` a GPU). It needs no test tools: commands under tests/ that run without pytest start with it.
"""

import os
from pathlib import Path

# Tests compile many programs that run once: optimising them costs more than it saves.
QUICK_COMPILES = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("XLA_FLAGS", QUICK_COMPILES)
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
