"""The command line: what it prints, and the status it returns."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from rannc_jax import Plan, Remat
from rannc_jax.cli import main
from tests.plan.plans import small_plan


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    small_plan().save(path)
    return path


def test_show_prints_the_table(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(plan_file)]) == 0
    assert capsys.readouterr().out == f"{small_plan()}\n"


def test_diff_of_equal_plans_is_0(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(plan_file), str(plan_file)]) == 0
    assert capsys.readouterr().out == "no difference\n"


def test_diff_of_other_plans_is_1(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = plan_file.with_name("other.json")
    dataclasses.replace(small_plan(), schedule="gpipe").save(other)
    assert main(["diff", str(plan_file), str(other)]) == 1
    assert "microbatches, 1f1b -> " in capsys.readouterr().out


PROBLEM = """
import jax, jax.numpy as jnp

def loss_fn(params, batch):
    x = batch["x"]
    for name in params:
        with jax.named_scope(name):
            x = jnp.tanh(x @ params[name])
    return jnp.mean(x**2)

def problem():
    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    names = ("embed", "layer_1", "layer_2", "head")
    batch = {"x": jax.ShapeDtypeStruct((16, 64), jnp.float32)}
    return {"fn": loss_fn, "params": dict.fromkeys(names, shape), "batch": batch}
"""
MESH = """
version = 1
[[devices]]
kind = "h100"
count_per_host = 4
[links.intra_host]
kind = "nvlink4"
"""


def test_a_model_is_planned_with_constraints_saved_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "problem.py").write_text(PROBLEM)
    (tmp_path / "mesh.toml").write_text(MESH)
    target, mesh, out = (str(tmp_path / name) for name in ("problem.py:problem", "mesh.toml", "plan.json"))
    fixed = ["--cuts", "layer_2", "--replicas", "2,auto", "--remat", "layer_1=recompute,-1=save_all"]
    fixed += ["--num-microbatches", "2-4", "--schedule", "gpipe", "--memory-limit-gib", "1"]
    assert main(["plan", target, "--mesh", mesh, "--out", out, *fixed]) == 0
    assert "[" in capsys.readouterr().err  # progress
    plan = Plan.load(out)
    assert [stage.remat for stage in plan.stages] == [Remat.RECOMPUTE, Remat.SAVE_ALL]
    assert (plan.stages[0].num_replicas, plan.schedule) == (2, "gpipe")
    assert plan.num_microbatches in (2, 4)
    assert main(["simulate", out, "--width", "30"]) == 0
    assert "F" in capsys.readouterr().out
    assert main(["plan", target, "--mesh", mesh, "--remat", "layer_9=recompute"]) == 2
    assert "remat names 'layer_9', but no module" in capsys.readouterr().err
    for wrong, said in (("problem.py:loss", "has no 'loss'"), ("no.py:x", "there is no file")):
        assert main(["plan", str(tmp_path / wrong)]) == 2
        assert said in capsys.readouterr().err


def test_a_mistake_is_one_message_and_status_2(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_file.write_text('{"version": 1}')
    assert main(["show", str(plan_file)]) == 2
    assert capsys.readouterr().err.startswith(f"PlanError: {plan_file} cannot be loaded.\n")
    assert main(["show", str(plan_file.with_name("absent.json"))]) == 2
    assert capsys.readouterr().err.startswith("FileNotFoundError: ")


def test_doctor_lists_versions_settings_and_devices(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_A_SETTING", "7")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"  jax {jax.__version__}\n" in out
    assert "  NCCL_A_SETTING=7\n" in out
    assert all(f"  {device.id}: {device.platform} " in out for device in jax.devices())


def test_it_runs_as_a_module(plan_file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rannc_jax", "show", str(plan_file)],
        capture_output=True, text=True, check=True, timeout=300, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stdout == f"{small_plan()}\n"
