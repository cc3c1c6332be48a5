"""Hugging Face models with tiny configs and random weights, and what plain PyTorch makes of them.

Dropout is off (PyTorch's bits are not JAX's), everything else as in training. Needs PyTorch.
"""

import copy
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers

import torch_bridge
from tests.parity.models import IGNORED, LENGTH, ROWS, VOCABULARY
from tests.parity.oracle import Outcome


@dataclass(frozen=True, kw_only=True, eq=False)
class TorchModel:
    """A module in training mode.

    Args:
        module: never trained itself; work on copies.
        batch: keyword arguments.
        coupled: batch normalisation: PyTorch, too, goes microbatch by microbatch.
        zero_gradient: part of the names of parameters whose true gradient is zero.
    """

    module: torch.nn.Module
    batch: dict[str, torch.Tensor]
    coupled: bool = False
    zero_gradient: str = "(none)"

    @functools.cached_property
    def converted(self) -> torch_bridge.JaxModule:
        return torch_bridge.convert(self.module, kwargs=self.batch)

    def is_zero(self, name: str) -> bool:
        return self.zero_gradient in name


def bert() -> TorchModel:
    """Masked language model; one label in seven or so, none at all in rows 6 to 11; tied embeddings."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        initializer_range=0.2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    tokens = _integers(VOCABULARY, ROWS, LENGTH)
    chosen = _integers(7, ROWS, LENGTH) == 0
    chosen[6:12] = False
    batch = {"input_ids": tokens, "labels": torch.where(chosen, tokens, IGNORED)}
    module = transformers.BertForMaskedLM(config).train()
    return TorchModel(module=module, batch=batch, zero_gradient="attention.self.key.bias")


def gpt2() -> TorchModel:
    """Causal language model with uneven padding of the labels; tied embeddings."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=2,
        n_head=2,
        initializer_range=0.2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    tokens = _integers(VOCABULARY, ROWS, LENGTH)
    lengths = 2 + _integers(LENGTH - 1, ROWS, 1)
    labels = torch.where(torch.arange(LENGTH)[None] < lengths, tokens, IGNORED)
    module = transformers.GPT2LMHeadModel(config).train()
    return TorchModel(module=module, batch={"input_ids": tokens, "labels": labels})


def resnet() -> TorchModel:
    """Batch normalisation with running statistics."""
    config = transformers.ResNetConfig(
        num_channels=3,
        embedding_size=4,
        hidden_sizes=[4, 8],
        depths=[1, 1],
        layer_type="basic",
        num_labels=5,
    )
    image = torch.randn(ROWS, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    module = transformers.ResNetForImageClassification(config).train()
    return TorchModel(
        module=module, batch={"pixel_values": image, "labels": _integers(5, ROWS)}, coupled=True
    )


TORCH_MODELS = {build.__name__: build for build in (bert, gpt2, resnet)}


@functools.cache
def torch_model(name: str) -> TorchModel:
    """A model by name; made and converted once."""
    torch.manual_seed(0)
    model = TORCH_MODELS[name]()
    with torch.no_grad():
        for parameter in model.module.parameters():  # biases start at 0, where no deviation is relative
            parameter += 0.05 * torch.randn_like(parameter)
    return model


@functools.cache
def torch_outcome(name: str, optimizer: str, num_microbatches: int, num_steps: int) -> Outcome:
    """Train in plain PyTorch, with the optimizers of `play.optimizer_of`."""
    model = torch_model(name)
    parts = num_microbatches if model.coupled else 1
    first = copy.deepcopy(model.module)
    loss = _backward(first, model.batch, parts)
    grads = {key: p.grad.numpy() for key, p in first.named_parameters()}
    module, losses = copy.deepcopy(model.module), []
    update = _optimizer(optimizer, module)
    for _ in range(num_steps):
        update.zero_grad()
        losses.append(_backward(module, model.batch, parts))
        if optimizer == "adam":
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        update.step()
    return Outcome(
        loss=loss,
        grads=grads,
        aux=None,
        first_state=_written(first, model),
        losses=tuple(losses),
        params={key: p.detach().numpy() for key, p in module.named_parameters()},
        model_state=_written(module, model),
    )


def _optimizer(name: str, module: torch.nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(module.parameters(), lr=0.02, momentum=0.9)
    return torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=1e-4)


def _backward(module: torch.nn.Module, batch: dict[str, torch.Tensor], parts: int) -> Any:
    """Loss, with gradients left in the parameters; parts one after another, rows weigh the same."""
    total = np.float32(0)
    for index in range(parts):
        size = ROWS // parts
        rows = {key: value[index * size : (index + 1) * size] for key, value in batch.items()}
        loss = module(**rows).loss / parts
        loss.backward()
        total = total + loss.detach().numpy()
    return np.asarray(total)


def _written(module: torch.nn.Module, model: TorchModel) -> Any:
    """The buffers that training writes, None if there are none; int64 as JAX has it."""
    if not model.coupled:
        return None
    kept = {key: value.numpy() for key, value in module.named_buffers() if key in model.converted.model_state}
    return {key: x.astype(np.int32) if x.dtype == np.int64 else x for key, x in kept.items()}


def _integers(below: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(sum(shape)))
