"""A repeated block is exported once: the program equals that of a module exported whole."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch

import torch_bridge
from tests.torch_bridge.oracle import loss_and_gradients
from torch_bridge import stamp
from torch_bridge.program import Graph, Ref
from torch_bridge.programs import Program
from torch_bridge.repeated import find_blocks
from torch_bridge.signature import Source

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

SMALL: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip


def tokens(rows: int = 2) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 50, (rows, 8), generator=torch.Generator().manual_seed(rows))
    return {"input_ids": ids, "labels": ids}


def pixels(rows: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return {"pixel_values": torch.randn(rows, 3, 32, 32, generator=generator), "labels": torch.arange(rows)}


def speech(rows: int = 2) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(rows, 800, generator=torch.Generator().manual_seed(rows))}


def gpt2() -> torch.nn.Module:
    config = transformers.GPT2Config(
        n_embd=16, n_layer=4, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> torch.nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL))


def llama() -> torch.nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=1))


def gemma2() -> torch.nn.Module:
    """Attention alternates between a window and everything, by the index of the layer."""
    config = transformers.Gemma2Config(**SMALL, num_key_value_heads=1, head_dim=8, sliding_window=4)
    return transformers.Gemma2ForCausalLM(config)


def mixtral() -> torch.nn.Module:
    config = transformers.MixtralConfig(
        **SMALL, num_key_value_heads=1, num_local_experts=4, experts_implementation="batched_mm"
    )
    return transformers.MixtralForCausalLM(config)


def t5() -> torch.nn.Module:
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=4, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def albert() -> torch.nn.Module:
    """All layers are one layer."""
    return transformers.AlbertForMaskedLM(transformers.AlbertConfig(**SMALL, embedding_size=8))


def vit() -> torch.nn.Module:
    sizes = {k: v for k, v in SMALL.items() if k not in ("vocab_size", "max_position_embeddings")}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=2)
    return transformers.ViTForImageClassification(config)


def swin() -> torch.nn.Module:
    """Windows shift in every other layer, and each layer drops paths at a rate of its own."""
    config = transformers.SwinConfig(
        image_size=32, patch_size=2, embed_dim=8, depths=[4, 4], num_heads=[2, 2], window_size=4, num_labels=2
    )
    return transformers.SwinForImageClassification(config)


def wav2vec2() -> torch.nn.Module:
    config = transformers.Wav2Vec2Config(
        **{**SMALL, "intermediate_size": 24}, conv_dim=[8, 8], conv_stride=[5, 2], conv_kernel=[10, 3],
        num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        layerdrop=0.0, mask_time_prob=0.0,
    )  # fmt: skip
    return transformers.Wav2Vec2Model(config)


# Module, batch, distinct blocks, copies of them.
CASES: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[], Any], int]] = {
    "gpt2": (gpt2, tokens, 3),
    "gemma2": (gemma2, tokens, 2),
    "albert": (albert, tokens, 3),
    "bert": (bert, tokens, 3),
    "llama": (llama, tokens, 3),
    "mixtral": (mixtral, tokens, 3),
    "t5": (t5, tokens, 4),
    "vit": (vit, pixels, 3),
    "swin": (swin, pixels, 2),
    "wav2vec2": (wav2vec2, speech, 3),
}
QUICK = (("gpt2", "train"), ("gemma2", "eval"))


def convert(module: torch.nn.Module, kwargs: Any, worthwhile: int, patch: pytest.MonkeyPatch) -> Any:
    with patch.context() as context:
        context.setattr(stamp, "find_blocks", lambda tape: find_blocks(tape, worthwhile=worthwhile))
        return torch_bridge.convert(module, kwargs=kwargs)


def written(program: Program) -> list[tuple[Any, ...]]:
    """Every node with its inputs named, so that programs that number their inputs differently compare."""
    graph, names = program.graph, []
    for source, key in program.signature.inputs:
        names.append(
            ("literal", program.signature.literals[key].tolist())
            if source is Source.LITERAL
            else (source, key)
        )

    def named(tree: Any) -> Any:
        if isinstance(tree, Ref):
            inside = tree.index - graph.num_inputs
            return names[tree.index] if inside < 0 else inside
        if isinstance(tree, tuple):
            return tuple(map(named, tree))
        if isinstance(tree, dict):
            return {key: named(value) for key, value in tree.items()}
        return "graph" if isinstance(tree, Graph) else tree

    rows = [(n.operator, named(n.args), named(n.kwargs), n.dtypes, n.shape) for n in graph.nodes]
    return [*rows, named(graph.outputs)]


def assert_same(stamped: Program, whole: Program) -> None:
    """Equal nodes; inside no_grad and autocast regions a stamped node may know its module more exactly."""
    assert written(stamped) == written(whole)
    for one, other in zip(stamped.graph.nodes, whole.graph.nodes, strict=True):
        outer = f"{other.path}/".removeprefix("/")
        assert f"{one.path}/".startswith(outer), (one.operator, one.path, other.path)


@pytest.mark.parametrize(
    "name, mode",
    [
        (n, m) if (n, m) in QUICK else pytest.param(n, m, marks=pytest.mark.slow)
        for n in CASES
        for m in ("train", "eval")
    ],
)
def test_stamped_blocks_give_the_program_of_the_whole_export(
    name: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, batch_of, copies = CASES[name]
    torch.manual_seed(0)
    module = make().train(mode == "train")
    stamped = convert(module, batch_of(), 0, monkeypatch)
    whole = convert(module, batch_of(), 10**9, monkeypatch)
    assert stamped.programs.first.num_copies >= copies
    assert whole.programs.first.num_copies == 0
    if stamped.one_export == whole.one_export:
        assert_same(stamped.programs.first, whole.programs.first)
    if stamped.programs.first.loss is None:
        return
    extra = {"rng": jax.random.key(1)} if "rng" in stamped.takes else {}
    for one, other in zip(
        jax.tree.leaves(loss_and_gradients(stamped, stamped.batch, **extra)),
        jax.tree.leaves(loss_and_gradients(whole, stamped.batch, **extra)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


class Layers(torch.nn.Module):
    """A chain of layers that `make` builds from their index."""

    def __init__(self, make: Callable[[int], torch.nn.Module], count: int = 4) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([make(i) for i in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Layer(torch.nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.linear = torch.nn.Linear(4, 4)
        self.dropout = torch.nn.Dropout(0.5)


class Scaled(Layer):
    """Behaves by its index, in a number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dropout(self.linear(x)) * (1.0 + self.index // 2)) + x


class Noted(Layer):
    """Has an index that changes nothing, and draws random numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(torch.tanh(self.linear(x))) + x


class InPlace(Layer):
    """Writes its own input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2.0)
        return torch.tanh(self.linear(x)) + torch.relu(x)


class Viewed(Layer):
    """Returns a view of its input, which the next layer writes through."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x)).add_(1.0)
        y = y + torch.relu(y)
        return y.view(-1, 4)


class Counted(Layer):
    """Writes a buffer."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1.0)
        return torch.tanh(self.linear(x)) * self.calls + torch.relu(x)


class Detached(Layer):
    """Holds a gradient barrier and an autocast region."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = torch.tanh(x).abs().amax()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.linear(x)
        return torch.tanh(y.float()) / scale + x


class Recurrent(torch.nn.Module):
    """Lists its parameters a second time."""

    def __init__(self, _index: int) -> None:
        super().__init__()
        self.cell = torch.nn.GRU(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.cell(x)[0]
        return torch.tanh(y) + torch.relu(y)


class Best(Layer):
    """Takes named results of torch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, places = torch.topk(self.linear(x), 4)
        return values + x.max(dim=0).values + places


CHAINS: dict[str, tuple[Callable[[int], torch.nn.Module], int]] = {
    "index in a number": (Scaled, 2),
    "index that changes nothing": (Noted, 3),
    "writes its input": (InPlace, 0),
    "views": (Viewed, 3),
    "writes a buffer": (Counted, 0),
    "barriers and autocast": (Detached, 3),
    "recurrent": (Recurrent, 3),
    "named results": (Best, 3),
}


@pytest.mark.parametrize("name", list(CHAINS))
def test_layers_are_copies_if_and_only_if_they_do_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, copies = CHAINS[name]
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), Layers(make))
    args = (torch.randn(3, 4),)
    with monkeypatch.context() as context:
        context.setattr(stamp, "find_blocks", lambda tape: find_blocks(tape, worthwhile=0))
        stamped = torch_bridge.convert(module, args)
    whole = torch_bridge.convert(module, args)
    assert (stamped.programs.first.num_copies, whole.programs.first.num_copies) == (copies, 0)
    assert_same(stamped.programs.first, whole.programs.first)


def test_a_tensor_that_two_layers_share_is_one_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Layers(Noted)
    module.layers[2].linear.weight = module.layers[0].linear.weight
    with monkeypatch.context() as context:
        context.setattr(stamp, "find_blocks", lambda tape: find_blocks(tape, worthwhile=0))
        stamped = torch_bridge.convert(module, (torch.randn(3, 4),))
    assert stamped.programs.first.num_copies == 2  # the first layer reads what needs no gradient
    assert stamped.aliases == {"layers.2.linear.weight": "layers.0.linear.weight"}
    used = {path for _, path in stamped.programs.first.signature.inputs}
    assert "layers.0.linear.weight" in used
    assert "layers.2.linear.weight" not in used
