"""Write the table of rules in docs/findings.md from the rules, so that it cannot drift.

python docs/make_findings.py            rewrite the table
python docs/make_findings.py --check    fail if it is not current (a test does this)
"""

from __future__ import annotations

import sys
from pathlib import Path

from vitclinic.exam.findings import Rule, known_rules
from vitclinic.exam.findings.training import THRESHOLD, TITLE

PAGE = Path(__file__).parent / "findings.md"
BEGIN, END = "<!-- rules: made by docs/make_findings.py -->", "<!-- end of rules -->"
HEAD = [
    "| rule | looks at | says so where | whose line | with a reference network | suggests |",
    "|---|---|---|---|---|---|",
]


def row(rule: Rule) -> str:
    cells = (
        f"**{rule.title}** `{rule.name}`",
        "; or ".join(", ".join(f"`{name}`" for name in group) for group in rule.needs),
        rule.threshold,
        f"*{rule.basis}*: {rule.source}",
        rule.reference or "",
        "; ".join(f"`{suggestion.treatment}` ({suggestion.paper})" for suggestion in rule.suggestions),
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page() -> str:
    health = f"| **{TITLE}** `healthy` | all of the above | {THRESHOLD} | *heuristic* | | |"
    table = "\n".join([*HEAD, *map(row, known_rules().values()), health])
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


if __name__ == "__main__":
    if "--check" in sys.argv:
        current = page() == PAGE.read_text(encoding="utf-8")
        sys.exit(0 if current else "docs/findings.md is not current: run docs/make_findings.py")
    PAGE.write_text(page(), encoding="utf-8")
