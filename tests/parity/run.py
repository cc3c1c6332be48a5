"""The full cross of networks and plans against one device: `make parity`.

    python -m tests.parity.run --out parity.json

One JSON line a case is appended to the file; cases that are already there are not run again, so the
command may be stopped and given again at any time. The order is shuffled, always in the same way: a run
that is stopped has seen something of everything. `--part 2/8` is every eighth case, for eight processes
with a file each; files joined are a file. `JAX_PLATFORMS=cuda` runs what fits the GPUs that are there.
"""

import argparse
import json
import random
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tests.environment  # noqa: F401 - before jax

import jax  # isort: skip
import numpy as np

import rannc_jax
from tests.parity.cases import ALL_CASES, Case
from tests.parity.measure import LIMITS
from tests.parity.models import model
from tests.parity.play import play


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    # Float32 is float32, on devices too that would rather multiply in fewer bits.
    jax.config.update("jax_default_matmul_precision", "highest")
    done = {} if not options.out.exists() else read(options.out)
    kept = {name for name, record in done.items() if not (options.redo_failed and record["problems"])}
    wanted = [case for case in ALL_CASES if options.only in str(case) and fits(case)]
    random.Random(0).shuffle(wanted)
    part, parts = options.part
    wanted = wanted[part - 1 :: parts]
    todo = [case for case in wanted if str(case) not in kept][: options.limit]
    print(f"{len(wanted)} cases, {len(wanted) - len(todo)} there or left out, {len(todo)} to run")
    began = time.perf_counter()
    for number, case in enumerate(todo, 1):
        record = run_case(case)
        done[record["case"]] = record
        with options.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        verdict = "equal" if not record["problems"] else "DIFFERS: " + "; ".join(record["problems"])
        left = (time.perf_counter() - began) / number * (len(todo) - number)
        print(f"[{number}/{len(todo)}, {left / 60:.0f} min left] {case}: {verdict}", flush=True)
        jax.clear_caches()  # every case compiles programs of its own
    records = [record for name, record in done.items() if options.only in name]
    print(summary(records))
    return int(any(record["problems"] for record in records))


def fits(case: Case) -> bool:
    """Whether the machine has the devices."""
    return sum(case.replicas) <= jax.device_count()


def run_case(case: Case) -> dict[str, Any]:
    """Play a case; a crash is a problem like any other."""
    record: dict[str, Any] = {"case": str(case), "model": case.model, "optimizer": case.optimizer}
    began = time.perf_counter()
    try:
        played = play(case)
    except Exception as error:  # the next case may still say something
        traceback.print_exc()
        first = (str(error).splitlines() or [""])[0]
        record |= {"problems": [f"{type(error).__name__}: {first}"], "deviations": {}}
    else:
        unexpected = set(played.comparison.below_floor) ^ set(model(case.model, case.dropout).zero_gradient)
        problems = [*played.comparison.problems, *(f"below the floor: {path}" for path in sorted(unexpected))]
        record |= {"problems": problems, "deviations": played.comparison.deviations.as_dict()}
        record["below_floor"] = list(played.comparison.below_floor)
    return record | {"seconds": round(time.perf_counter() - began, 2), "versions": VERSIONS}


VERSIONS = {
    "python": sys.version.split()[0],
    "jax": jax.__version__,
    "device": jax.devices()[0].device_kind,
    "numpy": np.__version__,
    "rannc_jax": getattr(rannc_jax, "__version__", "0.1.0"),
}


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The last record of every case in a file; a torn last line is dropped."""
    records = {}
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        records[record["case"]] = record
    return records


def summary(records: Iterable[dict[str, Any]]) -> str:
    """How many ran, the largest deviations of each network, and what failed."""
    records = list(records)
    names = list(LIMITS["sgd"].as_dict())
    heads = ["gradient leaf" if n == "gradient_leaf" else n.replace("_", " ") for n in names]
    columns = ["parameters (sgd)", "parameters (adam)"]
    heads[names.index("parameters") : names.index("parameters") + 1] = columns
    lines = ["  ".join([f"{'network':12}", f"{'cases':>5}", f"{'failed':>6}", *(f"{h:>17}" for h in heads)])]
    for network in dict.fromkeys(record["model"] for record in records):
        mine = [record for record in records if record["model"] == network]
        cells = [f"{network:12}", f"{len(mine):>5}", f"{sum(bool(r['problems']) for r in mine):>6}"]
        for name in names:
            for optimizer in ("sgd", "adam") if name == "parameters" else (None,):
                found = [
                    record["deviations"][name]
                    for record in mine
                    if record["deviations"] and optimizer in (None, record["optimizer"])
                ]
                cells.append(f"{max(found):>17.1e}" if found else f"{'-':>17}")
        lines.append("  ".join(cells))
    failed = [record for record in records if record["problems"]]
    lines.append(f"{len(records)} cases, {len(failed)} failed")
    lines += [f"  {record['case']}: {'; '.join(record['problems'])}" for record in failed]
    return "\n".join(lines)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.parity.run", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("parity.json"), help="records are appended here")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--limit", type=int, default=None, help="run at most so many")
    parser.add_argument("--part", type=_fraction, default=(1, 1), help="K/N: every N-th case from the K-th")
    parser.add_argument("--redo-failed", action="store_true", help="run failed cases again")
    return parser.parse_args(arguments)


def _fraction(text: str) -> tuple[int, int]:
    part, parts = map(int, text.split("/"))
    if not 1 <= part <= parts:
        raise argparse.ArgumentTypeError(f"{text!r} is not a part K/N with 1 <= K <= N")
    return part, parts


if __name__ == "__main__":
    sys.exit(main())
