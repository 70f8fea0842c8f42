"""Curves of trainings by other libraries: as these write them, in the page and in findings."""

import math

import pytest
import timm
import torch
from timm.utils.summary import update_summary

import vitclinic
from vitclinic._core.errors import DataError, RecipeError
from vitclinic.training.rows import read_curves


def column(rows, kind, key):
    return {row["step"]: row[key] for row in rows if row["kind"] == kind and key in row}


def write_timm(path):
    for epoch in range(4):
        scores = {"loss": 3 - epoch / 2, "top1": 25.0 * epoch, "top5": 30.0 + 20 * epoch}
        update_summary(epoch, {"loss": 4.0 - epoch}, scores, path, lr=0.1 / (1 + epoch), write_header=epoch == 0)
    return path


def test_timm_s_summary(tmp_path):
    rows = read_curves(write_timm(tmp_path / "summary.csv"))
    assert column(rows, "train", "loss") == {0: 4.0, 1: 3.0, 2: 2.0, 3: 1.0}
    assert column(rows, "val", "loss") == {0: 3.0, 1: 2.5, 2: 2.0, 3: 1.5}
    assert column(rows, "val", "accuracy") == {0: 0.0, 1: 0.25, 2: 0.5, 3: 0.75}  # from percent
    assert column(rows, "val", "accuracy_top5")[3] == pytest.approx(0.9)
    assert column(rows, "train", "lr") == pytest.approx({0: 0.1, 1: 0.05, 2: 0.1 / 3, 3: 0.025})


@pytest.mark.slow
def test_lightning_s_metrics(tmp_path):
    loggers = pytest.importorskip("pytorch_lightning.loggers")
    logger = loggers.CSVLogger(tmp_path, name="", version="")
    for step in range(0, 40, 10):
        logger.log_metrics({"train_loss_step": 2 - step / 100, "lr-AdamW": 1e-3, "epoch": step // 20}, step)
        if step % 20 == 10:
            logger.log_metrics({"train_loss_epoch": 9.0, "val_loss": 1.0, "val_acc": step / 100, "epoch": 0}, step)
    logger.save()
    rows = read_curves(tmp_path / "metrics.csv")
    assert column(rows, "train", "loss") == {0: 2.0, 10: 1.9, 20: 1.8, 30: 1.7}  # by step, not by epoch
    assert column(rows, "val", "accuracy") == {10: 0.1, 30: 0.3}
    assert column(rows, "train", "lr") == dict.fromkeys(range(0, 40, 10), 0.001)


def test_tensorboard_s_events_and_those_of_our_own_runs(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "logs")) as writer:
        for step in range(3):
            writer.add_scalar("Loss/train", 1.0 / (step + 1), step)
            writer.add_scalar("val/accuracy", step / 4, step)
            writer.add_scalar("train/grad_norm", 0.5, step)
    (file,) = (tmp_path / "logs").iterdir()
    for source in (tmp_path / "logs", file):
        rows = read_curves(source)
        assert column(rows, "train", "loss") == pytest.approx({0: 1.0, 1: 0.5, 2: 1 / 3})
        assert column(rows, "val", "accuracy") == {0: 0.0, 1: 0.25, 2: 0.5}
        assert column(rows, "train", "grad_norm") == dict.fromkeys(range(3), 0.5)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "no column step or epoch"),
        ("loss,accuracy\n1,2\n", "no column step or epoch"),
        ("epoch,val_loss\n0,1\n", "has no training loss.*found: val_loss"),
        ("epoch,train_loss\nx,1\n", "has no training loss"),
        ("epoch,train_loss\n", "found: nothing"),
        ("epoch,test_loss\n0,1\n", "has no training loss"),
    ],
)
def test_what_is_missing_is_one_sentence(tmp_path, text, sentence):
    (tmp_path / "curves.csv").write_text(text)
    with pytest.raises(DataError, match=sentence):
        read_curves(tmp_path / "curves.csv")


def test_files_that_are_no_curves(tmp_path):
    with pytest.raises(DataError, match="There are no curves at"):
        read_curves(tmp_path / "none.csv")
    with pytest.raises(DataError, match="no event files"):
        read_curves(tmp_path)
    (tmp_path / "image.csv").write_bytes(b"\x89PNG\xff\x00")
    with pytest.raises(DataError, match="not UTF-8"):
        read_curves(tmp_path / "image.csv")
    (tmp_path / "x.csv").write_text("step,loss,note\n1,nan,hello\n2,inf,\n3,1.5,x\nshort\n")
    losses = column(read_curves(tmp_path / "x.csv"), "train", "loss")
    assert math.isnan(losses[1])
    assert (losses[2], losses[3]) == (math.inf, 1.5)


def test_the_page_and_the_findings_have_them_now_and_later(tmp_path):
    network = timm.create_model("vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=8, depth=1, num_heads=1)
    loader = [(torch.rand(4, 3, 16, 16), torch.arange(4))]
    exam = vitclinic.examine(network, loader, probes=["norms"], normalized=False, out=tmp_path / "exams")
    assert exam.view.training == []
    (tmp_path / "up.csv").write_text(
        "step,train_loss\n" + "".join(f"{step},{1 + 30 * (step == 60)}\n" for step in range(80))
    )
    exam.add_curves(tmp_path / "up.csv")
    assert "Unstable training" in [finding.title for finding in exam.findings]
    for page in (exam.report(tmp_path / "now.html"), vitclinic.report(exam.folder, tmp_path / "later.html")):
        assert "Training curves" in page.read_text()


def test_a_run_has_its_own(tmp_path):
    exam = vitclinic.Exam("runs/a", "", tmp_path, {}, run=vitclinic.Run(tmp_path))
    with pytest.raises(RecipeError, match="has its own curves"):
        exam.add_curves(tmp_path / "x.csv")
