"""Measured costs: equal blocks once, kept on disk, and analytic where nothing can run."""

import json
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rannc_jax
from rannc_jax.cluster import ClusterSpec, DeviceGroup
from rannc_jax.contract import Remat
from rannc_jax.cost import device_preset, link_preset, open_graph, price
from rannc_jax.cost import measured as measured_room
from rannc_jax.cost.cache import Cache, cache_folder
from rannc_jax.cost.fingerprint import program_text
from rannc_jax.cost.measured import MeasuredTable, Site, measure, sample_rows
from rannc_jax.errors import PlanError
from rannc_jax.ir.align import align
from rannc_jax.ir.example import make_example, subject
from rannc_jax.ir.graph import Graph
from rannc_jax.ir.trace import trace
from tests.cost import networks
from tests.cost.networks import graph_of

CPU = device_preset("cpu")


class Notes:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measured_room, "PROGRAM_S", 0.01)
    monkeypatch.setenv("RANNC_JAX_CACHE", str(tmp_path / "cache"))


def cluster(kind: str = "cpu") -> ClusterSpec:
    group = DeviceGroup(device=device_preset(kind), count_per_host=2)
    return ClusterSpec(groups=(group,), intra_host=link_preset("host"), inter_host=link_preset("net100g"))


def layers(graph: Graph, depth: int) -> list[list[int]]:
    """One block a layer, the loss with the last."""
    blocks: list[list[int]] = [[] for _ in range(depth)]
    for index, node in enumerate(graph.nodes):
        where = int(node.path.split("/")[1]) if node.path.startswith("layer/") else depth - 1
        blocks[where].append(index)
    return blocks


def site_of(depth: int = 3, rows: tuple[int, ...] = (4,), kind: str = "cpu"):
    who = subject(networks.mlp_loss, is_loss=True)
    example = make_example(who, networks.mlp_params(depth=depth), networks.mlp_batch())
    graph = graph_of(networks.mlp_loss, networks.mlp_params(depth=depth), networks.mlp_batch())
    blocks, found = layers(graph, depth), cluster(kind)
    site = Site(
        graph=graph,
        blocks=blocks,
        trace_at=lambda n: align(graph.program, trace(who, example, n)),
        rows=rows,
        cluster=found,
    )
    return price(graph, blocks, found, optimizer_bytes={}, opened=open_graph(graph)), site


def test_equal_blocks_are_measured_once_and_then_remembered() -> None:
    table, site = site_of(depth=4)
    first, second = Notes(), Notes()
    one = measure(table, site, progress=first)
    # The first layer has no gradient towards its input, the last one has the loss; two are equal.
    assert len(first.lines) == 3
    two = measure(table, site, progress=second)
    assert second.lines == []
    for block in range(4):
        assert one.price(block, 4, CPU) == two.price(block, 4, CPU)
    assert one.price(1, 4, CPU) == one.price(2, 4, CPU)


def test_seconds_are_measured_and_bytes_are_not() -> None:
    table, site = site_of()
    found = measure(table, site)
    was, now = table.price(1, 4, CPU), found.price(1, 4, CPU)
    assert (was.residual_bytes, was.working_bytes) == (now.residual_bytes, now.working_bytes)
    assert now.forward_s > 0
    assert now.forward_s != was.forward_s
    assert set(now.backward_s) == set(Remat)
    assert (found.blocks, found.values, found.ties) == (table.blocks, table.values, table.ties)


def test_between_measurements_the_ratio_follows_the_logarithm_of_the_rows() -> None:
    table, _ = site_of()
    ratios = [{2: {"forward": 1.0}, 8: {"forward": 3.0}}, {}, {}]
    found = MeasuredTable(table, CPU, ratios)
    for rows, expected in ((1, 1.0), (2, 1.0), (4, 2.0), (8, 3.0), (64, 3.0)):
        ratio = found.price(0, rows, CPU).forward_s / table.price(0, rows, CPU).forward_s
        assert ratio == pytest.approx(expected)
    assert found.price(0, 4, CPU).backward_s == table.price(0, 4, CPU).backward_s
    assert found.price(1, 4, CPU) == table.price(1, 4, CPU)


def test_a_block_that_cannot_run_keeps_analytic_costs_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    table, site = site_of()
    monkeypatch.setattr(measured_room._Block, "seconds", refuse)
    with pytest.warns(UserWarning, match=r"3 blocks cannot .*layer/0.*RESOURCE_EXHAUSTED") as seen:
        found = measure(table, site)
    assert len(seen) == 1
    assert found.price(1, 4, CPU) == table.price(1, 4, CPU)


def test_another_platform_than_the_one_here_keeps_analytic_costs() -> None:
    table, site = site_of(kind="h200")
    with pytest.warns(UserWarning, match="for h200 .gpu., but the devices here are cpu"):
        found = measure(table, site)
    device = device_preset("h200")
    assert found.price(1, 4, device) == table.price(1, 4, device)


def test_a_damaged_entry_counts_as_missing(tmp_path: Path) -> None:
    cache, key = Cache(tmp_path), Cache.key("a", "b")
    assert cache.read(key) is None
    cache.write(key, {"forward": 1.5})
    assert cache.read(key) == {"forward": 1.5}
    (path,) = tmp_path.rglob("*.json")
    whole = path.read_text()
    for damaged in (
        whole[:20],
        "",
        "[]",
        whole.replace("1.5", '"x"'),
        whole.replace("1.5", "NaN"),
        whole.replace("1.5", "-1.5"),
        whole.replace("1.5", "1e300"),
        whole.replace('"version": 1', '"version": 0'),
    ):
        path.write_text(damaged)
        assert cache.read(key) is None
    cache.write(key, {"forward": 2.5})
    assert cache.read(key) == {"forward": 2.5}
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == [path.name]  # nothing half-written
    assert json.loads(path.read_text())["key"] == key


def test_a_folder_that_cannot_be_written_remembers_nothing(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    cache = Cache(blocked)
    cache.write(Cache.key("a"), {"forward": 1.0})
    assert cache.read(Cache.key("a")) is None


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("RANNC_JAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "rannc_jax"


def test_the_text_of_a_program_has_no_names_in_it() -> None:
    def one(x):
        with jax.named_scope("first"):
            return jax.nn.relu(x) * 2.0

    def two(y):
        return jax.nn.relu(y) * 2.0

    def other(y):
        return jax.nn.relu(y) * 3.0

    x = jnp.ones((2, 3))
    texts = [program_text(jax.make_jaxpr(f)(x)) for f in (one, two, other)]
    assert texts[0] == texts[1] != texts[2]
    assert " at 0x" not in texts[0]
    tables = [np.arange(100.0), np.arange(100.0) + 1]
    first, second = (program_text(jax.make_jaxpr(lambda x, t=t: x + t)(jnp.ones(100))) for t in tables)
    assert first != second


def test_sampled_rows_span_what_a_search_asks() -> None:
    assert sample_rows(64, 4, None) == (4, 11, 32)
    assert sample_rows(64, 4, 8) == (2, 4, 8)
    assert sample_rows(1, 8, None) == (1,)


def test_a_plan_with_measured_costs() -> None:
    arguments = (networks.mlp_loss, networks.mlp_params(), networks.mlp_batch(rows=8))
    keywords = {"optimizer": optax.sgd(0.1), "mesh": cluster(), "num_stages": 2, "num_microbatches": 4}
    notes = Notes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = rannc_jax.make_plan(*arguments, **keywords, costs="measured", progress=notes)
    assert plan.num_stages == 2
    assert any(line.startswith("measuring ") for line in notes.lines)
    analytic = rannc_jax.make_plan(*arguments, **keywords)
    assert plan.stages[0].forward_s != analytic.stages[0].forward_s
    with pytest.raises(PlanError, match="costs='guessed' is not known"):
        rannc_jax.make_plan(*arguments, **keywords, costs="guessed")
