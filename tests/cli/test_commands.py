"""The command line: what it prints, and the status it returns."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import jax
import pytest

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
