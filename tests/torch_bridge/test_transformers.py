"""Hugging Face models, unchanged, tiny, with random weights: loss, outputs, gradients, buffers."""

from typing import Any

import jax
import numpy as np
import pytest
import torch

import torch_bridge
from tests.torch_bridge.oracle import arrays, assert_same_gradients, loss_and_gradients

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()


def tokens(rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(1, 50, (rows, 8), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    labels = ids.clone()
    labels[0, :6] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def bert(kind: str, dropout: float = 0.0) -> torch.nn.Module:
    config = transformers.BertConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=50,
        max_position_embeddings=16,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return getattr(transformers, kind)(config)


def gpt2() -> torch.nn.Module:
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def resnet() -> torch.nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5
    )
    return transformers.ResNetForImageClassification(config)


def masked_lm(rows: int) -> Any:
    return tokens(rows)


def pre_training(rows: int) -> Any:
    return {**tokens(rows), "next_sentence_label": torch.arange(rows) % 2}


def classes(rows: int) -> Any:
    return {**tokens(rows), "labels": torch.arange(rows) % 2}


def images(rows: int) -> Any:
    generator = torch.Generator().manual_seed(rows)
    return {
        "pixel_values": torch.randn(rows, 3, 32, 32, generator=generator),
        "labels": torch.arange(rows) % 5,
    }


MODELS = {
    "bert masked": (lambda: bert("BertForMaskedLM"), masked_lm),
    "bert pre-training": (lambda: bert("BertForPreTraining"), pre_training),
    "bert classes": (lambda: bert("BertForSequenceClassification"), classes),
    "gpt2": (gpt2, masked_lm),
    "resnet": (resnet, images),
}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", list(MODELS))
def test_loss_outputs_gradients_and_buffers_equal_torch_at_several_batch_sizes(name: str, mode: str) -> None:
    make, batch_of = MODELS[name]
    torch.manual_seed(0)
    module = make().train(mode == "train")
    converted = torch_bridge.convert(module, kwargs=batch_of(4))
    assert converted.one_export
    start = {key: value.clone() for key, value in module.state_dict().items()}
    for rows in (4, 1):
        module.load_state_dict(start)
        module.zero_grad()
        batch = batch_of(rows)
        extra = {"model_state": converted.model_state} if converted.model_state else {}
        loss, gradients, state = loss_and_gradients(converted, arrays(batch), **extra)
        want = module(**batch)
        want.loss.backward()
        assert float(loss) == pytest.approx(want.loss.item(), rel=1e-5)
        assert_same_gradients(gradients, module)
        buffers = dict(module.named_buffers())
        for key, value in state.items():
            np.testing.assert_allclose(value, buffers[key], rtol=1e-4, atol=1e-6, err_msg=key)
    assert bool(converted.model_state) == (name == "resnet" and mode == "train")


def test_outputs_have_the_models_own_class_and_pass_through_jit() -> None:
    module = bert("BertForMaskedLM").eval()
    batch = tokens(2)
    converted = torch_bridge.convert(module, kwargs=batch)
    got, _ = jax.jit(lambda p, b: converted.apply(p, converted.buffers, **b))(converted.params, arrays(batch))
    assert type(got) is type(module(**batch))
    np.testing.assert_allclose(got.logits, module(**batch).logits.detach(), rtol=1e-4, atol=1e-5)


def test_tied_embeddings_come_back_under_both_names() -> None:
    module = bert("BertForMaskedLM")
    converted = torch_bridge.convert(module, kwargs=tokens(2))
    owner = "bert.embeddings.word_embeddings.weight"
    assert converted.aliases["cls.predictions.decoder.weight"] == owner
    saved = converted.to_state_dict(converted.params)
    assert list(saved) == list(module.state_dict())
    module.load_state_dict(saved)
    assert torch.equal(saved["cls.predictions.decoder.weight"], saved[owner])


def test_dropout_in_training_needs_a_key_and_changes_the_loss_with_it() -> None:
    module = bert("BertForMaskedLM", dropout=0.2).train()
    converted = torch_bridge.convert(module, kwargs=tokens(4))
    assert converted.takes == ("rng",)
    loss_fn = jax.jit(lambda p, b, key: converted.loss_fn(p, b, rng=key))
    losses = [float(loss_fn(converted.params, converted.batch, jax.random.key(i))) for i in (0, 0, 1, 2)]
    assert losses[0] == losses[1]
    assert len(set(losses)) == 3
    quiet = torch_bridge.convert(module.eval(), kwargs=tokens(4))
    silent = float(quiet.loss_fn(quiet.params, quiet.batch))
    assert all(abs(loss - silent) < 0.3 for loss in losses)


def test_the_loss_over_unmasked_tokens_is_a_plain_quotient_of_sums() -> None:
    module = bert("BertForMaskedLM")
    converted = torch_bridge.convert(module, kwargs=tokens(4))
    jaxpr = jax.make_jaxpr(converted.loss_fn)(converted.params, converted.batch)
    (loss,) = jaxpr.jaxpr.outvars
    (last,) = [e for e in jaxpr.jaxpr.eqns if loss in e.outvars]
    assert last.primitive.name == "div"
    makers = {var: e.primitive.name for e in jaxpr.jaxpr.eqns for var in e.outvars}
    assert [makers[var] for var in last.invars] == ["reduce_sum", "reduce_sum"]


def test_examples_of_a_batch_meet_in_no_gather() -> None:
    """Mask code that indexes by batch position is a reshape, so rows stay rows for who cuts the batch."""
    module = bert("BertForMaskedLM")
    converted = torch_bridge.convert(module, kwargs=tokens(4))
    operators = {str(node.operator) for node in converted.programs.first.graph.nodes}
    assert "aten.index.Tensor" not in operators


def test_attention_is_handed_the_causal_mask_of_one_row_not_of_all() -> None:
    converted = torch_bridge.convert(gpt2(), kwargs={"input_ids": tokens(4)["input_ids"]})
    jaxpr = jax.make_jaxpr(lambda p, b: converted.apply(p, converted.buffers, **b)[0].logits)(
        converted.params, converted.batch
    )
    calls = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "custom_vjp_call"]
    masks = [v.aval.shape for e in calls for v in e.invars if v.aval.dtype == bool]
    assert masks == [(1, 1, 8, 8)] * 2
