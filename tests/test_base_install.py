"""A base install, without any extra, does what `demo` does: train, treat, examine, report."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STORY = """
import sys

sys.modules.update(dict.fromkeys(ABSENT))  # importing one of these is then an ImportError
import vitclinic

model = {"name": "vit_tiny_patch16_224", "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
common = {"data": {"source": "shapes:100", "augment": "none"}, "model": model, "steps": 2, "batch_size": 8}
vitclinic.train(common, out="plain")
vitclinic.train(common, treatments=["conv_stem", "patch_diversity"], out="treated")
exams = vitclinic.examine(["plain", "treated"], quick=True, limit=64)
print(exams.report("page.html"))
"""
MODULES = {"pyarrow", "datasets", "transformers", "ray", "tensorboard", "sklearn", "skimage", "matplotlib", "pandas"}


@pytest.mark.slow
def test_the_demo_needs_no_extra(tmp_path):
    code = f"ABSENT = {MODULES!r}\n{STORY}"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "page.html").stat().st_size > 10**6


def test_extras_are_by_purpose():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(project["optional-dependencies"]) >= {"hf", "parquet", "ray", "tensorboard", "docs", "test"}
    assert not {"pyarrow", "scikit-learn"} & {line.partition(">")[0] for line in project["dependencies"]}
