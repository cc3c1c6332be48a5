"""`make demo`: an unchanged Hugging Face BERT, cut automatically, trained, and compared with PyTorch.

The model comes from a config with random weights (nothing is downloaded). 8 fake CPU devices get a memory
limit that one of them alone cannot hold, so the planner has to build a pipeline. The same steps are then
taken by plain PyTorch on the whole batch. Dropout is 0, because the two draw different random numbers;
the optimizer is SGD with momentum, because Adam moves parameters whose true gradient is zero (attention
key biases) by rounding noise alone, which no two programs share.
"""

import copy
import importlib
import os
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

import rannc_jax
from rannc_jax.cluster import ClusterSpec
from rannc_jax.config import load_cluster
from rannc_jax.errors import RanncError, message

NUM_DEVICES = 8
# A device holds this share of parameters, gradients and momentum, so no plan of one stage fits, and two
# stages leave next to nothing for activations.
MEMORY_SHARE = 0.45
LEARNING_RATE = 0.05
MOMENTUM = 0.9
IGNORED_LABEL = -100  # what PyTorch's cross entropy leaves out
# The house's measure of equality (docs/explain/architecture.md).
LOSS_TOLERANCE = 1e-5
PARAMETER_TOLERANCE = 1e-5
# Leaves whose norm is below this share of the whole tree's hold little but rounding noise. Key biases are
# nothing else (their true gradient is zero); query biases start at zero and hardly move in so few steps.
NOISE_FLOOR = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How big a demo is."""

    num_layers: int
    hidden: int
    vocabulary: int
    rows: int
    length: int
    num_steps: int


FULL = Size(num_layers=6, hidden=128, vocabulary=1024, rows=16, length=64, num_steps=12)
SHORT = Size(num_layers=4, hidden=64, vocabulary=512, rows=16, length=32, num_steps=4)


def main(*, num_steps: int | None = None, short: bool = False) -> int:
    """Run the demo.

    Args:
        num_steps: optimizer steps; None takes the size's own number.
        short: a smaller model and fewer steps.

    Returns:
        0 if the pipeline's numbers agree with PyTorch's, 1 if not.
    """
    size = SHORT if short else FULL
    num_steps = num_steps or size.num_steps
    _start_fake_devices()
    torch_bridge = _load("torch_bridge")
    model = _bert(size)
    reference = copy.deepcopy(model)
    batches = [_batch(size, seed) for seed in range(num_steps)]

    converted = torch_bridge.convert(model, kwargs=batches[0])
    step = rannc_jax.auto_partition(
        converted,
        optimizer=optax.sgd(LEARNING_RATE, momentum=MOMENTUM),
        mesh=_cluster(model),
    )
    state = step.init()
    print(step.plan, end="\n\n")
    state, losses = _train(step, state, batches)
    expected = _train_in_pytorch(reference, batches)
    return _compare(losses, expected, converted.to_state_dict(state), reference.state_dict())


def _start_fake_devices() -> None:
    # Compiling well takes longer than these few steps.
    os.environ.setdefault(
        "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    )
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)


def _cluster(model: Any) -> ClusterSpec:
    """8 devices of one host, each too small for the whole model."""
    parameter_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    memory_bytes = MEMORY_SHARE * 3 * parameter_bytes
    device = {
        "kind": "cpu",
        "count_per_host": NUM_DEVICES,
        "memory_gib": memory_bytes / 2**30,
        "memory_margin": 0.0,
    }
    return load_cluster({"version": 1, "devices": [device], "links": {"intra_host": {"kind": "host"}}})


def _load(name: str) -> Any:
    """Import an optional module by name: this package stands without PyTorch."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise RanncError(
            message(
                "the demo needs PyTorch and transformers.",
                f"missing: {error.name}",
                hint="pip install 'rannc-jax[torch]', or `make demo` in a checkout.",
            )
        ) from error


def _bert(size: Size) -> Any:
    torch, transformers = _load("torch"), _load("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=size.num_layers,
        num_attention_heads=4,
        intermediate_size=4 * size.hidden,
        max_position_embeddings=size.length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config).train()


def _batch(size: Size, seed: int) -> dict[str, Any]:
    """Rows of skewed random tokens and unequal lengths; one token in seven is to be guessed."""
    torch, generator = _load("torch"), np.random.default_rng(seed)
    shape = (size.rows, size.length)
    # A power of a uniform number makes small tokens common: something to learn in a few steps.
    tokens = (generator.random(shape) ** 6 * (size.vocabulary - 1)).astype(np.int64) + 1
    lengths = generator.integers(size.length // 2, size.length + 1, (size.rows, 1))
    there = np.arange(size.length) < lengths
    guessed = there & (generator.random(shape) < 1 / 7)
    arrays = {
        "input_ids": np.where(guessed, 0, tokens),
        "attention_mask": there.astype(np.int64),
        "labels": np.where(guessed, tokens, IGNORED_LABEL),
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _train(step: Any, state: Any, batches: list[dict[str, Any]]) -> tuple[Any, list[float]]:
    losses: list[float] = []
    for index, batch in enumerate(batches):
        start_s = time.perf_counter()
        state, metrics = step(state, {name: tensor.numpy() for name, tensor in batch.items()})
        losses.append(float(metrics.loss))
        seconds = time.perf_counter() - start_s
        rate = batch["input_ids"].numel() / seconds
        compiling = "  (compiled first)" if index == 0 else ""
        print(f"step {index + 1}/{len(batches)}  loss {losses[-1]:.4f}  {rate:,.0f} tokens/s{compiling}")
    return state, losses


def _train_in_pytorch(model: Any, batches: list[dict[str, Any]]) -> list[float]:
    optimizer = _load("torch").optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    losses: list[float] = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _compare(
    losses: list[float], expected_losses: list[float], found: dict[str, Any], expected: dict[str, Any]
) -> int:
    """Print the largest relative differences; 0 if both are within the house's tolerance."""
    pairs = zip(losses, expected_losses, strict=True)
    loss_difference = max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
    names = [name for name, tensor in expected.items() if tensor.is_floating_point()]
    norms = {name: float(expected[name].norm()) for name in names}
    floor = NOISE_FLOOR * sum(norm**2 for norm in norms.values()) ** 0.5
    differences = {
        name: float((found[name] - expected[name]).norm()) / norm
        for name, norm in norms.items()
        if norm > floor
    }
    worst = max(differences, key=lambda name: differences[name])
    print(f"\nagainst plain PyTorch on the whole batch, {len(losses)} steps, dropout 0:")
    print(f"  largest relative difference of the loss: {loss_difference:.1e}")
    print(f"  largest relative difference of a parameter: {differences[worst]:.1e} ({worst})")
    kinds = Counter(name.split(".", 4)[-1] for name in names if name not in differences)
    if kinds:
        left_out = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        print(f"  left out, for they began at zero and hardly moved: {left_out}")
    agree = loss_difference <= LOSS_TOLERANCE and differences[worst] <= PARAMETER_TOLERANCE
    print("they agree." if agree else "THEY DO NOT AGREE.")
    return 0 if agree else 1
