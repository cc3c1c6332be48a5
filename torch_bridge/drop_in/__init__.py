"""The PyTorch door: a training loop that stays as it was, its model on the JAX runtime."""

from torch_bridge.drop_in.module import RaNNCModule as RaNNCModule
