"""What became of a sample, of an operator, of the database.

An operator is left out of the share that passes only for reasons that lie in torch: its database has no
sample of this dtype, torch's own call fails on it, or plain torch.export refuses it. Whatever the bridge
or JAX cannot do counts as not passed, sparse layouts and shapes that depend on values included.
"""

import enum
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class Outcome(enum.StrEnum):
    """What became of a sample, best first within each of the three groups."""

    PASSED = "pass"
    PASSED_FORWARD = "pass (forward alone)"
    PASSED_SHAPE = "pass (random or unset: shape and dtype)"

    WRONG_GRADIENT = "wrong gradient"
    FAILED_GRADIENT = "gradient fails"
    WRONG_VALUE = "wrong value"
    WRONG_DTYPE = "wrong dtype"
    WRONG_SHAPE = "wrong shape"
    FAILED_TO_RUN = "run fails"
    FAILED_TO_CONVERT = "conversion fails"
    UNSUPPORTED = "no lowering"
    NOT_STRIDED = "sparse layout"
    TIMED_OUT = "out of time"

    REFUSED_BY_EXPORT = "torch.export refuses"
    TORCH_ERROR = "torch's own call fails"
    NO_SAMPLE = "no sample in the database"


PASSES = frozenset({Outcome.PASSED, Outcome.PASSED_FORWARD, Outcome.PASSED_SHAPE})
LEFT_OUT = frozenset({Outcome.REFUSED_BY_EXPORT, Outcome.TORCH_ERROR, Outcome.NO_SAMPLE})
_ORDER = tuple(Outcome)


@dataclass(frozen=True, slots=True)
class Verdict:
    """An outcome with what an engineer wants to know about it."""

    outcome: Outcome
    detail: str = ""


def of_operator(verdicts: Sequence[Verdict]) -> Verdict:
    """A failure if any sample fails; else a pass if any passes; else why none could be judged."""
    failures = [v for v in verdicts if v.outcome not in PASSES | LEFT_OUT]
    if failures:
        return failures[0]
    return min(verdicts, key=lambda verdict: _ORDER.index(verdict.outcome))


def record(operator: str, dtype: str, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """One JSON line."""
    overall = of_operator(verdicts)
    return {
        "operator": operator,
        "dtype": dtype,
        "outcome": overall.outcome.value,
        "detail": overall.detail,
        "samples": [verdict.outcome.value for verdict in verdicts],
    }


def read(paths: Iterable[Path]) -> dict[tuple[str, str], dict[str, Any]]:
    """Records of several files by (operator, dtype); the last one of an operator counts."""
    records = [json.loads(line) for path in paths if path.exists() for line in path.read_text().splitlines()]
    return {(entry["operator"], entry["dtype"]): entry for entry in records}


def summary(records: Iterable[dict[str, Any]]) -> str:
    """How many operators ended how, the share that pass, and every one that does not, with its reason."""
    by_outcome: dict[Outcome, list[dict[str, Any]]] = defaultdict(list)
    for entry in records:
        by_outcome[Outcome(entry["outcome"])].append(entry)
    counts = Counter({outcome: len(entries) for outcome, entries in by_outcome.items()})
    judged = sum(count for outcome, count in counts.items() if outcome not in LEFT_OUT)
    passed = sum(counts[outcome] for outcome in PASSES)
    lines = [f"{counts[outcome]:5d}  {outcome.value}" for outcome in _ORDER if counts[outcome]]
    lines += ["", "forward alone, since:", *_reasons(by_outcome[Outcome.PASSED_FORWARD])]
    lines += ["", "not passed:", *_listing(by_outcome, frozenset(_ORDER) - PASSES - LEFT_OUT)]
    lines += ["", "left out:", *_listing(by_outcome, LEFT_OUT)]
    share = f"{passed / max(judged, 1):.1%}"
    left_out = sum(counts[outcome] for outcome in LEFT_OUT)
    return "\n".join([*lines, "", f"pass: {passed} of {judged} judged ({share}); {left_out} left out"])


def _reasons(entries: Sequence[dict[str, Any]]) -> list[str]:
    """Counts by what stands before the first colon of the detail."""
    counts = Counter(entry["detail"].split(":")[0] for entry in entries)
    return [f"{count:5d}  {reason}" for reason, count in counts.most_common()]


def _listing(by_outcome: dict[Outcome, list[dict[str, Any]]], wanted: frozenset[Outcome]) -> list[str]:
    return [
        f"  {outcome.value}: {entry['operator']}: {entry['detail'][:200]}".removesuffix(": ")
        for outcome in _ORDER
        if outcome in wanted
        for entry in sorted(by_outcome[outcome], key=lambda entry: entry["operator"])
    ]
