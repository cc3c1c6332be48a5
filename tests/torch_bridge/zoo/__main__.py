"""Run the zoo and write one JSON line a specimen and mode; an interrupted run is taken up where it stopped.

    python -m tests.torch_bridge.zoo --out zoo.jsonl
    python -m tests.torch_bridge.zoo --out part1.jsonl --part 1/8      # one of eight shares

Every specimen runs in a forked process with a time limit, so a crash or a hang costs one. `--summary`
prints the table of files that are there.
"""

import argparse
import json
import logging
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_multi_thread_eigen=false",
)
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import torch

from tests.torch_bridge.zoo.catalogue import SPECIMENS
from tests.torch_bridge.zoo.judge import FINE, Outcome, judge
from tests.torch_bridge.zoo.specimen import Specimen
from tests.torch_bridge.zoo.summary import summary


def main() -> int:
    """Run what the command line asks for, print a summary, and say whether all is well."""
    options = _options()
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.CRITICAL)  # export prints whole graphs when it refuses
    torch.set_num_threads(1)
    if not options.summary:
        _run(options)
    records = [record for path in options.out for record in _read(path).values()]
    print(summary(records))
    return int(any(record["outcome"] not in FINE for record in records))


def _run(options: argparse.Namespace) -> None:
    _warm_up_export()
    (out,) = options.out
    done = _read(out)
    if options.redo:
        done = {key: record for key, record in done.items() if record["outcome"] in FINE}
    for specimen in _chosen(options):
        wanted = [mode for mode in modes(specimen) if mode in options.modes.split(",")]
        left = [mode for mode in wanted if (specimen.name, mode) not in done]
        for record in _in_own_process(specimen, left, options.timeout):
            record["versions"] = VERSIONS
            with out.open("a") as lines:
                lines.write(json.dumps(record) + "\n")
            said = record.get("detail") or record.get("reason") or ""
            title = f"{record['outcome']:20s} {specimen.name} ({record['mode']})"
            print(f"{title} {record['seconds']} s {said[:300]}", flush=True)


VERSIONS = {"python": sys.version.split()[0], "torch": torch.__version__, "jax": jax.__version__}


def _warm_up_export() -> None:
    """Let torch build its tables once, before the forks; JAX must not start before them."""
    torch.export.export(torch.nn.Linear(2, 2), (torch.ones(2, 2),)).run_decompositions({})
    try:
        import transformers

        VERSIONS["transformers"] = transformers.__version__
    except ImportError:
        VERSIONS["transformers"] = "none"


def _chosen(options: argparse.Namespace) -> list[Specimen]:
    names = options.names.split(",") if options.names else []
    chosen = [s for s in SPECIMENS.values() if not names or {s.name, s.group} & set(names)]
    share, count = map(int, options.part.split("/"))
    return chosen[share - 1 :: count]


def modes(specimen: Specimen) -> tuple[str, ...]:
    """Its modes, and training with dropout where it drops."""
    return (*specimen.modes, *(("dropout",) if specimen.drops and "train" in specimen.modes else ()))


def _read(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    if not path.exists():
        return {}
    records = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return {(record["specimen"], record["mode"]): record for record in records}


def _in_own_process(specimen: Specimen, wanted: list[str], timeout: float) -> Iterator[dict[str, Any]]:
    """Records of these modes, from as few processes as crashes and time limits allow."""
    left = list(wanted)
    while left:
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_send, args=(specimen, left, sender))
        process.start()
        sender.close()
        try:
            while left:
                record = _received(receiver, process, timeout)
                yield {"specimen": specimen.name, "mode": left.pop(0), "listed": specimen.listed, **record}
                if record.get("gone"):
                    break
        finally:
            process.kill()
            process.join()


def _received(receiver: Any, process: Any, timeout: float) -> dict[str, Any]:
    began = time.monotonic()
    try:
        if receiver.poll(timeout):
            return receiver.recv()
    except EOFError:
        process.join()
        detail = f"the process ended with {process.exitcode}"
        return {
            "outcome": Outcome.NOT_RUN,
            "detail": detail,
            "seconds": time.monotonic() - began,
            "gone": True,
        }
    return {
        "outcome": Outcome.TIMED_OUT,
        "detail": f"after {timeout:.0f} s",
        "seconds": timeout,
        "gone": True,
    }


def _send(specimen: Specimen, wanted: list[str], sender: Any) -> None:
    warnings.filterwarnings("ignore")
    for mode in wanted:
        sender.send(judge(specimen, mode))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.torch_bridge.zoo", description=__doc__)
    parser.add_argument(
        "--out", type=Path, nargs="+", required=True, help="JSON lines; taken up where they end"
    )
    parser.add_argument("--names", default="", help="only these specimens or groups, separated by commas")
    parser.add_argument("--modes", default="eval,train,dropout")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="only share K of N")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a specimen and mode")
    parser.add_argument("--redo", action="store_true", help="run again what is not well")
    parser.add_argument("--summary", action="store_true", help="run nothing, print the table of the files")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
