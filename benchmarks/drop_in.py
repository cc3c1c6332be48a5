"""What a PyTorch training loop adds to the step it runs: time, and bytes copied to the host.

    python -m benchmarks.drop_in --models bert gpt2 resnet --rounds 15

One model at a time, in one process: the loop of `RaNNCModule` with a GradScaler, `clip_grad_norm_`, AdamW and
a scheduler, and in turn the bare `step(state, batch)` of `auto_partition` on the same converted module, plan
and batch, with optax's AdamW. Medians; both wait for the loss. On GPUs the parameters lie there, the batch
comes from the host in both.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import optax
import torch

import rannc_jax
import torch_bridge
from torch_bridge.drop_in.storage import TRAFFIC

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model: seconds of a step, medians, and bytes that a step of the loop copies to the host."""

    model: str
    parameters: int
    bare_s: float
    loop_s: float
    ratio: float
    bytes_to_host: float
    plan: str


def bert(scale: int) -> tuple[torch.nn.Module, Batch]:
    import transformers

    config = transformers.BertConfig(
        vocab_size=2000,
        hidden_size=192 * scale,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=768 * scale,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    ids = torch.randint(2000, (16, 128))
    return transformers.BertForMaskedLM(config), {"input_ids": ids, "labels": ids.clone()}


def gpt2(scale: int) -> tuple[torch.nn.Module, Batch]:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=2000,
        n_embd=192 * scale,
        n_layer=4,
        n_head=4,
        n_positions=128,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    ids = torch.randint(2000, (16, 128))
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids.clone()}


def resnet(scale: int) -> tuple[torch.nn.Module, Batch]:
    import transformers

    config = transformers.ResNetConfig(
        embedding_size=32 * scale,
        hidden_sizes=[64 * scale, 128 * scale, 256 * scale],
        depths=[2, 2, 2],
        num_labels=100,
    )
    model = transformers.ResNetForImageClassification(config)
    return model, {"pixel_values": torch.randn(16, 3, 64, 64), "labels": torch.randint(100, (16,))}


MODELS: dict[str, Callable[[int], tuple[torch.nn.Module, Batch]]] = {
    "bert": bert,
    "gpt2": gpt2,
    "resnet": resnet,
}


def measure(name: str, rounds: int, scale: int, settings: dict[str, Any]) -> Row:
    """Both loops in turn."""
    torch.manual_seed(0)
    net, batch = MODELS[name](scale)
    count = sum(parameter.numel() for parameter in net.parameters())
    bare = bare_step(net, batch, settings)
    loop, model = user_loop(net, batch, settings)
    for run in (bare, loop):
        for _ in range(2):
            run()
    before = TRAFFIC.to_host
    seconds: dict[str, list[float]] = {"bare": [], "loop": []}
    for _ in range(rounds):
        for key, run in (("bare", bare), ("loop", loop)):
            began = time.perf_counter()
            run()
            seconds[key].append(time.perf_counter() - began)
    bare_s, loop_s = (statistics.median(seconds[key]) for key in ("bare", "loop"))
    return Row(
        model=name,
        parameters=count,
        bare_s=bare_s,
        loop_s=loop_s,
        ratio=statistics.median(b / a for a, b in zip(seconds["bare"], seconds["loop"], strict=True)),
        bytes_to_host=(TRAFFIC.to_host - before) / rounds,
        plan=str(model.plan).splitlines()[0].removeprefix("plan: "),
    )


def bare_step(net: torch.nn.Module, batch: Batch, settings: dict[str, Any]) -> Callable[[], Any]:
    """A step of the JAX door on the converted module; the state stays in the closure."""
    jm = torch_bridge.convert(net, kwargs=batch)
    optimizer = optax.adamw(1e-4, weight_decay=0.01)
    step = rannc_jax.auto_partition(jm, optimizer=optimizer, **settings)
    kept = [step.init()]

    def run() -> float:
        kept[0], out = step(kept[0], batch)
        return float(out.loss)

    return run


def user_loop(
    net: torch.nn.Module, batch: Batch, settings: dict[str, Any]
) -> tuple[Callable[[], Any], torch_bridge.RaNNCModule]:
    """A step as a PyTorch user writes it."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = torch_bridge.RaNNCModule(net, optimizer, **settings)

    def run() -> float:
        loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        return loss.item()

    return run, model


def main() -> None:
    """Measure, print a markdown table."""
    parser = argparse.ArgumentParser(description="What a PyTorch training loop adds to the step it runs.")
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--scale", type=int, default=1, help="widths, times so much")
    parser.add_argument("--num-stages", type=int, default=None)
    parser.add_argument("--json", default=None, help="write the rows to a file")
    options = parser.parse_args()
    settings = {} if options.num_stages is None else {"num_stages": options.num_stages}
    device = jax.devices()[0]
    print(f"{len(jax.devices())} x {device.device_kind}, jax {jax.__version__}, torch {torch.__version__}\n")
    print("| model | parameters | bare step ms | loop ms | median ratio | bytes to host a step | plan |")
    print("|---|---|---|---|---|---|---|", flush=True)
    rows = []
    for name in options.models:
        row = measure(name, options.rounds, options.scale, settings)
        rows.append(asdict(row))
        print(
            f"| {row.model} | {row.parameters / 1e6:.1f} M | {row.bare_s * 1e3:.1f} | "
            f"{row.loop_s * 1e3:.1f} | "
            f"{row.ratio:.3f} | {row.bytes_to_host:,.0f} | {row.plan} |",
            flush=True,
        )
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
