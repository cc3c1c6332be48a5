"""What a run of the zoo says, as a table and a few counts."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from tests.torch_bridge.zoo.judge import FINE, Outcome

KINDS = ("outputs", "loss", "gradient of all", "gradient", "parameter", "state")


def summary(records: Iterable[dict[str, Any]]) -> str:
    """Outcome, largest deviations, kind of export and seconds of everything that ran; then counts."""
    records = list(records)
    width = max([len(r["specimen"]) for r in records], default=8)
    head = f"{'specimen':{width}} {'mode':7} {'outcome':20} {'export':9}"
    lines = [head + "".join(f" {kind:>15}" for kind in KINDS) + f" {'seconds':>8}"]
    for r in records:
        found = r.get("deviations") or {}
        cells = "".join(f" {found[k]:>15.1e}" if k in found else f" {'-':>15}" for k in KINDS)
        row = f"{r['specimen']:{width}} {r['mode']:7} {r['outcome']:20} {export_of(r):9}"
        lines.append(row + cells + f" {r['seconds']:>8.1f}")
    lines += ["", *_counts(records), *_reasons(records)]
    return "\n".join(lines)


def export_of(record: dict[str, Any]) -> str:
    """How a specimen meets another number of rows: "one", "dynamic", "each", "-" if it was not converted."""
    if "reason" not in record:
        return "-"
    # A single row always has an export of its own.
    if record["reason"] or (record.get("exports", 1) > 2 and not record.get("dynamic")):
        return "each"
    return "dynamic" if record.get("dynamic") else "one"


def _counts(records: list[dict[str, Any]]) -> list[str]:
    outcomes = Counter(record["outcome"] for record in records)
    lines = [f"{count:5d}  {Outcome(outcome).value}" for outcome, count in outcomes.most_common()]
    exports = Counter(export_of(record) for record in records if "reason" in record)
    total = sum(exports.values())
    lines.append(
        f"{total} exports: {exports['one']} two sizes merged, {exports['dynamic']} by Dim.DYNAMIC, "
        f"{exports['each']} again for each number of rows"
    )
    for words, chosen in (("listed", True), ("others", False)):
        names = {r["specimen"] for r in records if r["listed"] is chosen}
        bad = {r["specimen"] for r in records if r["listed"] is chosen and r["outcome"] not in FINE}
        lines.append(
            f"{words}: {len(names)} networks, {len(names - bad)} pass or are refused by torch.export"
        )
    lines.append(f"{sum(r['seconds'] for r in records):.0f} s")
    return lines


def _reasons(records: list[dict[str, Any]]) -> list[str]:
    lines = []
    for r in records:
        if r["outcome"] != Outcome.PASSED:
            lines.append(f"{r['specimen']} ({r['mode']}): {r['outcome']}: {r.get('detail', '')[:300]}")
        elif export_of(r) in ("each", "dynamic"):
            why = (r["reason"] or r.get("dynamic") or "the batch dims found are not those of the rows")[:200]
            lines.append(f"{r['specimen']} ({r['mode']}): export {export_of(r)}: {why}")
    return lines
