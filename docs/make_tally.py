"""Write what our own runs say of the claims, from the files in docs/results/studies: none of it is edited by hand.

python docs/make_tally.py            rewrite docs/results/tally.md, and seen.json for `vitclinic list studies`
python docs/make_tally.py --check    fail if one is not current (a test does this)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from vitclinic._core.time import format_duration
from vitclinic.experiments.study.store import describe_changes, not_blind, tally
from vitclinic.reports.study_page import NOT_RUN, Entry, count_outcomes, group_by_paper, view_comparison
from vitclinic.reports.study_result import StoredResult, read_result

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results" / "studies"
PAGE = ROOT / "docs" / "results" / "tally.md"
SEEN = ROOT / "src" / "vitclinic" / "experiments" / "study" / "seen.json"

HEAD = """# The papers' claims, and what was found here

<!-- made by docs/make_tally.py from docs/results/studies: do not edit -->

Studies of the papers' claims, at CPU scale unless it says otherwise: small networks, CIFAR-10, paired seeds. There is
none yet of {missing}.
The rule ([study.md](../study.md)) is the same for all: where a run does not meet the conditions of its study's regime,
the claim is *not testable here*. Otherwise a comparison is *as claimed* if its test (corrected for the number of
comparisons of its study) decides for the side that the claim says, *opposite* if for the other, *undecided*
otherwise; a claim is *reproduced* if all its comparisons are as claimed, *not reproduced* if one is opposite,
*undecided* otherwise, and *exploratory* below five seeds. What was found before studies had a regime is in
[history.md](history.md). Effects are means over seeds, in the measure's own unit, with their interval. Cost is training
time by the runs' own record; studies share runs, so that costs do not add up.
What a study trains and
measures is in its file, `src/vitclinic/experiments/study/claims/CLAIM.yaml`; `vitclinic study CLAIM` runs it.

Lines that the papers do not give are ours. Those of {not_blind} were drawn after first looks at networks of this size
(docs/results/layers.md, remedies.md): what is said here of these claims is not blind.
"""
MISSING = {
    "H9": "CB carries to segmentation, detection and vision-language",
    "G5": "the gain carries to fine-tuned Swin and to segmentation",
}
"""Claims of the papers that no study tests."""
COLUMNS = ["| claim | verdict | effects [interval] | seeds | cost | date |", "|---|---|---|---|---|---|"]


def page(results: dict[str, StoredResult]) -> str:
    found = tally(results)
    lines = [
        HEAD.format(not_blind=", ".join(not_blind()), missing=", ".join(MISSING)),
        ", ".join(f"**{count}** {outcome}" for outcome, count in count_outcomes(found).items()) + ".",
    ]
    for paper, entries in group_by_paper(found).items():
        lines += ["", f"## {paper}", "", *COLUMNS, *map(row, entries)]
    return "\n".join(lines) + "\n"


def row(entry: Entry) -> str:
    claim, result = entry.claim, entry.result
    if result is None:
        return line([f"**{claim.name}** {claim.title}", NOT_RUN, "", "", "", ""])
    scale = ", at the paper's scale" if result.scale == "paper" else ""
    stored = f"[{claim.name}](studies/{entry.page.removesuffix('.html')}.json)"
    cost = f"{format_duration(result.seconds)} of training"
    about = f"**{stored}** {result.title}{scale}"
    broken = "; ".join(f"{one.says} ({one.found})" for one in result.conditions if not one.holds)
    verdict = f"changed: {entry.changed}" if entry.changed else f"{result.verdict}{f': {broken}' if broken else ''}"
    return line([about, verdict, effects(result), seeds(result), cost, result.date])


def effects(result: StoredResult) -> str:
    shown = [view_comparison(one) for one in result.comparisons]
    return "<br>".join(
        f"{one['says']}: `{one['measure']}` {one['mean']}"
        f"{'' if one['interval'] == '–' else ' [' + one['interval'] + ']'}, {one['status']}"
        for one in shown
    )


def seeds(result: StoredResult) -> str:
    """Of all comparisons, where they differ, in their order."""
    numbers = [
        f"{one.seeds}{f' ({one.missing} without a number)' if one.missing else ''}" for one in result.comparisons
    ]
    return numbers[0] if len(set(numbers)) == 1 else "<br>".join(numbers)


def line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def seen(results: dict[str, StoredResult]) -> str:
    facts = {
        result.claim: {"verdict": result.verdict, "seeds": len(result.seeds), "date": result.date}
        for result in results.values()
        if result.scale == "cpu" and not describe_changes(result)
    }
    return json.dumps(facts, indent=2) + "\n"


if __name__ == "__main__":
    stored = {file.stem: read_result(file) for file in sorted(RESULTS.glob("*.json"))}
    made = {PAGE: page(stored), SEEN: seen(stored)}
    for file, text in made.items():
        if "--check" not in sys.argv:
            file.write_text(text, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != text:
            sys.exit(f"{file.relative_to(ROOT)} is not current: run docs/make_tally.py")
