"""What a user reads after a mistake: `python -m tests.messages` makes every mistake and prints what is said.

To be read with a newcomer's eyes: does it say what was wrong, where, and what to do?
"""

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tests.environment  # noqa: F401 - before jax

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
import optax

import rannc_jax

WIDTH = 64
PARAMS = {f"w{i}": jax.random.normal(jax.random.key(i), (WIDTH, WIDTH)) / 8 for i in range(4)}


def batch_of(rows: int) -> dict[str, np.ndarray]:
    values = np.random.default_rng(0).standard_normal((2, rows, WIDTH)).astype(np.float32)
    return {"x": values[0], "y": values[1]}


def hidden(params: Any, x: Any) -> Any:
    for name in sorted(params):
        x = jnp.tanh(x @ params[name])
    return x


def loss_fn(params: Any, batch: Any) -> Any:
    return jnp.mean((hidden(params, batch["x"]) - batch["y"]) ** 2)


def contrastive(params: Any, batch: Any) -> Any:
    x, y = hidden(params, batch["x"]), hidden(params, batch["y"])
    scores = x @ y.T  # every row against every other: in-batch negatives
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(scores)))


ONE_HOST = {
    "version": 1,
    "devices": [{"kind": "h100", "count_per_host": 8}],
    "links": {"intra_host": {"kind": "nvlink4"}},
}


def layered(params: Any, batch: Any) -> Any:
    x = batch["x"]
    for name in params:
        with jax.named_scope(name):
            x = jnp.tanh(x @ params[name])
    return jnp.mean((x - batch["y"]) ** 2)


def planned(fn: Callable[..., Any], widths: tuple[int, ...], **settings: Any) -> Any:
    """Plan an embedding and layers of these widths, for 8 H100; nothing is allocated."""
    shapes = itertools.pairwise(widths)
    params = {
        f"layer_{index}" if index else "embed": jax.ShapeDtypeStruct(shape, jnp.float32)
        for index, shape in enumerate(shapes)
    }
    batch = {key: jax.ShapeDtypeStruct((32, widths[0]), jnp.float32) for key in "xy"}
    settings = {"optimizer": optax.adamw(1e-4), "mesh": ONE_HOST, **settings}
    return rannc_jax.make_plan(fn, params, batch, **settings)


def start(fn: Callable[..., Any], batch: Any, **settings: Any) -> tuple[Any, Any]:
    step = rannc_jax.auto_partition(fn, optimizer=optax.sgd(0.1), **settings)
    return step, step.init(PARAMS, batch)


def mesh_file() -> Any:
    path = Path(tempfile.mkdtemp()) / "mesh.toml"
    path.write_text(
        'version = 1\n[[devices]]\nkind = "h20"\ncuont_per_host = 8\nhosts = 0\n'
        "[links.intra_host]\nbytes_per_s = -3\nlatency_s = 1e-6\n"
    )
    return rannc_jax.load_cluster(path)


def memory_limit() -> Any:
    return start(loss_fn, batch_of(16), memory_limit_bytes=2**14)


def fits_nowhere() -> Any:
    return planned(layered, (2**18,) * 5)


def whole_state() -> Any:
    return planned(layered, (2**16,) * 5, sharding="replicated")


def layer_too_large() -> Any:
    return planned(layered, (1024, 1024, 8_000_000, 1024))


def cut_at_the_beginning() -> Any:
    return planned(layered, (1024,) * 5, cuts=("embed", "layer_2"))


def cut_nowhere() -> Any:
    return planned(layered, (1024,) * 5, cuts=("layer.2",))


def modes_that_contradict_the_cut() -> Any:
    remat = {"layer_1": "recompute", "layer_2": "save_all"}
    return planned(layered, (1024,) * 5, cuts=("layer_1", "layer_3"), remat=remat)


def stages_that_no_plan_has() -> Any:
    return planned(layered, (1024,) * 5, num_stages=1, remat={"embed": "recompute", "layer_3": "save_all"})


def no_devices() -> Any:
    return rannc_jax.load_cluster({"version": 1, "devices": []})


def no_parameters() -> Any:
    return rannc_jax.make_plan(
        lambda params, batch: jnp.mean(batch["x"] ** 2), {}, batch_of(16), optimizer=optax.sgd(0.1)
    )


def ten_rows_independent() -> Any:
    step, state = start(loss_fn, batch_of(10), num_stages=2, num_microbatches=4)
    state, out = step(state, batch_of(10))
    print("runs; loss", float(out.loss))
    print(step.plan.explain() if hasattr(step.plan, "explain") else step.plan)


def ten_rows_coupled() -> Any:
    return start(contrastive, batch_of(10), num_stages=2, num_microbatches=4, allow_coupled=True)


def other_model() -> Any:
    plan = rannc_jax.make_plan(loss_fn, PARAMS, batch_of(16), optimizer=optax.sgd(0.1))
    other = {name: PARAMS[name] for name in list(PARAMS)[:3]}
    return rannc_jax.parallelize(loss_fn, plan, optimizer=optax.sgd(0.1)).init(other, batch_of(16))


def in_batch_negatives() -> Any:
    return start(contrastive, batch_of(16), num_microbatches=4)


def rows_disagree() -> Any:
    return start(loss_fn, {"x": batch_of(16)["x"], "y": batch_of(12)["y"]})


def unsupported_operator() -> Any:
    import torch

    import torch_bridge

    library = torch.library.Library("messages", "DEF")
    library.define("mystery(Tensor x) -> Tensor")
    library.impl("mystery", lambda x: x * 2, "CompositeExplicitAutograd")
    torch.library.register_fake("messages::mystery", lambda x: torch.empty_like(x), lib=library)

    class Block(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.ops.messages.mystery(x)

    return torch_bridge.convert(torch.nn.Sequential(torch.nn.Linear(3, 3), Block()), (torch.ones(2, 3),))


def not_scalar() -> Any:
    return start(lambda params, batch: hidden(params, batch["x"]), batch_of(16))


def jitted_step() -> Any:
    step, state = start(loss_fn, batch_of(16))
    return jax.jit(step)(state, batch_of(16))


MISTAKES: dict[str, Callable[[], Any]] = {
    "a mesh file with mistakes": mesh_file,
    "a memory limit that nothing fits": memory_limit,
    "a model that cannot fit anywhere": fits_nowhere,
    "whole state where sharded state fits": whole_state,
    "a layer larger than a device": layer_too_large,
    "a cut where the program begins": cut_at_the_beginning,
    "a cut at a module that is not there": cut_nowhere,
    "two modes for modules that the cuts leave in one stage": modes_that_contradict_the_cut,
    "two modes and a single stage": stages_that_no_plan_has,
    "a mesh file without devices": no_devices,
    "a function without parameters": no_parameters,
    "10 rows in 4 microbatches, rows independent": ten_rows_independent,
    "10 rows in 4 microbatches, rows coupled": ten_rows_coupled,
    "a plan loaded for another model": other_model,
    "a contrastive loss with in-batch negatives and 4 microbatches": in_batch_negatives,
    "batch leaves whose first dims disagree": rows_disagree,
    "an operator of torch without a lowering": unsupported_operator,
    "a loss that is not scalar": not_scalar,
    "jax.jit(step)": jitted_step,
}


def main() -> None:
    """Make every mistake."""
    for title, make in MISTAKES.items():
        print(f"\n== {title}")
        try:
            make()
        except Exception as error:  # what is said is the point
            print(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
