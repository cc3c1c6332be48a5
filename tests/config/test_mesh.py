"""Mesh files: what they mean, and what each mistake in them prints."""

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rannc_jax.config import load_cluster, load_device
from rannc_jax.cost.presets import device_preset, link_preset
from rannc_jax.errors import ConfigError

MESHES = Path(__file__).parents[2] / "examples" / "meshes"

GOOD: dict[str, Any] = {
    "version": 1,
    "devices": [{"kind": "h200", "hosts": 2, "count_per_host": 4, "memory_gib": 100.0}],
    "links": {
        "intra_host": {"gib_per_s": 2.0, "latency_us": 12.0},
        "inter_host": {"gbit_per_s": 8.0, "latency_us": 20},
    },
    "axes": {"stage": 4, "data": "auto"},
}
DEVICE: dict[str, Any] = {
    "version": 1,
    "kind": "my board",
    "platform": "gpu",
    "memory_gib": 20,
    "memory_gib_per_s": 800.0,
    "launch_us": 3.0,
    "tflops_per_s": {"bfloat16": 100.0},
}


def changed(changes: Mapping[str, Any]) -> dict[str, Any]:
    """GOOD with some key paths set to other values, or removed if that value is `...`."""
    table = copy.deepcopy(GOOD)
    for path, value in changes.items():
        *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
        place: Any = table
        for key in parents:
            place = place[key]
        if value is ...:
            del place[last]
        else:
            place[last] = value
    return table


def mistakes_of(source: Any) -> list[str]:
    """The detail lines of the one error that loading `source` raises."""
    with pytest.raises(ConfigError) as caught:
        load_cluster(source)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


@pytest.mark.parametrize("name", sorted(path.name for path in MESHES.glob("*.toml")))
def test_every_example_mesh_loads(name: str) -> None:
    assert load_cluster(MESHES / name).num_devices >= 1


def test_the_example_meshes_are_the_five_that_the_docs_name() -> None:
    expected = {"one_host_8_h200", "two_hosts_a100", "mixed", "cpu8", "laptop"}
    assert {path.stem for path in MESHES.glob("*.toml")} == expected


def test_units_become_si() -> None:
    cluster = load_cluster(GOOD)
    assert cluster.num_devices == 8
    assert cluster.device(0).memory_bytes == 100 * 2**30
    assert cluster.link(0, 1).bytes_per_s == 2 * 2**30
    assert cluster.link(3, 4).bytes_per_s == 1e9
    assert math.isclose(cluster.link(3, 4).latency_s, 20e-6)
    assert cluster.axes == {"stage": 4}


def test_keys_override_the_preset_and_the_rest_of_it_stays() -> None:
    preset = device_preset("h200")
    given = {"tflops_per_s": {"float32": 7.0}, "kind": "h200", "count_per_host": 1, "hosts": 2}
    device = load_cluster(changed({"devices.0": given, "axes": {}})).device(0)
    assert device.flops_per_s == {**preset.flops_per_s, "float32": 7e12}
    assert device.memory_bytes == preset.memory_bytes


def test_a_link_may_be_a_preset_with_overrides() -> None:
    cluster = load_cluster(
        changed(
            {
                "links.intra_host": {"kind": "nvlink4", "latency_us": 7.0},
                "links.inter_host": {"kind": "net100g"},
            }
        )
    )
    assert cluster.intra_host.bytes_per_s == link_preset("nvlink4").bytes_per_s
    assert math.isclose(cluster.intra_host.latency_s, 7e-6)
    assert cluster.inter_host == link_preset("net100g")


def test_groups_may_differ() -> None:
    cluster = load_cluster(MESHES / "mixed.toml")
    assert cluster.device(0).kind != cluster.device(4).kind
    assert [cluster.host(i) for i in (0, 3, 4, 8, 11)] == [0, 0, 1, 2, 2]


def test_kind_may_be_a_device_file_beside_the_mesh_file(tmp_path: Path) -> None:
    (tmp_path / "board.toml").write_text(
        'version = 1\nkind = "my board"\nplatform = "gpu"\nmemory_gib = 20\nmemory_gib_per_s = 800\n'
    )
    (tmp_path / "mesh.toml").write_text(
        'version = 1\n[[devices]]\nkind = "board.toml"\ncount_per_host = 1\nmemory_margin = 0.25\n'
    )
    device = load_cluster(tmp_path / "mesh.toml").device(0)
    assert (device.kind, device.memory_bytes, device.memory_margin) == ("my board", 20 * 2**30, 0.25)


def test_a_wrong_device_file_is_reported_under_the_kind_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "board.toml").write_text('version = 1\nkind = "my board"\nplatform = "tpu"\n')
    mesh = tmp_path / "mesh.toml"
    mesh.write_text('version = 1\n[[devices]]\nkind = "board.toml"\ncount_per_host = 1\n')
    text = "\n".join(mistakes_of(mesh))
    assert 'platform: got "tpu", expected one of "cpu", "gpu"' in text
    assert text.startswith("devices[0].kind: ")
    assert "memory_gib_per_s: missing" in text


def test_a_device_file_reads_back_as_its_spec() -> None:
    device = load_device(DEVICE)
    assert device.flops_per_s == {"bfloat16": 1e14}
    assert math.isclose(device.launch_s, 3e-6)


def test_three_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    mesh = tmp_path / "mesh.toml"
    mesh.write_text(
        "version = 1\n[[devices]]\nkind = 'h20'\ncount_per_hots = 8\ncount_per_host = 8\nmemory_gib = -3\n"
        "[links.intra_host]\ngib_per_s = 1.0\nlatency_us = 1.0\n"
    )
    with pytest.raises(ConfigError, match=r"mesh\.toml has 3 mistakes\.") as caught:
        load_cluster(mesh)
    lines = str(caught.value).splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines] == [
        "devices[0].kind",
        "devices[0].memory_gib",
        "devices[0].count_per_hots",
    ]
    assert 'got "h20"' in lines[0]
    assert 'did you mean "h200"?' in lines[0]
    assert "got -3, expected a number above 0" in lines[1]
    assert 'unknown key; did you mean "count_per_host"?' in lines[2]


@pytest.mark.parametrize(
    "path, value, expected",
    [
        ("version", ..., "version: missing, expected version = 1"),
        ("version", 2, "version: got 2, this release reads version 1"),
        ("version", True, "version: got true, this release reads version 1"),
        ("devices", ..., "devices: missing, expected one or more [[devices]] tables"),
        ("devices", [], "devices: got a list of 0, expected one or more [[devices]] tables"),
        ("devices", {"kind": "h200"}, "devices: got a table, expected one or more [[devices]] tables"),
        ("devices", [3], "devices[0]: got 3, expected a table"),
        ("devices.0.kind", ..., "devices[0].kind: missing, expected a string"),
        ("devices.0.kind", 200, "devices[0].kind: got 200, expected a string"),
        ("devices.0.hosts", 0, "devices[0].hosts: got 0, expected an integer of 1 or more"),
        ("devices.0.hosts", 2.0, "devices[0].hosts: got 2.0, expected an integer of 1 or more"),
        ("devices.0.count_per_host", "8", 'devices[0].count_per_host: got "8", expected an integer'),
        ("devices.0.memory_gib", True, "devices[0].memory_gib: got true, expected a number above 0"),
        ("devices.0.memory_gib", math.nan, "devices[0].memory_gib: got nan, expected a number above 0"),
        ("devices.0.memory_gib", math.inf, "devices[0].memory_gib: got inf, expected a number above 0"),
        ("devices.0.memory_margin", 1.0, "devices[0].memory_margin: got 1.0, expected a number of 0 or more"),
        ("devices.0.tflops_per_s", {"bf16": 1.0}, "devices[0].tflops_per_s.bf16: unknown key"),
        ("links.intra_host", ..., "links.intra_host: missing"),
        ("links.inter_host", ..., "links.inter_host: missing"),
        ("links", ..., "links.intra_host: missing"),
        ("links", 3, "links: got 3, expected a table"),
        ("links.intra_host.gbit_per_s", 1.0, "expected exactly one of gib_per_s and gbit_per_s"),
        ("links.intra_host.gib_per_s", ..., "expected exactly one of gib_per_s and gbit_per_s"),
        (
            "links.intra_host",
            {"kind": "nvlink"},
            'links.intra_host.kind: got "nvlink", expected one of "nvlink2"',
        ),
        ("links.intra_host.latency_us", -1, "links.intra_host.latency_us: got -1, expected a number of 0"),
        ("links.intrahost", {}, 'links.intrahost: unknown key; did you mean "intra_host"?'),
        ("axes.stage", "atuo", 'expected an integer of 1 or more or "auto"; did you mean "auto"?'),
        ("axes.stages", 2, 'axes.stages: unknown key; did you mean "stage"?'),
        ("axes.data", 3, "axes: stage 4 x data 3 needs 12 devices, the file has 8"),
        ("linsk", {}, 'linsk: unknown key; did you mean "links"?'),
    ],
)
def test_a_mistake_is_named_with_its_path(path: str, value: Any, expected: str) -> None:
    assert any(expected in line for line in mistakes_of(changed({path: value})))


def test_a_missing_file_names_its_nearest_neighbour() -> None:
    with pytest.raises(ConfigError, match=r"there is no mesh file .*cpu9\.toml") as caught:
        load_cluster(MESHES / "cpu9.toml")
    assert "cpu8.toml', which is there." in str(caught.value)


def test_text_that_is_not_toml_shows_the_line(tmp_path: Path) -> None:
    mesh = tmp_path / "mesh.toml"
    mesh.write_text("version = 1\n[[devices]\nkind = 'h200'\n")
    with pytest.raises(ConfigError, match="is not TOML") as caught:
        load_cluster(mesh)
    assert "line 2: [[devices]" in str(caught.value)


PLACES = {
    "devices.0.hosts": "devices[0].hosts",
    "devices.0.count_per_host": "devices[0].count_per_host",
    "devices.0.memory_gib": "devices[0].memory_gib",
    "links.intra_host.gib_per_s": "links.intra_host.gib_per_s",
    "links.inter_host.latency_us": "links.inter_host.latency_us",
    "axes.stage": "axes.stage",
}
WRONG = st.one_of(
    st.integers(max_value=-1),
    st.floats(max_value=-1e-9),
    st.text(max_size=5).filter(lambda text: text != "auto"),
    st.lists(st.integers(), max_size=2),
    st.booleans(),
    st.dictionaries(st.just("a"), st.integers(), max_size=1),
)


@given(wrong=st.dictionaries(st.sampled_from(sorted(PLACES)), WRONG, min_size=1))
def test_any_number_of_wrong_values_gives_one_line_each(wrong: dict[str, Any]) -> None:
    found = [line.split(": ")[0] for line in mistakes_of(changed(wrong))]
    assert sorted(found) == sorted(PLACES[path] for path in wrong)
