"""Plans as files: an exact round trip, and a precise refusal of everything else."""

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rannc_jax.errors import PlanError
from rannc_jax.plan import Plan
from tests.plan.plans import plans, small_plan

Keys = tuple[str | int, ...]


def places(data: Any, keys: Keys = ()) -> Iterator[Keys]:
    """The key path of every value inside `data`."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*keys, key)
        yield from places(value, (*keys, key))


def put(data: Any, keys: Keys, value: Any) -> None:
    for key in keys[:-1]:
        data = data[key]
    data[keys[-1]] = value


def spelled(keys: Keys) -> str:
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return text.removeprefix(".")


SMALL = json.loads(small_plan().to_json())


@given(plan=plans())
def test_a_plan_reads_back_equal(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan


@given(plan=plans())
def test_every_plan_can_be_printed(plan: Plan) -> None:
    assert len(str(plan).splitlines()) >= 5 + plan.num_stages


def test_a_saved_plan_is_json_that_a_person_can_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    small_plan().save(path)
    assert Plan.load(path) == small_plan()
    data = json.loads(path.read_text())
    assert data["stages"][0]["remat"] == "recompute"
    assert data["cluster"]["groups"][0]["device"]["kind"] == "cpu"
    assert data["blocks"][1]["equations"] == [[4, 9], [11, 12]]


@given(keys=st.sampled_from(sorted(places(SMALL), key=spelled)))
def test_a_value_of_the_wrong_type_is_refused_with_its_key_path(keys: Keys) -> None:
    data = json.loads(json.dumps(SMALL))
    put(data, keys, None)
    with pytest.raises(PlanError) as caught:
        Plan.from_json(json.dumps(data))
    expected = "version: got null" if keys == ("version",) else f"{spelled(keys)}: got null, expected "
    assert expected in str(caught.value)


@given(keys=st.sampled_from([keys for keys in places(SMALL) if isinstance(keys[-1], str)]))
def test_a_missing_key_is_named(keys: Keys) -> None:
    data = json.loads(json.dumps(SMALL))
    place = data
    for key in keys[:-1]:
        place = place[key]
    del place[keys[-1]]
    if len(keys) > 1 and keys[-2] == "efficiency":  # what is missing is as for any device
        assert Plan.from_json(json.dumps(data)) == small_plan()
        return
    free = {"versions", "memory_bytes", "flops_per_s"}  # tables whose keys are free names
    if len(keys) > 1 and keys[-2] in free:
        assert Plan.from_json(json.dumps(data)) != small_plan()
        return
    with pytest.raises(PlanError) as caught:
        Plan.from_json(json.dumps(data))
    assert f"{spelled(keys)}: missing" in str(caught.value)


def test_an_unknown_key_is_named_with_the_nearest_known_one() -> None:
    data = json.loads(json.dumps(SMALL))
    data["stages"][1]["remats"] = "save_all"
    with pytest.raises(PlanError, match=r'stages\[1\]\.remats: unknown key; did you mean "remat"\?'):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize(
    "keys, value, expected",
    [
        (("rows",), 0, "rows: got 0, expected 1 or more"),
        (("num_microbatches",), 17, "num_microbatches: got 17, expected 1 to rows (16)"),
        (("schedule",), "", "schedule: got nothing"),
        (("batching",), "seperable", 'batching: got "seperable"'),
        (("loss",), "avg", 'loss: got "avg", expected one of "mean"'),
        (("step_s",), -1.0, "step_s: got -1.0, expected a finite number of 0 or more"),
        (("bubble_fraction",), 1.0, "bubble_fraction: got 1.0"),
        (("blocks", 0, "equations"), [[4, 4]], "blocks[0].equations[0]: got [4, 4]"),
        (("blocks", 0, "equations"), [[0, 5]], "blocks[1].equations: equation 4 is in blocks[0] too"),
        (("blocks", 0, "equations"), [[0, 5, 6]], "equations[0]: got a list of 3, expected a list of 2"),
        (("stages",), [], "stages: got none, expected 1 or more"),
        (("stages", 0, "blocks"), [0, 1], "blocks[2]: is in 0 stages, expected exactly one"),
        (("stages", 1, "blocks"), [2, 3], "blocks[2]: is in 2 stages, expected exactly one"),
        (("stages", 1, "blocks"), [4], "stages[1].blocks: got 4, expected an index below 4"),
        (("stages", 1, "devices"), [1, 4], "stages[1].devices: got 4, expected an index below 4"),
        (("stages", 1, "devices"), [1, 1], "stages[1].devices: got [1, 1], expected each device once"),
        (("stages", 1, "devices"), [], "stages[1].devices: got none"),
        (("stages", 1, "devices"), [0, 1], "stages[1].devices: shares device 0 with stages[0], expected all"),
        (("stages", 0, "remat"), "save_mat", 'stages[0].remat: got "save_mat", expected one of "save_all"'),
        (("stages", 0, "memory_bytes"), {"parameters": -1}, "stages[0].memory_bytes.parameters: got -1"),
        (("crossings", 0, "targets"), [0], "crossings[0].targets: got [0], expected stages after its source"),
        (("crossings", 0, "targets"), [2], "crossings[0].targets: got 2, expected an index below 2"),
        (("ties", 0, "owner"), 2, "ties[0].owner: got 2, expected an index below 2"),
        (("runners_up", 0, "step_s"), -2, "runners_up[0].step_s: got -2"),
        (("cluster", "groups", 0, "device", "memory_bytes"), 0, "device kind 'cpu' is not usable"),
        (("cluster", "groups", 0, "device", "launch_s"), 1e300, "device kind 'cpu' is not usable"),
        (("cluster", "intra_host", "bytes_per_s"), 0.0, "cluster.intra_host: a link is not usable"),
        (("cluster", "inter_host", "latency_s"), -1.0, "cluster.inter_host: a link is not usable"),
        (("step_s",), 10**400, "step_s: got "),
        (("version",), 4, "version: got 4, this release reads version 3"),
    ],
)  # fmt: skip
def test_a_plan_that_contradicts_itself_is_refused(keys: Keys, value: Any, expected: str) -> None:
    data = json.loads(json.dumps(SMALL))
    put(data, keys, value)
    with pytest.raises(PlanError) as caught:
        Plan.from_json(json.dumps(data))
    assert expected in str(caught.value)


def test_all_mistakes_of_a_plan_are_reported_at_once() -> None:
    data = json.loads(json.dumps(SMALL))
    data["rows"] = "many"
    del data["loss"]
    data["stages"][0]["devices"] = [0.5]
    with pytest.raises(PlanError, match="the plan has 3 mistakes"):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize("content", ["", "{", "[]", "3", '{"version": 1}', "NaN", "9" * 5000, "[" * 10**5])
def test_text_that_is_no_plan_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(PlanError, match=r"plan\.json cannot be loaded"):
        Plan.load(path)


def test_a_plan_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "plan.json"
    small_plan().save(path)
    before = path.read_text()

    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        dataclasses.replace(small_plan(), notes=("another",)).save(path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    dataclasses.replace(small_plan(), notes=("another",)).save(path)
    assert Plan.load(path).notes == ("another",)


def test_numpy_numbers_are_saved_as_numbers() -> None:
    plan = small_plan()
    object.__setattr__(plan, "rows", np.int64(16))
    object.__setattr__(plan, "step_s", np.float32(0.5))
    data = json.loads(plan.to_json())
    assert (data["rows"], data["step_s"]) == (16, 0.5)
