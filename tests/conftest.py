"""Tests run on 8 fake CPU devices, compiled without optimisation, so that they are quick and exact."""

import os

_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if "XLA_FLAGS" not in os.environ:
    os.environ["XLA_FLAGS"] = _FLAGS

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
