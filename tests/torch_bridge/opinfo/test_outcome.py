"""How verdicts of samples become the verdict of an operator, and what the summary shows."""

import json
from pathlib import Path

import pytest

from tests.torch_bridge.opinfo.outcome import Outcome, Verdict, of_operator, read, record, summary

PASSED = Verdict(Outcome.PASSED)
FORWARD = Verdict(Outcome.PASSED_FORWARD, "the database states no gradient")
REFUSED = Verdict(Outcome.REFUSED_BY_EXPORT, "GuardOnDataDependentSymNode: Eq(u0, 1)")
WRONG = Verdict(Outcome.WRONG_VALUE, "output 0: differs by 3")


@pytest.mark.parametrize(
    "verdicts, expected",
    [
        ([PASSED, WRONG], WRONG),
        ([REFUSED, WRONG], WRONG),
        ([REFUSED, PASSED], PASSED),
        ([FORWARD, PASSED], PASSED),
        ([REFUSED, Verdict(Outcome.TORCH_ERROR)], REFUSED),
    ],
)
def test_one_failing_sample_fails_an_operator_and_a_pass_outweighs_a_refusal(
    verdicts: list[Verdict], expected: Verdict
) -> None:
    assert of_operator(verdicts) == expected


def test_the_summary_counts_what_is_judged_and_names_what_is_left_out() -> None:
    named = {"add": PASSED, "sort": FORWARD, "equal": REFUSED, "cross": WRONG}
    text = summary(record(name, "float32", [verdict]) for name, verdict in named.items())
    assert "pass: 2 of 3 judged (66.7%); 1 left out" in text
    assert "wrong value: cross: output 0: differs by 3" in text
    assert "torch.export refuses: equal: GuardOnDataDependentSymNode" in text
    assert "1  the database states no gradient" in text


def test_results_of_several_files_are_one_and_the_last_word_on_an_operator_counts(tmp_path: Path) -> None:
    paths = [tmp_path / "first.jsonl", tmp_path / "second.jsonl", tmp_path / "not there.jsonl"]
    paths[0].write_text(json.dumps(record("add", "float32", [WRONG])) + "\n")
    paths[1].write_text(
        "".join(json.dumps(record(name, "float32", [PASSED])) + "\n" for name in ("add", "mul"))
    )
    found = read(paths)
    assert {name: entry["outcome"] for (name, _), entry in found.items()} == {"add": "pass", "mul": "pass"}
