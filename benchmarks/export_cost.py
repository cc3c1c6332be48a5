"""What it costs to take a large model from its class to a jaxpr for every batch size, without its weights.

    python -m benchmarks.export_cost gpt2-5b      # 48 layers of width 2944, 5.15 B parameters
    python -m benchmarks.export_cost bert-13b     # 256 layers of width 2048, 12.9 B parameters
    python -m benchmarks.export_cost gpt2-5b --layers 4 --whole    # torch.export of the whole module instead

One line a part: wall and CPU seconds, and the growth of the peak of resident memory.
"""

import argparse
import functools
import resource
import time
from collections.abc import Callable
from typing import Any

import jax
import torch
import transformers

import torch_bridge
from torch_bridge import programs, stamp

ROWS, LENGTH = 2, 128


def gpt2(layers: int | None, cache: bool) -> tuple[Callable[[], torch.nn.Module], int]:
    config = transformers.GPT2Config(n_embd=2944, n_layer=layers or 48, n_head=23, use_cache=cache)
    return lambda: transformers.GPT2LMHeadModel(config), config.vocab_size


def bert(layers: int | None, _cache: bool) -> tuple[Callable[[], torch.nn.Module], int]:
    config = transformers.BertConfig(
        hidden_size=2048, num_hidden_layers=layers or 256, num_attention_heads=16, intermediate_size=8192
    )
    return lambda: transformers.BertForMaskedLM(config), config.vocab_size


MODELS = {"gpt2-5b": gpt2, "bert-13b": bert}


class Clock:
    """Prints what each part took."""

    def __init__(self) -> None:
        self.start = self.last = self._now()
        print(f"{'part':44} {'wall s':>8} {'CPU s':>8} {'peak GiB':>9}")

    @staticmethod
    def _now() -> tuple[float, float, float]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        return time.perf_counter(), time.process_time(), peak

    def part(self, name: str, since: tuple[float, float, float] | None = None) -> None:
        now, since = self._now(), since or self.last
        wall, cpu, peak = (a - b for a, b in zip(now, since, strict=True))
        print(f"{name:44} {wall:8.2f} {cpu:8.2f} {peak:+9.2f}", flush=True)
        self.last = self._now()


def warm_up() -> None:
    """Import what torch.export imports on its first call: that is no cost of a model."""
    jax_module = torch_bridge.convert(torch.nn.Linear(2, 2), (torch.ones(2, 2),))
    jax.make_jaxpr(lambda p, x: jax_module.apply(p, {}, x)[0])(jax_module.params, jax_module.batch[0])


def timed_parts(clock: Clock) -> None:
    """Print the parts of each export as they are done."""

    def timed(module: Any, name: str, label: str) -> None:
        plain = getattr(module, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            before = clock._now()
            result = plain(*args, **kwargs)
            clock.part(label, before)
            return result

        setattr(module, name, run)

    timed(stamp, "_taped", "    follow the module once")
    timed(stamp, "find_blocks", "    find repeated blocks")
    timed(stamp, "export", "    torch.export and decompose a piece")
    timed(programs, "_once", "  one batch size")
    timed(programs.shapes, "merge", "  merge two batch sizes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--layers", type=int, help="another depth")
    parser.add_argument("--whole", action="store_true", help="torch.export of the whole module")
    parser.add_argument("--cache", action="store_true", help="GPT-2 with use_cache, its default")
    parser.add_argument("--grad", action="store_true", help="also the jaxpr of value_and_grad")
    chosen = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warm_up()
    if chosen.whole:
        stamp.find_blocks = lambda _tape: ()
    build, vocabulary = MODELS[chosen.model](chosen.layers, chosen.cache)
    ids = torch.randint(0, vocabulary, (ROWS, LENGTH))
    clock = Clock()
    with torch_bridge.fake_init():
        module = build()
    clock.part("build")
    timed_parts(clock)
    converting = clock._now()
    jax_module = torch_bridge.convert(module, kwargs={"input_ids": ids, "labels": ids.clone()})
    clock.part("convert", converting)
    given = {"rng": jax.random.key(0), "model_state": jax_module.model_state, "frozen": jax_module.frozen}
    loss = functools.partial(jax_module.loss_fn, **{name: given[name] for name in jax_module.takes})
    clock.last = clock._now()
    jaxpr = jax.make_jaxpr(loss)(jax_module.params, jax_module.batch)
    clock.part("jaxpr of the loss")
    clock.part("all", clock.start)
    program = jax_module.programs.first
    print(f"{jax_module}; every batch size: {jax_module.one_export}")
    counts = len(program.graph.nodes), program.num_copies, len(jaxpr.jaxpr.eqns)
    print("{} nodes, {} blocks stamped, {} equations".format(*counts))
    if chosen.grad:
        jax.make_jaxpr(jax.grad(loss))(jax_module.params, jax_module.batch)
        clock.part("jaxpr of the gradient")


if __name__ == "__main__":
    main()
