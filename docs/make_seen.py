"""Write what our own runs say of the claims, for `vitclinic list studies`, from the files in docs/results/studies.

python docs/make_seen.py            rewrite src/vitclinic/studies/seen.json
python docs/make_seen.py --check    fail if it is not current (a test does this)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results" / "studies"
SEEN = ROOT / "src" / "vitclinic" / "studies" / "seen.json"


def seen() -> str:
    results = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob("*.json"))]
    facts = {
        result["claim"]: {"verdict": result["verdict"], "seeds": len(result["seeds"]), "date": result["date"]}
        for result in results
    }
    return json.dumps(facts, indent=2) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv:
        current = SEEN.read_text(encoding="utf-8") == seen()
        sys.exit(0 if current else "studies/seen.json is not current: run docs/make_seen.py")
    SEEN.write_text(seen(), encoding="utf-8")
