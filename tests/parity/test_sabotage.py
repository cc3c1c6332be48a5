"""The comparison can fail: every way of breaking the runtime on purpose is seen.

Each breaks one thing that pipelines have been known to get wrong, on a case that passes unbroken.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rannc_jax import Remat
from rannc_jax.runtime import ending, lower, stage, table
from rannc_jax.runtime.table import StageTable
from tests.parity.cases import Case
from tests.parity.play import play

Patch = pytest.MonkeyPatch


def case(model: str, replicas: tuple[int, ...], *, dropout: bool = False, schedule: str = "1f1b") -> Case:
    return Case(
        model=model,
        dropout=dropout,
        replicas=replicas,
        num_microbatches=4,
        schedule=schedule,
        remat=Remat.SAVE_ALL,
        optimizer="sgd",
    )


def every_microbatch_counts_the_same(patch: Patch) -> None:
    real = ending.total_loss

    def broken(rule: Any, divisor: Any) -> Callable[..., Any]:
        def run(losses: Any, weights: Any) -> tuple[Any, Any, Any]:
            return real(rule, divisor)(losses, [jnp.ones_like(w) for w in weights])

        return run

    patch.setattr(ending, "total_loss", broken)


def gradients_are_summed_and_not_divided(patch: Patch) -> None:
    real = ending.total_loss

    def broken(rule: Any, divisor: Any) -> Callable[..., Any]:
        def run(losses: Any, weights: Any) -> tuple[Any, Any, Any]:
            loss, scale, total = real(rule, divisor)(losses, weights)
            return loss, jnp.ones_like(scale), total

        return run

    patch.setattr(ending, "total_loss", broken)


def a_microbatch_without_labels_is_kept(patch: Patch) -> None:
    real = table.Seeding
    patch.setattr(table, "Seeding", lambda **given: real(**{**given, "select": False}))


def replicas_draw_the_same_mask(patch: Patch) -> None:
    real = stage.random_rows_hook
    patch.setattr(stage, "random_rows_hook", lambda layout, rows, parts, part: real(layout, rows, parts, 0))


def microbatches_draw_the_same_mask(patch: Patch) -> None:
    def broken(layout: Any) -> Callable[..., Any]:
        return jax.jit(lambda key: tuple(jax.random.fold_in(key, 0) for _ in range(layout.num_microbatches)))

    patch.setattr(lower, "_keys_program", broken)


def only_one_reader_of_a_tied_parameter_counts(patch: Patch) -> None:
    real = ending._total_gradients

    def broken(stages: StageTable, out: Any, readers: Any, s: int) -> None:
        real(stages, out, readers, s)
        if f"grads{s}" in out.programs:
            add = out.programs[f"grads{s}"]
            out.programs[f"grads{s}"] = lambda first, *others: add(first, *map(jnp.zeros_like, others))

    patch.setattr(ending, "_total_gradients", broken)


def only_one_reader_of_a_skip_sends_a_gradient(patch: Patch) -> None:
    real = StageTable.takers
    patch.setattr(StageTable, "takers", lambda self, v: real(self, v)[:1])


def statistics_do_not_thread_through_microbatches(patch: Patch) -> None:
    real = StageTable.input_key

    def broken(self: StageTable, v: int, i: int, s: int) -> Any:
        key = real(self, v, i, s)
        return (*key[:2], 0) if key[0] == "state" else key

    patch.setattr(StageTable, "input_key", broken)


BROKEN = {
    every_microbatch_counts_the_same: case("masked", (1, 1)),
    gradients_are_summed_and_not_divided: case("mlp", (1, 1)),
    # where forward and backward are one program, XLA itself makes 0 / 0 times a converted mask a selection
    a_microbatch_without_labels_is_kept: case("masked", (1, 1), schedule="gpipe"),
    replicas_draw_the_same_mask: case("mlp", (2,), dropout=True),
    microbatches_draw_the_same_mask: case("mlp", (1, 1), dropout=True),
    only_one_reader_of_a_tied_parameter_counts: case("transformer", (1, 1)),
    only_one_reader_of_a_skip_sends_a_gradient: case("unet", (1, 1, 1, 1)),
    statistics_do_not_thread_through_microbatches: case("batch_norm", (1, 1)),
}


@pytest.mark.parametrize("sabotage", BROKEN, ids=lambda sabotage: sabotage.__name__)
def test_a_broken_runtime_is_seen_when(sabotage: Callable[[Patch], None], monkeypatch: Patch) -> None:
    sabotage(monkeypatch)
    assert play(BROKEN[sabotage]).comparison.problems
