"""Networks of the zoo cut into stages; `python -m tests.torch_bridge.zoo.stages` runs all of them."""

import pytest

from tests.torch_bridge.zoo.stages import NETWORKS, TOPOLOGIES, play

QUICK = {
    "two linears with a scalar",
    "tied linear",
    "embedding",
    "loss inside, two inputs",
    "backwards of its own",
}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TOPOLOGIES]
)
def test_a_small_topology_trains_in_as_many_stages_as_it_has_atoms(name: str) -> None:
    _, comparison = play(name)
    assert comparison.problems == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_of_the_zoo_trains_in_four_stages_as_on_one_device(name: str) -> None:
    stages, comparison = play(name)
    assert stages == 4
    assert comparison.problems == ()
