"""Values in and out: state dicts and safetensors, exact, with ties, buffers and bfloat16."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import rannc_jax
import torch_bridge
from rannc_jax.ir.leaves import Slicing
from rannc_jax.runtime.stacked import StackedArray
from rannc_jax.runtime.state import TrainState
from torch_bridge.errors import BridgeError

safetensors = pytest.importorskip("safetensors.torch")


class Mixed(torch.nn.Module):
    """Ties, frozen parameters, half precision, and buffers that are saved, written, or neither."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4)
        self.body = torch.nn.Linear(4, 4).bfloat16()
        self.norm = torch.nn.BatchNorm1d(4)
        self.fixed = torch.nn.Linear(4, 4).requires_grad_(False)
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5, dtype=torch.bfloat16))
        self.register_buffer("order", torch.arange(4), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)[..., self.order]
        x = self.body(x.bfloat16() * self.scale).float()
        x = self.norm(self.fixed(x) + x)
        return torch.nn.functional.cross_entropy(self.head(x), ids)


IDS = torch.arange(8)


def converted() -> tuple[Mixed, torch_bridge.JaxModule]:
    torch.manual_seed(0)
    module = Mixed()
    return module, torch_bridge.convert(module, (IDS,))


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(want)
    for name, value in want.items():
        assert got[name].dtype == value.dtype, name
        assert torch.equal(got[name], value), name


def moved(jax_module: torch_bridge.JaxModule) -> torch_bridge.JaxModule:
    """The module with all values changed, as training would."""
    values = {
        k: v + 1 if v.is_floating_point() else v
        for k, v in jax_module.to_state_dict(jax_module.params).items()
    }
    return jax_module.from_state_dict(values)


def test_a_state_dict_goes_in_and_out_unchanged() -> None:
    module, jax_module = converted()
    other = moved(jax_module)
    values = other.to_state_dict(other.params)
    back = jax_module.from_state_dict(values)
    assert_equal(back.to_state_dict(back.params), values)
    module.load_state_dict(values)
    assert_equal(dict(module.state_dict()), values)
    assert module.head.weight is module.embed.weight


def test_safetensors_go_in_and_out_in_one_file_and_in_shards(tmp_path: Path) -> None:
    module, jax_module = converted()
    other = moved(jax_module)
    other.save_safetensors(other.params, tmp_path / "one.safetensors")
    other.save_safetensors(other.params, tmp_path / "many", shard_bytes=100)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    written = safetensors.load_file(tmp_path / "one.safetensors")
    assert "head.weight" not in written
    module.load_state_dict({**written, "head.weight": written["embed.weight"]})
    assert_equal(dict(module.state_dict()), other.to_state_dict(other.params))
    for path in ("one.safetensors", "many", "many/model.safetensors.index.json"):
        loaded = jax_module.load_safetensors(tmp_path / path)
        assert_equal(loaded.to_state_dict(loaded.params), other.to_state_dict(other.params))


def test_a_file_of_torch_is_read_by_a_module_without_memory(tmp_path: Path) -> None:
    module, _ = converted()
    saved = dict(module.state_dict())
    safetensors.save_file({k: v for k, v in saved.items() if k != "head.weight"}, tmp_path / "m.safetensors")
    with torch_bridge.fake_init():
        empty = Mixed()
    jax_module = torch_bridge.convert(empty, (IDS,))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(jax_module.params))
    np.testing.assert_array_equal(jax_module.constants["order"], np.arange(4))
    with pytest.raises(BridgeError, match="only the shape is known"):
        jax_module.to_state_dict(jax_module.params)
    loaded = jax_module.load_safetensors(tmp_path / "m.safetensors")
    assert_equal(loaded.to_state_dict(loaded.params), saved)


def test_each_device_reads_its_own_part(tmp_path: Path) -> None:
    _, jax_module = converted()
    jax_module.save_safetensors(jax_module.params, tmp_path / "m.safetensors")
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    loaded = jax_module.load_safetensors(tmp_path / "m.safetensors", shardings={"embed.weight": rows})
    leaf = loaded.params["embed.weight"]
    assert [shard.data.shape for shard in leaf.addressable_shards] == [(2, 4)] * 4
    np.testing.assert_array_equal(leaf, jax_module.params["embed.weight"])


def test_a_train_state_is_saved_and_read_back_where_it_lies(tmp_path: Path) -> None:
    module, jax_module = converted()
    step = rannc_jax.auto_partition(jax_module, optimizer=optax.sgd(0.1), num_stages=2, num_microbatches=1)
    state, _ = step(step.init(), jax_module.batch)
    jax_module.save_safetensors(state, tmp_path / "m.safetensors")
    trained = jax_module.to_state_dict(state)
    assert not torch.equal(trained["body.weight"], module.body.weight)
    again = jax_module.load_safetensors(tmp_path / "m.safetensors", state=step.init())
    assert_equal(jax_module.to_state_dict(again), trained)
    for one, other in zip(jax.tree.leaves(again.params), jax.tree.leaves(state.params), strict=True):
        assert one.sharding.device_set == other.sharding.device_set
    _, one = step(again, jax_module.batch)
    _, other = step(state, jax_module.batch)
    assert float(one.loss) == float(other.loss)


def test_a_leaf_in_slices_of_several_stages_is_read_slice_by_slice(tmp_path: Path) -> None:
    _, jax_module = converted()
    jax_module.save_safetensors(jax_module.params, tmp_path / "m.safetensors")
    rows = [jax.device_put(np.zeros(4, np.float32), jax.devices()[i // 4]) for i in range(8)]
    stacked = StackedArray(rows, Slicing(dims=(0,), lengths=(8,)))
    state = TrainState(
        params={**jax_module.params, "embed.weight": stacked},
        opt_state=(),
        model_state=jax_module.model_state,
        frozen=jax_module.frozen,
    )
    leaf = jax_module.load_safetensors(tmp_path / "m.safetensors", state=state).params["embed.weight"]
    np.testing.assert_array_equal(np.asarray(leaf), jax_module.params["embed.weight"])
    assert [part.devices() for part in leaf.parts] == [row.devices() for row in rows]


def test_what_does_not_belong_is_listed_at_once(tmp_path: Path) -> None:
    _, jax_module = converted()
    saved = jax_module.to_state_dict(jax_module.params)
    wrong = {**saved, "scale": torch.zeros(2), "extra": torch.zeros(1)}
    del wrong["norm.bias"], wrong["head.weight"]
    safetensors.save_file(wrong, tmp_path / "m.safetensors")
    file = tmp_path / "m.safetensors"
    for load in (lambda: jax_module.from_state_dict(wrong), lambda: jax_module.load_safetensors(file)):
        with pytest.raises(BridgeError) as error:
            load()
        text = str(error.value)
        assert "missing: norm.bias" in text
        assert "unknown: extra" in text
        assert "shape of scale: got (2,), expected ()" in text


def gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    return transformers, transformers.GPT2LMHeadModel(config)


def test_a_trained_hugging_face_model_is_saved_by_its_own_means_and_by_ours(tmp_path: Path) -> None:
    transformers, module = gpt2()
    ids = IDS.reshape(2, 4)
    jax_module = torch_bridge.convert(module, kwargs={"input_ids": ids, "labels": ids})
    step = rannc_jax.auto_partition(jax_module, optimizer=optax.sgd(0.1), num_stages=1, num_microbatches=1)
    state, _ = step(step.init(rng=jax.random.key(0)), jax_module.batch)
    trained = jax_module.to_state_dict(state)
    module.load_state_dict(trained)
    module.save_pretrained(tmp_path / "theirs")
    assert_equal(
        dict(transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "theirs").state_dict()), trained
    )
    read = transformers.GPT2LMHeadModel.from_pretrained
    module.config.save_pretrained(tmp_path / "ours")
    jax_module.save_safetensors(state, tmp_path / "ours", shard_bytes=2000)
    assert_equal(dict(read(tmp_path / "ours").state_dict()), trained)
    loaded = jax_module.load_safetensors(tmp_path / "theirs")
    assert_equal(loaded.to_state_dict(loaded.params), trained)
    base = {k.removeprefix("transformer."): v for k, v in trained.items() if k != "lm_head.weight"}
    safetensors.save_file(base, tmp_path / "base.safetensors")
    loaded = jax_module.load_safetensors(tmp_path / "base.safetensors")
    assert_equal(loaded.to_state_dict(loaded.params), trained)
