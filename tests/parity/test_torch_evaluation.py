"""A module trained in a pipeline is evaluated on the same stages, with the statistics it has learnt."""

import copy

import jax
import numpy as np
import optax
import pytest

import rannc_jax

pytestmark = pytest.mark.torch


def resnet():
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5
    )
    return transformers.ResNetForImageClassification(config)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_evaluation_uses_the_running_statistics_of_training():
    import torch

    import torch_bridge

    generator = np.random.default_rng(0)
    batch = {
        "pixel_values": torch.from_numpy(generator.standard_normal((8, 3, 16, 16)).astype(np.float32)),
        "labels": torch.from_numpy(generator.integers(0, 5, 8)),
    }
    model = resnet().train()
    trained = copy.deepcopy(model)
    converted = torch_bridge.convert(model, kwargs=batch)
    step = rannc_jax.auto_partition(converted, optimizer=optax.sgd(0.1), num_stages=2)
    state = step.init()
    arrays = {name: tensor.numpy() for name, tensor in batch.items()}
    for _ in range(2):
        state, _ = step(state, arrays)

    evaluate = step.evaluate(torch_bridge.convert(model.eval(), kwargs=batch))
    out = evaluate(state, arrays)

    trained.load_state_dict(converted.to_state_dict(state))
    with torch.no_grad():
        expected = trained.eval()(**batch)
    np.testing.assert_allclose(np.asarray(out.logits), expected.logits.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(float(out.loss), float(expected.loss), rtol=1e-5)
    fresh = resnet().eval()(**batch).logits.detach().numpy()
    assert np.abs(np.asarray(out.logits) - fresh).max() > 1e-2
    assert len({d for leaf in jax.tree.leaves(state.params) for d in leaf.devices()}) > 1
