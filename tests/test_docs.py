"""What the documentation says is there, is there."""

import os
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest
import yaml

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


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The documentation site, built as CI builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_has_a_page_for_every_markdown_page(site):
    for page in ROOT.glob("docs/**/*.md"):
        place = page.relative_to(ROOT / "docs").with_suffix("")
        place = place.parent if place.name == "README" else place
        assert (site / place / "index.html").exists(), page
    assert all((site / name / "index.html").exists() for name in ("architecture", "contributing", "changelog"))


def test_the_site_loads_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        for tag in re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", page.read_text(encoding="utf-8")):
            elsewhere = re.search(r"(?:src|href)=[\"']?(?:https?:)?//", tag)
            assert elsewhere is None or 'rel="canonical"' in tag, f"{page}: {tag}"
        assert 'data-md-component="source"' not in page.read_text(encoding="utf-8")  # would ask GitHub for stars
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", style.read_text(encoding="utf-8")), style


def test_every_public_name_is_in_the_api_reference(site):
    import vitclinic

    page = (site / "api" / "index.html").read_text(encoding="utf-8")
    names = set(vitclinic.__all__) - {"__version__"}
    missing = {name for name in names if not isinstance(getattr(vitclinic, name), types.ModuleType)}
    missing -= set(re.findall(r'id="vitclinic\.(\w+)"', page))
    assert not missing, missing


def test_versions_agree():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == version
    assert f"## {version} - {citation['date-released']}" in (ROOT / "CHANGELOG.md").read_text()


def test_hosted_ci_runs_what_ci_runs():
    workflow, script = (ROOT / ".github" / "workflows" / "ci.yml").read_text(), (ROOT / ".ci" / "run").read_text()
    assert yaml.safe_load(workflow)["jobs"]
    steps = re.findall(r"^step ((?:pytest|ruff|mypy|lint-imports|mkdocs)\b[^\"\n]*)", script, re.MULTILINE)
    assert len(steps) == 7
    for step in steps:
        assert step.replace("--quiet --site-dir", "").strip() in workflow, step


def test_hosted_ci_has_a_browser_wherever_tests_run():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    for name, job in workflow["jobs"].items():
        commands = [step.get("run", "") for step in job["steps"]]
        if any(command.startswith("pytest") for command in commands):
            assert any("chromium" in command for command in commands), name


def test_the_base_install_is_what_the_base_imports():
    """Each dependency is imported by the package, and none of the extras' is imported without being asked for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    modules = {"pillow": "PIL", "pyyaml": "yaml"}
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    for requirement in project["dependencies"]:
        name = re.match(r"[\w-]+", requirement)[0].lower()
        assert re.search(rf"^\s*(?:import|from) {modules.get(name, name)}\b", sources, re.MULTILINE), name
    for extra in ("datasets", "transformers", "ray", "tensorboard", "sklearn"):
        assert not re.search(rf"^(?:import|from) {extra}\b", sources, re.MULTILINE), extra
