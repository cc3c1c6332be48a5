"""A Hugging Face BERT, unchanged, trained by JAX on 8 fake CPU devices, and given back to PyTorch.

    JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8 python examples/huggingface_bert.py

The model comes from a config with random weights, so nothing is downloaded. The task: tell rows of small
tokens from rows of large ones.
"""

import jax
import optax
import torch
from transformers import BertConfig, BertForSequenceClassification

import rannc_jax
import torch_bridge

ROWS, LENGTH, VOCABULARY, NUM_STEPS = 16, 32, 128, 20


def make_batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (ROWS,), generator=generator)
    tokens = torch.randint(0, VOCABULARY // 2, (ROWS, LENGTH), generator=generator)
    return {"input_ids": tokens + labels[:, None] * VOCABULARY // 2, "labels": labels}


def main() -> None:
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=256, max_position_embeddings=LENGTH,
    )  # fmt: skip
    torch.manual_seed(0)
    model = BertForSequenceClassification(config)

    converted = torch_bridge.convert(model, kwargs=make_batch(0))
    step = rannc_jax.auto_partition(converted, optimizer=optax.adamw(1e-3), num_stages=2, num_microbatches=4)
    state = step.init(rng=jax.random.key(0))  # for dropout; every row draws the same mask on any plan
    print(step.plan, end="\n\n")

    for index in range(NUM_STEPS):
        batch = {name: tensor.numpy() for name, tensor in make_batch(index).items()}
        state, metrics = step(state, batch)
        print(f"step {index + 1}/{NUM_STEPS}  loss {float(metrics.loss):.4f}")

    model.load_state_dict(converted.to_state_dict(state))  # PyTorch goes on from here
    with torch.no_grad():
        print(f"PyTorch, with the trained weights: loss {model.eval()(**make_batch(NUM_STEPS)).loss:.4f}")


if __name__ == "__main__":
    main()
