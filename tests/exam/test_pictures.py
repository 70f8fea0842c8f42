"""Pictures of measurements: PNG files beside them, whose folder a person is told."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import vitclinic
from tests.probes.subjects import noise, vit
from vitclinic._core.records import Scalar
from vitclinic.cli import main
from vitclinic.exam.store import write_pictures
from vitclinic.probes import OwningProbe, Result


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def examined(**options):
    torch.manual_seed(0)
    return vitclinic.examine(vit(), noise(), probes=[{"attention_maps": {"images": [3, 5]}}], **options)


def test_attention_maps_leave_pictures():
    exam = examined()
    folder = exam.pictures["attention_maps"]
    assert folder == exam.files["attention_maps"].with_suffix("")
    assert sorted(path.name for path in folder.iterdir()) == ["image-3.png", "image-5.png"]
    with Image.open(folder / "image-3.png") as picture:
        assert (picture.format, picture.size, picture.mode) == ("PNG", (2 * 224, 224), "RGB")
        left = np.asarray(picture)[::14, ::14][:, :16]
    assert np.array_equal(left, noise().splits["test"].read(np.array([3]))[0])


def test_pictures_that_were_removed_are_drawn_again_from_what_is_stored_and_others_left():
    folder = examined().pictures["attention_maps"]
    (folder / "image-3.png").unlink()
    (folder / "image-5.png").write_bytes(b"mine")
    again = examined()
    assert again.reused == {"attention_maps"}
    assert again.pictures["attention_maps"] == folder
    assert (folder / "image-3.png").exists()
    assert (folder / "image-5.png").read_bytes() == b"mine"
    examined(fresh=True)
    assert (folder / "image-5.png").read_bytes() != b"mine"


def test_the_command_says_where_they_are(monkeypatch, capsys):
    words = ["examine", "timm:vit_tiny_patch16_224?img_size=32&patch_size=8&depth=2", "--random-weights"]
    words += ["--data", "shapes:60", "--probes", "attention_maps", "--set", "attention_maps.images=2"]
    for more in ([], ["--json"]):
        monkeypatch.setattr("sys.argv", ["vitclinic", *words, *more])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
    out = capsys.readouterr()
    (line,) = [line for line in out.out.splitlines() + out.err.splitlines() if line.startswith("pictures of")]
    folder = line.removeprefix("pictures of attention_maps: ")
    record = json.loads(out.out[out.out.index("[\n") :])[0]
    assert folder.endswith(record["measurements"]["attention_maps"]["pictures"])
    from pathlib import Path

    assert len(list(Path(folder).glob("*.png"))) == 2


class Artist(OwningProbe):
    """Draws."""

    name = "artist"
    fails: bool = False

    def forwards(self, subject):
        return 1

    def measure(self, subject):
        return Result({"x": Scalar(value=1.0)})

    def pictures(self, measurement):
        return {"../../a b/<c>": np.zeros((2, 2 // (not self.fails), 3), np.uint8)}


def test_names_cannot_lead_elsewhere():
    exam = vitclinic.examine(vit(), noise(), probes=[Artist()])
    assert [path.name for path in exam.pictures["artist"].iterdir()] == ["a-b-c.png"]
    (file,) = write_pictures(exam.folder, {"..": np.zeros((1, 1, 3), np.uint8)})
    assert file == exam.folder / "picture.png"


def test_a_probe_that_cannot_draw_keeps_its_numbers(caplog):
    exam = vitclinic.examine(vit(), noise(), probes=[Artist(fails=True)])
    assert exam["artist"].status == "ok"
    assert not exam.pictures
    assert "no pictures of artist: ZeroDivisionError" in caplog.text
