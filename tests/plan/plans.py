"""Plans to test with: a small one made by hand, and any valid one (a hypothesis strategy)."""

from hypothesis import strategies as st

from rannc_jax.cluster import ClusterSpec, DeviceGroup, DeviceSpec, LinkSpec
from rannc_jax.contract import Remat, Sharding
from rannc_jax.plan import Block, Crossing, Plan, RunnerUp, Stage, Tie
from rannc_jax.plan.check import BATCHINGS, LOSSES

MIB = 2**20


def cpu_cluster(count: int = 4) -> ClusterSpec:
    device = DeviceSpec(kind="cpu", platform="cpu", memory_bytes=100 * MIB, bytes_per_s=1e10)
    link = LinkSpec(bytes_per_s=1e9, latency_s=1e-5)
    return ClusterSpec(
        groups=(DeviceGroup(device=device, count_per_host=count),), intra_host=link, inter_host=link
    )


def small_plan() -> Plan:
    """Two stages: embedding and two layers on one device, the rest with two replicas."""
    return Plan(
        identity="a" * 64,
        program="b" * 64,
        anchors="c" * 64,
        cluster=cpu_cluster(),
        rows=16,
        num_microbatches=4,
        schedule="1f1b",
        blocks=(
            Block(path="embed", equations=((0, 4),), anchors=((0, 1),)),
            Block(path="layers.0", equations=((4, 9), (11, 12)), anchors=((1, 3),)),
            Block(path="layers.1", equations=((9, 11),), anchors=((3, 4),)),
            Block(path="head", equations=((12, 20),), anchors=()),
        ),
        stages=(
            Stage(
                blocks=(0, 1, 2),
                devices=(0,),
                remat=Remat.RECOMPUTE,
                forward_s=1.25e-3,
                backward_s=2.5e-3,
                memory_bytes={"parameters": 10 * MIB, "optimizer": 20 * MIB, "residuals": 5 * MIB},
            ),
            Stage(
                blocks=(3,),
                devices=(1, 2),
                forward_s=1e-3,
                backward_s=2e-3,
                memory_bytes={"parameters": 4 * MIB, "working": MIB},
            ),
        ),
        crossings=(
            Crossing(
                name="layers.1/out",
                source=0,
                targets=(1,),
                bytes_per_row=MIB / 8,
                fixed_bytes=0,
                needs_grad=True,
            ),
        ),
        ties=(Tie(path="params['embed']", owner=0, readers=(0, 1)),),
        loss="weighted",
        step_s=0.02,
        bubble_fraction=0.2,
        bound_s=0.016,
        runners_up=(RunnerUp(summary="1 stage, 4 replicas", step_s=0.021, reason="5 % slower"),),
        notes=("The loss is weighted by the number of tokens.",),
        versions={"rannc_jax": "0.1.0", "jax": "0.10.2"},
    )


_text = st.text(max_size=12)
_seconds = st.floats(min_value=0, max_value=1e6)
_bytes = st.integers(min_value=0, max_value=2**60)
_positive = st.floats(min_value=1, max_value=1e30)
_links = st.builds(LinkSpec, bytes_per_s=_positive, latency_s=_seconds)
_devices = st.builds(
    DeviceSpec,
    kind=_text,
    platform=st.sampled_from(["cpu", "gpu"]),
    memory_bytes=st.integers(min_value=20, max_value=2**50),
    memory_margin=st.floats(min_value=0, max_value=0.9),
    flops_per_s=st.dictionaries(st.sampled_from(["float32", "bfloat16"]), _positive),
    bytes_per_s=_positive,
    launch_s=_seconds,
    dispatch_s=_seconds,
    host_bytes_per_s=_positive,
)
_groups = st.builds(
    DeviceGroup,
    device=_devices,
    hosts=st.integers(min_value=1, max_value=2),
    count_per_host=st.integers(min_value=1, max_value=4),
)
_clusters = st.builds(
    ClusterSpec,
    groups=st.lists(_groups, min_size=1, max_size=2).map(tuple),
    intra_host=_links,
    inter_host=_links,
    axes=st.dictionaries(st.sampled_from(["stage", "data"]), st.integers(min_value=1, max_value=8)),
)


@st.composite
def _places(draw: st.DrawFn, num_devices: int, num_stages: int) -> list[tuple[int, ...]]:
    """Devices by stage: each has its own, or all share some."""
    devices = draw(st.permutations(range(num_devices)))
    if num_devices < num_stages or draw(st.booleans()):
        return [tuple(devices[: draw(st.integers(min_value=1, max_value=num_devices))])] * num_stages
    each = draw(st.integers(min_value=1, max_value=num_devices // num_stages))
    return [tuple(devices[each * index : each * (index + 1)]) for index in range(num_stages)]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan whose parts agree."""
    cluster = draw(_clusters)
    num_stages = draw(st.integers(min_value=1, max_value=3))
    rows = draw(st.integers(min_value=1, max_value=64))
    places = draw(_places(cluster.num_devices, num_stages))
    stages = []
    num_blocks = 0
    for index in range(num_stages):
        own = draw(st.integers(min_value=0, max_value=2))
        stages.append(
            Stage(
                blocks=tuple(range(num_blocks, num_blocks + own)),
                devices=places[index],
                remat=draw(st.sampled_from(Remat)),
                sharding=draw(st.sampled_from(Sharding)),
                offload=draw(st.booleans()),
                forward_s=draw(_seconds),
                backward_s=draw(_seconds),
                weight_s=draw(_seconds),
                tail_s=draw(_seconds),
                memory_bytes=draw(st.dictionaries(_text, _bytes, max_size=2)),
            )
        )
        num_blocks += own
    spans = st.lists(st.integers(min_value=0, max_value=9), min_size=2, max_size=2, unique=True)
    blocks = [
        Block(
            path=draw(_text),
            equations=((10 * i, 10 * i + draw(st.integers(min_value=1, max_value=10))),),
            anchors=tuple(tuple(sorted(span)) for span in draw(st.lists(spans, max_size=2))),
        )
        for i in range(num_blocks)
    ]
    crossings = ()
    if num_stages > 1:
        crossing = Crossing(
            name=draw(_text),
            source=0,
            targets=tuple(range(1, num_stages)),
            bytes_per_row=draw(_seconds),
            fixed_bytes=draw(_bytes),
            needs_grad=draw(st.booleans()),
        )
        crossings = (crossing,)
    return Plan(
        identity=draw(_text),
        program=draw(_text),
        anchors=draw(_text),
        cluster=cluster,
        rows=rows,
        num_microbatches=draw(st.integers(min_value=1, max_value=rows)),
        schedule=draw(st.sampled_from(["gpipe", "1f1b", "forward"])),
        blocks=tuple(blocks),
        stages=tuple(stages),
        crossings=crossings,
        ties=(Tie(path=draw(_text), owner=0, readers=tuple(range(num_stages))),),
        batching=draw(st.sampled_from(BATCHINGS)),
        loss=draw(st.sampled_from(LOSSES)),
        step_s=draw(_seconds),
        bubble_fraction=draw(st.floats(min_value=0, max_value=0.99)),
        bound_s=draw(_seconds),
        runners_up=(RunnerUp(summary=draw(_text), step_s=draw(_seconds), reason=draw(_text)),),
        notes=tuple(draw(st.lists(_text, max_size=2))),
        versions=draw(st.dictionaries(_text, _text, max_size=2)),
    )
