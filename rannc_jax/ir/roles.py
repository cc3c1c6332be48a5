"""What an input of a program is to the user's function, and what an output is to the caller."""

import enum


class Role(enum.Enum):
    """The part an input leaf plays."""

    PARAM = "param"
    FROZEN = "frozen"
    BATCH = "batch"
    MODEL_STATE = "model_state"
    RNG = "rng"
    CONST = "const"


class OutputKind(enum.Enum):
    """The part an output leaf plays. OUTPUT is any leaf of a forward-only function's result."""

    LOSS = "loss"
    WEIGHT = "weight"
    AUX = "aux"
    MODEL_STATE = "model_state"
    OUTPUT = "output"
