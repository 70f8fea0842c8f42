"""The notebooks run from top to bottom, and are kept without outputs."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert any(cell.outputs for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_valid_and_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert not re.search(r"/home/|/tmp/|/Users/|/opt/|C:\\", path.read_text(encoding="utf-8"))


def test_there_is_a_line_for_each_in_the_readme():
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert {path.name for path in NOTEBOOKS} == set(re.findall(r"\(([a-z_]+\.ipynb)\)", readme))
