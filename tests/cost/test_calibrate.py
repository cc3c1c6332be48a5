"""Measured figures: what a calibration finds on the devices of this process, and the file made of it."""

import time
import tomllib
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from rannc_jax.cli import main
from rannc_jax.cluster import DeviceSpec
from rannc_jax.config import load_cluster, load_device
from rannc_jax.config.write import device_text
from rannc_jax.cost import device_preset
from rannc_jax.cost.calibrate import calibrate
from rannc_jax.cost.timing import Clock, attempt
from rannc_jax.errors import CostError


class Notes:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


def test_a_device_file_says_what_the_device_is() -> None:
    for kind in ("h200", "cpu"):
        device = replace(device_preset(kind), kind='a "board"', efficiency={"convolution": 0.5})
        read = load_device(tomllib.loads(device_text(device, ("measured here",))))
        assert read.flops_per_s == pytest.approx(device.flops_per_s, rel=1e-4)
        assert read.efficiency == {"convolution": 0.5, "attention": 1.0}
        assert read.bytes_per_s == pytest.approx(device.bytes_per_s, rel=1e-4)
        assert (read.kind, read.platform) == ('a "board"', device.platform)


def test_calibrating_writes_a_file_that_a_mesh_file_can_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "here.toml"
    assert main(["calibrate", "--out", str(path), "--seconds", "0.5"]) == 0
    out = capsys.readouterr()
    device = load_device(path)
    assert device.platform == jax.default_backend()
    assert device.flops_per_s["float32"] > 1e6
    assert "product float32: " in out.err
    cluster = load_cluster({"version": 1, "devices": [{"kind": str(path), "count_per_host": 1}]})
    assert cluster.device(0) == device


def test_what_there_was_no_time_for_is_said() -> None:
    notes = Notes()
    found = calibrate(jax.devices()[:1], seconds=1e-3, progress=notes)
    assert "convolution: the time was up" in found.skipped
    assert set(found.device.flops_per_s) == {"float32"}
    assert found.intra_host is None
    assert (
        found.device.efficiency
        == DeviceSpec(kind="", platform="cpu", memory_bytes=99, bytes_per_s=1).efficiency
    )
    with pytest.raises(CostError, match="no time"):
        calibrate(seconds=0)


def test_the_clock_sees_what_a_call_costs() -> None:
    seconds = Clock(5.0).seconds(lambda: time.sleep(0.005), most_s=0.1)
    assert 0.005 <= seconds < 0.05


def test_a_device_that_refuses_is_one_kind_of_error() -> None:
    def refuse() -> None:
        raise NotImplementedError("no such units\nstack ...")

    with pytest.raises(CostError, match="product int8 cannot be measured here"):
        attempt(refuse, "product int8")
