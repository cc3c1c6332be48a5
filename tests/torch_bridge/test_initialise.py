"""Modules built without memory: shapes, exact computed buffers, and first values like the constructor's."""

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import rannc_jax
import torch_bridge
from torch_bridge.errors import BridgeError
from torch_bridge.initialise import Initialiser, held
from torch_bridge.signature import names_of

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

SIZES: dict[str, Any] = {
    "vocab_size": 200, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


def model(config: str, cls: str, **settings: Any) -> Callable[[], torch.nn.Module]:
    return lambda: getattr(transformers, cls)(getattr(transformers, config)(**settings))


IMAGES = {"hidden_sizes": [16, 32], "depths": [2, 2]}
LAYERS = {k: v for k, v in SIZES.items() if k in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
BART = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in
        {"layers": 2, "attention_heads": 4, "ffn_dim": 128}.items()}  # fmt: skip
FAMILIES: dict[str, Callable[[], torch.nn.Module]] = {
    "bert": model("BertConfig", "BertForMaskedLM", **SIZES),
    "gpt2": model(
        "GPT2Config", "GPT2LMHeadModel", n_embd=64, n_layer=2, n_head=4, vocab_size=200, n_positions=64
    ),
    "llama": model("LlamaConfig", "LlamaForCausalLM", **SIZES, tie_word_embeddings=True),
    "t5": model(
        "T5Config", "T5ForConditionalGeneration",
        vocab_size=200, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
    ),
    "vit": model("ViTConfig", "ViTForImageClassification", **LAYERS, image_size=32, patch_size=8),
    "resnet": model("ResNetConfig", "ResNetForImageClassification", **IMAGES, embedding_size=16),
    "convnext": model(
        "ConvNextConfig", "ConvNextForImageClassification", **IMAGES, num_stages=2, drop_path_rate=0.1
    ),
    "swin": model(
        "SwinConfig", "SwinForImageClassification",
        image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=4,
    ),
    "wav2vec2": model(
        "Wav2Vec2Config", "Wav2Vec2Model", **SIZES, conv_dim=[16, 16], conv_stride=[5, 2],
        conv_kernel=[10, 3], num_feat_extract_layers=2, num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
    ),
    "bart": model(
        "BartConfig", "BartForConditionalGeneration", **BART,
        vocab_size=200, d_model=64, max_position_embeddings=64,
    ),
    "mixtral": model(
        "MixtralConfig", "MixtralForCausalLM", **SIZES, num_key_value_heads=2, num_local_experts=4
    ),
}  # fmt: skip


class ByHand(torch.nn.Module):
    """Every initialiser of torch.nn.init, what constructors compute, and draws that two tensors share."""

    def __init__(self) -> None:
        super().__init__()
        init = torch.nn.init
        self.rnn = torch.nn.LSTM(16, 32)
        self.encoder = torch.nn.TransformerEncoder(
            torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2
        )
        self.padded = torch.nn.Embedding(50, 32, padding_idx=3)
        for name, fill in {
            "trunc": lambda t: init.trunc_normal_(t, std=0.02),
            "orthogonal": init.orthogonal_,
            "kaiming": init.kaiming_normal_,
            "xavier": init.xavier_uniform_,
            "eye": init.eye_,
            "sparse": lambda t: init.sparse_(t, 0.5),
            "constant": lambda t: init.constant_(t, 0.3),
            "bernoulli": lambda t: t.data.bernoulli_(0.25),
            "exponential": lambda t: t.data.exponential_(2.0),
            "partly": lambda t: t.data[:10].normal_(1.0, 0.1),
            "flipped": lambda t: t.data.t().uniform_(0.0, 1.0),
        }.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(40, 64)))
            fill(getattr(self, name))
        self.dirac = torch.nn.Parameter(init.dirac_(torch.empty(8, 8, 3)))
        self.normed = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(32, 32))
        self.copied = torch.nn.Parameter(self.kaiming.detach().clone() * 2.0)
        self.bf16 = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
        self.table = torch.nn.Parameter(torch.from_numpy(np.sin(np.arange(12.0, dtype=np.float32))))
        rate = torch.linspace(0, 1, 5)[2].item()
        self.register_buffer("rates", torch.full((3,), rate) ** torch.arange(3))
        self.mask = torch.ones(64, 64).tril()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bf16((x @ self.mask).bfloat16()).float().mean() * self.rates[1]


WITHOUT_MEMORY: dict[str, Callable[[], Any]] = {
    "fake_init": torch_bridge.fake_init,
    "meta": lambda: torch.device("meta"),
    "fake": lambda: FakeTensorMode(allow_non_fake_inputs=True),
}


def first_values(module: torch.nn.Module) -> dict[str, Any]:
    """First values of a module built without memory, by name."""
    names = names_of(module)
    tensors = {**names.params, **names.frozen, **names.buffers}
    initialiser = Initialiser(tensors)
    made: dict[str, Any] = {}
    for name, tensor in tensors.items():
        maker = initialiser.maker(name, held(name, tensor, computed=name in names.buffers))
        made[name] = maker(jax.random.key(7)) if callable(maker) else maker
    return made


def assert_same_distribution(name: str, got: Any, want: torch.Tensor) -> None:
    """Equal zeros, equal values where they are constant, mean and spread within sampling error."""
    a = np.asarray(got, np.float64)
    b = want.detach().double().numpy()
    assert a.shape == b.shape, name
    if b.size == 0 or np.ptp(b) == 0.0:
        np.testing.assert_array_equal(a, b, err_msg=name)
        return
    # Five standard errors of a difference of two means, and of two standard deviations.
    error = 5 * math.sqrt(2 / b.size) * b.std()
    assert abs(a.mean() - b.mean()) <= error, f"{name}: mean {a.mean():.5f}, torch {b.mean():.5f}"
    assert abs(a.std() - b.std()) <= 2 * error, f"{name}: std {a.std():.5f}, torch {b.std():.5f}"
    zeros = [int((np.abs(x).reshape(len(x), -1).sum(1) == 0).sum()) for x in (a, b) if x.ndim]
    assert len(set(zeros)) <= 1, f"{name}: rows of zeros {zeros}"


def assert_initialised_alike(make: Callable[[], torch.nn.Module]) -> tuple[dict[str, Any], torch.nn.Module]:
    torch.manual_seed(0)
    real = make()
    with torch_bridge.fake_init():
        fake = make()
    own, wanted = names_of(fake), names_of(real)
    assert own.aliases == wanted.aliases
    assert (own.params.keys(), own.frozen.keys(), own.buffers.keys(), own.saved) == (
        wanted.params.keys(), wanted.frozen.keys(), wanted.buffers.keys(), wanted.saved,
    )  # fmt: skip
    made = first_values(fake)
    for name, tensor in {**wanted.params, **wanted.frozen}.items():
        assert_same_distribution(name, made[name], tensor)
    for name, tensor in wanted.buffers.items():
        np.testing.assert_array_equal(np.asarray(made[name]), tensor.numpy(), err_msg=name)
    return made, real


def quick(names: Iterable[str], *fast: str) -> list[Any]:
    """The others are slow: they compile more, and show the same."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("family", quick(FAMILIES, "bert", "llama", "vit", "resnet"))
def test_first_values_are_distributed_as_the_constructor_draws_them(family: str) -> None:
    assert_initialised_alike(FAMILIES[family])


@pytest.mark.slow
def test_every_initialiser_of_torch_is_replayed() -> None:
    made, _ = assert_initialised_alike(ByHand)
    q = made["orthogonal"]
    np.testing.assert_allclose(q @ q.T, np.eye(40), atol=1e-5)
    np.testing.assert_allclose(made["copied"], made["kaiming"] * 2.0)
    weight = made["normed.parametrizations.weight.original1"]
    norm = np.linalg.norm(weight, axis=1, keepdims=True)
    np.testing.assert_allclose(made["normed.parametrizations.weight.original0"], norm, rtol=1e-6)
    assert made["bf16.weight"].dtype == "bfloat16"
    assert not np.any(made["padded.weight"][3])
    # Copies of a layer are copies, layers of their own are not.
    first, second = (made[f"encoder.layers.{i}.linear1.weight"] for i in range(2))
    np.testing.assert_array_equal(first, second)
    assert len({float(made[f"{n}.weight"].sum()) for n in ("padded", "bf16")}) == 2


def test_tensors_held_as_plain_attributes_have_their_values() -> None:
    torch.manual_seed(0)
    real = ByHand()
    with torch_bridge.fake_init():
        fake = ByHand()
    x = torch.randn(3, 64)
    jax_module = torch_bridge.convert(fake, (x,)).from_state_dict(real.state_dict())
    got, _ = jax_module.apply(jax_module.params, jax_module.buffers, x)
    np.testing.assert_allclose(got, real(x).detach(), rtol=2e-2)
    assert isinstance(fake.mask, torch._subclasses.FakeTensor)


@pytest.mark.parametrize("build", quick(["fake_init", "meta"], "fake_init"))
def test_a_recurrent_layer_without_memory_is_converted(build: str) -> None:
    def make() -> torch.nn.Module:
        return torch.nn.LSTM(4, 4, num_layers=2, batch_first=True)

    with WITHOUT_MEMORY[build]():
        module = make()
    real = make()
    x = torch.randn(3, 5, 4)
    jax_module = torch_bridge.convert(module, (x,)).from_state_dict(real.state_dict())
    got, _ = jax_module.apply(jax_module.params, jax_module.buffers, x)
    np.testing.assert_allclose(got[0], real(x)[0].detach(), rtol=1e-5, atol=1e-6)


class Odd(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(4, 4).geometric_(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def test_an_operator_without_replay_is_named_with_its_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch_bridge.fake_init():
        module = Odd()
    jax_module = torch_bridge.convert(module, (torch.ones(2, 4),))
    from torch_bridge import replay

    monkeypatch.setattr(replay.registry, "find", lambda _operator: None)
    expected = re.escape("aten.geometric_.default has no replay in JAX; the initialisation of weight uses it")
    with pytest.raises(BridgeError, match=expected):
        jax_module.init(jax.random.key(0))


IDS = torch.arange(16).reshape(2, 8)


def llama() -> torch.nn.Module:
    return FAMILIES["llama"]()


@pytest.mark.parametrize("build", quick(WITHOUT_MEMORY, "meta"))
def test_a_module_without_memory_gives_the_program_of_a_real_one(build: str) -> None:
    with WITHOUT_MEMORY[build]():
        module = llama()
    kwargs = {"input_ids": IDS, "labels": IDS}
    jax_module = torch_bridge.convert(module, kwargs=kwargs)
    real = torch_bridge.convert(llama(), kwargs=kwargs)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(jax_module.params))
    for name, value in real.constants.items():
        np.testing.assert_array_equal(jax_module.constants[name], value)
    one, other = (jax.make_jaxpr(m.loss_fn)(m.params, m.batch) for m in (jax_module, real))
    assert str(one) == str(other)
    for name, value in jax_module.init(jax.random.key(0)).params.items():
        assert (value.shape, value.dtype) == (real.params[name].shape, real.params[name].dtype)
    assert_same_distribution("q", value, dict(real.programs.names.params)[name])


def test_init_runs_under_jit_and_makes_each_leaf_where_it_is_wanted() -> None:
    with torch_bridge.fake_init():
        module = llama()
    jax_module = torch_bridge.convert(module, kwargs={"input_ids": IDS, "labels": IDS})
    eager = jax_module.init(jax.random.key(3)).params
    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices[:2]), ("x",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    name = "model.embed_tokens.weight"
    run = jax.jit(lambda key: jax_module.init(key).params[name], out_shardings=rows)
    array = run(jax.random.key(3))
    np.testing.assert_allclose(array, eager[name], rtol=1e-6, atol=1e-7)
    assert array.addressable_shards[0].data.shape == (100, 64)


def test_a_step_starts_from_shapes_and_trains() -> None:
    with torch_bridge.fake_init():
        module = llama()
    jax_module = torch_bridge.convert(module, kwargs={"input_ids": IDS, "labels": IDS})
    plan = rannc_jax.make_plan(jax_module, optimizer=optax.adam(1e-3), num_stages=2, num_microbatches=1)
    assert len(plan.stages) == 2
    step = rannc_jax.auto_partition(jax_module, optimizer=optax.adam(1e-3), num_stages=2, num_microbatches=1)
    with pytest.raises(rannc_jax.TraceError, match="no key"):
        step.init()
    state = step.init(rng=jax.random.key(0))
    want = jax_module.init(jax.random.fold_in(jax.random.key(0), 0)).params
    for name, value in want.items():
        np.testing.assert_array_equal(state.params[name], value)
    losses = []
    for _ in range(3):
        state, out = step(state, jax_module.batch)
        losses.append(float(out.loss))
    assert losses[2] < losses[0]


def test_a_module_without_values_or_record_says_what_to_do() -> None:
    with torch.device("meta"):
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    jax_module = torch_bridge.convert(module, (torch.ones(2, 4),), loss=lambda y: y.mean())
    step = rannc_jax.auto_partition(jax_module, optimizer=optax.sgd(0.1), num_stages=1)
    with pytest.raises(BridgeError, match=r"0\.weight has a shape, but neither values nor a recorded"):
        step.init(rng=jax.random.key(0))
