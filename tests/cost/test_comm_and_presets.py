"""Link times have the right limits; presets are usable and close to what was measured."""

import pytest

from rannc_jax.cluster import LinkSpec
from rannc_jax.cost.comm import all_gather, all_reduce, reduce_scatter, send
from rannc_jax.cost.presets import PRESET_KINDS, PRESET_LINKS, device_preset, kind_of, link_preset
from rannc_jax.cost.roofline import rate
from rannc_jax.errors import CostError

GIB = 2**30


def test_one_device_has_nobody_to_talk_to():
    link = link_preset("nvlink4")
    assert all_reduce(link, GIB, 1) == all_gather(link, GIB, 1) == reduce_scatter(link, 0, 4) == 0
    assert send(link, 0) == 0


def test_an_all_reduce_is_a_scatter_of_the_sum_and_a_gather():
    link = LinkSpec(bytes_per_s=1e9, latency_s=1e-5)
    for devices in (2, 3, 8):
        both = reduce_scatter(link, 1e6, devices) + all_gather(link, 1e6, devices)
        assert all_reduce(link, 1e6, devices) == pytest.approx(both)


def test_large_transfers_take_what_was_measured_on_two_h200():
    link = link_preset("nvlink4")
    assert send(link, 512 * 2**20) == pytest.approx(0.5 / 347, rel=0.05)
    assert all_reduce(link, 512 * 2**20, 2) == pytest.approx(0.5 / 241, rel=0.05)


def test_rings_of_many_devices_pay_latency_by_the_step():
    link = LinkSpec(bytes_per_s=1e12, latency_s=1e-5)
    assert all_reduce(link, 8, 9) == pytest.approx(16e-5, rel=1e-3)


@pytest.mark.parametrize("kind", PRESET_KINDS)
def test_every_device_preset_has_the_rates_a_network_needs(kind):
    device = device_preset(kind)
    assert device.kind == kind
    for unit in ("", "float32", "tensorfloat32", "bfloat16", "float16", "float64", "int8"):
        assert rate(device, unit) > 1e9
    assert rate(device, "float16") >= rate(device, "float64") / 4


@pytest.mark.parametrize("name", PRESET_LINKS)
def test_every_link_preset_is_slower_than_device_memory(name):
    assert 1e9 < link_preset(name).bytes_per_s < device_preset("h200").bytes_per_s


def test_the_h200_preset_is_what_was_measured():
    device = device_preset("h200")
    assert 760e12 <= rate(device, "bfloat16") <= 790e12
    assert device.bytes_per_s == pytest.approx(4.3e12, rel=0.01)


@pytest.mark.parametrize(
    ("description", "memory_gib", "kind"),
    [
        ("NVIDIA H200", None, "h200"),
        ("NVIDIA A100-SXM4-40GB", None, "a100"),
        ("NVIDIA A100-SXM4-80GB", None, "a100-80gb"),
        ("Tesla V100-SXM2-32GB", None, "v100-32gb"),
        ("Tesla V100-SXM2", 31.7, "v100-32gb"),
        ("NVIDIA GeForce RTX 4090", None, "rtx4090"),
        ("Tesla T4", None, "t4"),
        ("cpu", 200, "cpu"),
        ("Some Accelerator", None, None),
    ],
)
def test_drivers_descriptions_find_their_preset(description, memory_gib, kind):
    assert kind_of(description, memory_gib and int(memory_gib * GIB)) == kind


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(CostError, match="'a100'"):
        device_preset("A100")
    with pytest.raises(CostError, match="nvlink4"):
        link_preset("nvlink")
