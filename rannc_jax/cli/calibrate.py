"""`calibrate`: measure the devices that are here and write a device file."""

from pathlib import Path

import jax

from rannc_jax.config.write import device_text, link_text
from rannc_jax.cost.calibrate import Calibration, calibrate
from rannc_jax.files import write_whole
from rannc_jax.progress import StderrProgress

GIB = 2**30


def main(out: str | None, seconds: float) -> int:
    """Measure, then write the file, or print it without `out`."""
    found = calibrate(seconds=seconds, progress=StderrProgress())
    text = device_text(found.device, head(found))
    if out is None:
        print(text, end="")
    else:
        write_whole(Path(out), text)
        print(f"wrote {out}; name it in a mesh file:\n")
        print(f'[[devices]]\nkind = "{Path(out).name}"\ncount_per_host = {len(jax.local_devices())}\n')
        if found.intra_host is not None:
            print(link_text("intra_host", found.intra_host), end="")
    return 0


def head(found: Calibration) -> tuple[str, ...]:
    """What the file says that is not the device's: where it was measured, and the links."""
    lines = [f"Measured by `rannc-jax calibrate` on {found.description}, jax {jax.__version__}."]
    moved = {
        "to host memory": found.to_host_bytes_per_s,
        "from host memory": found.from_host_bytes_per_s,
        "all-reduce over all devices": found.all_reduce_bytes_per_s,
    }
    lines += [f"{name}: {rate / GIB:.4g} GiB/s" for name, rate in moved.items() if rate is not None]
    if found.intra_host is not None:
        lines += ["For the mesh file:", *link_text("intra_host", found.intra_host).splitlines()]
    return (*lines, *(f"Not measured: {reason}" for reason in found.skipped))
