"""Run the database and write one JSON line an operator; an interrupted run is taken up where it stopped.

    python -m tests.torch_bridge.opinfo --ops all --samples 2 --out opinfo.jsonl

Every operator runs in a forked process with a time limit, so a crash or a hang costs one operator.
"""

import argparse
import json
import multiprocessing
import os
import random
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_multi_thread_eigen=false",
)

import torch
from torch.testing._internal.common_methods_invocations import op_db

from tests.torch_bridge.opinfo.judge import NOT_COUNTED, PASSES, Outcome, Verdict, judge, samples


def main() -> None:
    """Run what the command line asks for, and print a summary."""
    parser = argparse.ArgumentParser(prog="python -m tests.torch_bridge.opinfo", description=__doc__)
    parser.add_argument("--ops", default="150", help="how many operators, drawn by --seed; or 'all'")
    parser.add_argument("--names", default="", help="only these operators, separated by commas")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--samples", type=int, default=2, help="samples an operator")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, required=True, help="JSON lines; operators in it are not run again"
    )
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds an operator")
    parser.add_argument("--forward-only", action="store_true")
    parser.add_argument("--any-rows", action="store_true", help="convert for every batch size")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype)
    _warm_up_export()
    done = _read(options.out)
    for op in _chosen(dtype, options):
        if (title(op), options.dtype) in done:
            continue
        verdicts = _in_own_process(op, dtype, options)
        worst = next((v for v in verdicts if v.outcome not in PASSES | NOT_COUNTED), verdicts[0])
        record = {
            "operator": title(op),
            "dtype": options.dtype,
            "outcome": worst.outcome.value,
            "detail": worst.detail,
        }
        with options.out.open("a") as lines:
            lines.write(json.dumps(record) + "\n")
        print(f"{worst.outcome.value:30s} {title(op)} {worst.detail[:160]}", flush=True)
    print(summary(list(_read(options.out).values())))


def _warm_up_export() -> None:
    """Let torch build its tables once, before the forks; JAX must not start before them."""
    torch.export.export(torch.nn.Linear(2, 2), (torch.ones(2, 2),)).run_decompositions({})


def title(op: Any) -> str:
    """The operator's name, with its variant's."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def summary(records: list[dict[str, str]]) -> str:
    """How many operators ended how, and the share that pass."""
    counts = Counter(Outcome(record["outcome"]) for record in records)
    total = sum(count for outcome, count in counts.items() if outcome not in NOT_COUNTED)
    passed = sum(counts[outcome] for outcome in PASSES)
    lines = [f"{count:5d}  {outcome.value}" for outcome, count in counts.most_common()]
    return "\n".join([*lines, f"pass: {passed} of {total} ({passed / max(total, 1):.1%})"])


def _chosen(dtype: torch.dtype, options: argparse.Namespace) -> list[Any]:
    having = [op for op in op_db if dtype in op.dtypes]
    if options.names:
        return [op for op in having if {op.name, title(op)} & set(options.names.split(","))]
    if options.ops == "all":
        return having
    random.Random(options.seed).shuffle(having)
    return having[: int(options.ops)]


def _read(path: Path) -> dict[tuple[str, str], dict[str, str]]:
    if not path.exists():
        return {}
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {(record["operator"], record["dtype"]): record for record in records}


def _in_own_process(op: Any, dtype: torch.dtype, options: argparse.Namespace) -> list[Verdict]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_judge_all, args=(op, dtype, options, sender))
    process.start()
    sender.close()
    verdicts: list[Verdict] = []
    deadline = time.monotonic() + options.timeout
    while True:
        if not receiver.poll(max(deadline - time.monotonic(), 0.0)):
            process.kill()
            verdicts.append(Verdict(Outcome.TIMED_OUT, f"after {options.timeout:.0f} s"))
            break
        try:
            verdicts.append(receiver.recv())
        except EOFError:
            break
    process.join()
    if process.exitcode and not verdicts:
        verdicts.append(Verdict(Outcome.FAILED_TO_RUN, f"process ended with {process.exitcode}"))
    return verdicts or [Verdict(Outcome.SKIPPED, "no samples")]


def _judge_all(op: Any, dtype: torch.dtype, options: argparse.Namespace, sender: Any) -> None:
    try:
        for sample in samples(op, dtype, options.samples):
            sender.send(judge(op, sample, gradients=not options.forward_only, any_rows=options.any_rows))
    except BaseException as error:
        sender.send(Verdict(Outcome.TORCH_ERROR, f"samples: {type(error).__name__}: {error}"[:300]))


if __name__ == "__main__":
    main()
