"""Run the database and write one JSON line an operator; an interrupted run is taken up where it stopped.

    python -m tests.torch_bridge.opinfo --ops all --samples 2 --part 0/2 --out first.jsonl
    python -m tests.torch_bridge.opinfo --ops all --samples 2 --part 1/2 --out second.jsonl
    python -m tests.torch_bridge.opinfo --summary first.jsonl second.jsonl

Every operator runs in a forked process with a time limit, so a crash or a hang costs one operator.
"""

import argparse
import json
import multiprocessing
import os
import random
import time
import warnings
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

from tests.torch_bridge.opinfo.compare import short
from tests.torch_bridge.opinfo.judge import judge, samples
from tests.torch_bridge.opinfo.outcome import Outcome, Verdict, read, record, summary


def main() -> None:
    """Run what the command line asks for, or read results of earlier runs, and print a summary."""
    options = _options()
    if options.summary:
        print(summary(read(options.summary).values()))
        return
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    _warm_up_export()
    done = read([options.out])
    for op in _chosen(getattr(torch, options.dtype), options):
        if (title(op), options.dtype) in done:
            continue
        entry = record(title(op), options.dtype, _in_own_process(op, options))
        with options.out.open("a") as lines:
            lines.write(json.dumps(entry) + "\n")
        print(f"{entry['outcome']:30s} {title(op)} {entry['detail'][:160]}", flush=True)
    print(summary(read([options.out]).values()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.torch_bridge.opinfo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ops", default="150", help="how many operators, drawn by --seed; or 'all'")
    parser.add_argument("--names", default="", help="only these operators, separated by commas")
    parser.add_argument("--part", type=_part, default=(0, 1), help="K/N: every N-th operator from number K")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--samples", type=int, default=2, help="samples an operator")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON lines; operators in it are not run again")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds an operator")
    parser.add_argument("--forward-only", action="store_true")
    parser.add_argument("--any-rows", action="store_true", help="convert for every batch size")
    parser.add_argument("--summary", type=Path, nargs="+", help="run nothing; read these results")
    options = parser.parse_args()
    if not options.summary and options.out is None:
        parser.error("--out or --summary is needed")
    return options


def _part(text: str) -> tuple[int, int]:
    first, step = map(int, text.split("/"))
    if not 0 <= first < step:
        raise argparse.ArgumentTypeError(f"{text}: K/N with K from 0 to N-1 expected")
    return first, step


def _warm_up_export() -> None:
    """Let torch build its tables once, before the forks; JAX must not start before them."""
    torch.export.export(torch.nn.Linear(2, 2), (torch.ones(2, 2),)).run_decompositions({})


def title(op: Any) -> str:
    """The operator's name, with its variant's."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def _chosen(dtype: torch.dtype, options: argparse.Namespace) -> list[Any]:
    having = [op for op in op_db if dtype in op.dtypes]
    if options.names:
        return [op for op in having if {op.name, title(op)} & set(options.names.split(","))]
    if options.ops != "all":
        random.Random(options.seed).shuffle(having)
        having = having[: int(options.ops)]
    first, step = options.part
    return having[first::step]


def _in_own_process(op: Any, options: argparse.Namespace) -> list[Verdict]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_judge_all, args=(op, options, sender))
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
    if process.exitcode and not any(v.outcome is Outcome.TIMED_OUT for v in verdicts):
        verdicts.append(Verdict(Outcome.FAILED_TO_RUN, f"process ended with {process.exitcode}"))
    return verdicts or [Verdict(Outcome.NO_SAMPLE)]


def _judge_all(op: Any, options: argparse.Namespace, sender: Any) -> None:
    drawn = samples(op, getattr(torch, options.dtype), options.samples)
    while True:
        try:
            sample = next(drawn, None)
        except Exception as error:
            sender.send(Verdict(Outcome.TORCH_ERROR, f"its samples: {short(error)}"))
            return
        if sample is None:
            return
        sender.send(judge(op, sample, gradients=not options.forward_only, any_rows=options.any_rows))


if __name__ == "__main__":
    main()
