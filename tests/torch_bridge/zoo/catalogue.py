"""All specimens: importing this module fills `SPECIMENS`."""

from tests.torch_bridge.zoo import (  # noqa: F401 - registration
    decoders,
    encoders,
    functions,
    layers,
    losses,
    networks,
    practice,
    sequences,
    topologies,
    uncommon,
    vision,
)
from tests.torch_bridge.zoo.specimen import SPECIMENS as SPECIMENS
