"""What the documentation says is there, is there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]


@pytest.mark.parametrize("script", ["make_keys.py", "make_findings.py", "make_tally.py"])
def test_what_scripts_write_is_current(script):
    done = subprocess.run([sys.executable, f"docs/{script}", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_every_command_in_the_docs_is_one_of_ours():
    from vitclinic.cli import click_app

    verbs = set(click_app().commands)
    for page in PAGES:
        for verb in re.findall(r"^(?:\$ )?vitclinic ([a-z]+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert verb in verbs, f"{page}: vitclinic {verb}"


def test_ci_runs_exactly_the_readme_s_test_command():
    readme, script = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    command = re.search(r"^pip install -e '\.\[test\]' && (pytest.*)$", readme, re.MULTILINE)
    assert command is not None
    assert "pip install --quiet -e '.[test]'" in script
    assert re.search(f"^step {command[1]}$", script, re.MULTILINE)
