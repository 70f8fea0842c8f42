"""The verb `export`: a run's network as a file or folder that other libraries open, checked to give the same logits.

    timm, hf      a folder with config.json, model.safetensors and a model card: `timm.create_model("local-dir:FOLDER",
                  pretrained=True)`, and `AutoModelForImageClassification.from_pretrained(FOLDER)` of transformers. Both
                  take normalized images; the mean and standard deviation are in the configuration.
    onnx          model.onnx, of pixels in [0, 1], for any number of images
    torch-export  model.pt2, the same for `torch.export.load`

A file or folder appears once what was written, read back, gives the network's own logits.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitclinic._core.errors import MissingExtraError, ModelError, RecipeError, VitclinicError, first_line
from vitclinic._core.io import write_errors
from vitclinic.anatomy.maps import AttentionCall, attention_scores
from vitclinic.deployment.calibration import CALIBRATION, read_calibration
from vitclinic.deployment.card import is_export, write_card
from vitclinic.models import Normalized
from vitclinic.probes.digest import network_digest
from vitclinic.training import Checkpoint, Run, load_model
from vitclinic.training.run import find_run

Form = Literal["timm", "hf", "onnx", "torch-export"]
FORMS: tuple[str, ...] = get_args(Form)
TOLERANCE = 1e-4
"""Largest difference of a logit, relative to the largest logit if that is above 1."""
_SHAKEN = 1e-2
"""The same for networks with noise on their weights, in which rounding errors grow: other networks differ by more."""
_FILES = {"onnx": "model.onnx", "torch-export": "model.pt2"}
_DESCRIPTION = "vitclinic.json"
"""The file in a program of torch.export that describes it."""
_BATCHES = (1, 2, 5)
"""Numbers of images that an export is checked with."""
_PLAIN = {"vit_tiny_fitted": "vit_tiny_patch16_224"}
"""Networks of ours that timm has under another name, given their keywords."""


def export(run: str | Path | Run | Checkpoint, to: Form, out: str | Path | None = None) -> Path:
    """Write the network of a run for use by other libraries.

    Args:
        run: A run, its directory, perhaps `@CHECKPOINT`, or one of its checkpoints; the best one by default.
        to: `"timm"` or `"hf"` (a folder), `"onnx"` or `"torch-export"` (a file).
        out: The folder or file; by default `export/` in the run.

    Returns:
        Its path. An earlier export there is replaced; other files are left.

    Raises:
        RecipeError: Something else than an earlier export is there.
        ModelError: The network cannot be expressed in this form; the message says why.
        MissingExtraError: A package is missing.

    Example:
        >>> export("runs/photos", "onnx")  # doctest: +SKIP
        PosixPath('runs/photos/export/model.onnx')
    """
    check_form(to)
    opened, checkpoint = _open(run)
    _check_task(opened, to)
    network = load_model(opened.path, checkpoint)
    target = Path(out) if out is not None else opened.path / "export" / _FILES.get(to, to)
    name = f"'{opened.path}'"
    with write_errors(target):
        _refuse_strangers(target, to)
    if to in ("timm", "hf"):
        with _staged_folder(target) as folder:
            write_folder(folder, opened, network, to)
        return target
    with _staged_folder(target) as folder:
        write = _write_onnx if to == "onnx" else _write_program
        check_same_logits(network, _inputs(opened), write(folder / target.name, opened, network), name)
    return target


def check_form(to: str) -> None:
    """Raise for a form that there is not, or whose package is missing."""
    if to not in FORMS:
        raise RecipeError(f"'{to}' is not a form of export: choose {', '.join(FORMS[:-1])} or {FORMS[-1]}.")
    if to == "hf" and find_spec("transformers") is None:
        raise MissingExtraError("export to hf", "hf")
    if to == "onnx" and any(find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")):
        raise MissingExtraError("export to onnx", "onnx")


def _check_task(run: Run, to: str) -> None:
    """Raise a ModelError if the task's network takes more than images, or returns what the form has no place for."""
    task = run.recipe.task
    if task.target in ("objects", "questions") or (task.target == "mask" and to in ("timm", "hf")):
        raise ModelError(
            f"'{run.path}' was trained for {task.name}, which has no export to {to}; load_model returns its network."
        )


def _open(run: str | Path | Run | Checkpoint) -> tuple[Run, str | None]:
    if isinstance(run, Checkpoint):
        return run.run, run.name
    if isinstance(run, Run):
        return run, None
    found = find_run(str(run))
    return (Run.open(run), None) if found is None else (Run.open(found[0]), found[1] or None)


def _inputs(run: Run) -> Tensor:
    """Return pixels in [0, 1] to compare logits on."""
    spec = run.spec
    return torch.rand(max(_BATCHES), spec.in_chans, *spec.img_size, generator=torch.Generator().manual_seed(0))


def check_same_logits(
    network: nn.Module, x_bchw: Tensor, exported: Callable[[Tensor], Tensor], name: str, tolerance: float = TOLERANCE
) -> None:
    """Raise a ModelError unless an export returns the network's logits, for any number of images.

    Args:
        network: The network.
        x_bchw: Images.
        exported: Takes images and returns logits.
        name: Of the network, for the message.
        tolerance: Largest difference of a logit, relative to the largest logit if that is above 1.
    """
    for count in _BATCHES:
        with torch.no_grad():
            wanted, found = network(x_bchw[:count]), exported(x_bchw[:count])
        scale = max(1.0, float(wanted.abs().max()))
        if found.shape != wanted.shape or not float((found - wanted).abs().max()) <= tolerance * scale:
            raise ModelError(f"The export of {name} does not give its logits, so it was not written.")


@contextmanager
def _staged_folder(target: Path) -> Iterator[Path]:
    """Give a new folder, which becomes `target` at the end, or whose files replace those of the same names.

    A file of the target's name becomes the target itself. Nothing else is touched: there may be work of the user's.
    """
    with write_errors(target):
        place = target.absolute()
        place.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".export-", dir=place.parent))
        try:
            yield staging
            if (staging / place.name).is_file():
                (staging / place.name).replace(place)
            elif place.is_dir():
                for file in sorted(staging.iterdir()):
                    file.replace(place / file.name)
            else:
                staging.chmod(0o755)
                staging.rename(place)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _refuse_strangers(target: Path, to: str) -> None:
    """Raise a RecipeError if what is at `target` is not ours to replace: neither empty nor an earlier export."""
    if to in ("timm", "hf"):
        if target.exists() and not target.is_dir():
            raise RecipeError(f"'{target}' is a file, and an export to {to} is a folder; choose another name.")
        if target.is_dir() and any(target.iterdir()) and not is_export(target):
            raise RecipeError(f"'{target}' is a folder with other things in it; choose another.")
    elif target.is_dir():
        raise RecipeError(f"'{target}' is a folder, and an export to {to} is a file; name one, such as {_FILES[to]}.")
    elif target.exists() and not (_is_our_onnx(target) if to == "onnx" else _is_our_program(target)):
        raise RecipeError(f"'{target}' already exists and is not an earlier export to {to}; choose another name.")


def _is_our_onnx(file: Path) -> bool:
    import onnx

    try:
        model = onnx.load(str(file), load_external_data=False)
    except Exception:  # noqa: BLE001 (whatever protobuf raises: it is no file of ONNX)
        return False
    return {"classes", "resize_to_cover"} <= {entry.key for entry in model.metadata_props}


def _is_our_program(file: Path) -> bool:
    if not zipfile.is_zipfile(file):
        return False
    with zipfile.ZipFile(file) as archive:
        return any(Path(name).name == _DESCRIPTION for name in archive.namelist())


@contextmanager
def _expressed(form: str, name: str) -> Iterator[None]:
    """Turn whatever a tracer raises into one sentence; its own notes on how it went are for its developers."""
    logging.disable(logging.WARNING)
    try:
        yield
    except Exception as error:  # tracers and converters raise anything
        line = first_line(error)
        if "Constraints violated (batch)" in line:
            line = "one of its layers or treatments fixes the number of images"
        raise ModelError(f"{name} cannot be expressed as {form}: {line}.") from error
    finally:
        logging.disable(logging.NOTSET)


class _PlainAttention(TorchFunctionMode):
    """Attention as products and a softmax: the fused one has other strides than its parts, into which ONNX takes it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _attend(AttentionCall(*args, **(kwargs or {})).repeat_groups())
        return func(*args, **(kwargs or {}))


def _attend(call: AttentionCall) -> Tensor:
    scores, hidden = attention_scores(call.query, call.key, call.scale, call.mask)
    return (scores if hidden is None else scores.masked_fill(hidden, -torch.inf)).softmax(-1) @ call.value


def _trace(network: nn.Module, run: Run) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1, max=2**16)
    with torch.no_grad(), _PlainAttention():
        return torch.export.export(network, (_inputs(run)[:2],), dynamic_shapes=({0: batch},), strict=False)


def _write_program(path: Path, run: Run, network: Normalized) -> Callable[[Tensor], Tensor]:
    with _expressed("torch.export", f"'{run.path}'"):
        extra = {_DESCRIPTION: json.dumps(describe(run, network))}
        torch.export.save(_trace(network, run), path, extra_files=extra)
        module: Callable[[Tensor], Tensor] = torch.export.load(path).module()
    return module


def _write_onnx(path: Path, run: Run, network: Normalized) -> Callable[[Tensor], Tensor]:
    import onnx
    import onnxruntime

    with _expressed("ONNX", f"'{run.path}'"):
        names: dict[str, Any] = {"input_names": ["images"], "output_names": ["logits"]}
        program = torch.onnx.export(_trace(network, run), (), dynamo=True, verbose=False, **names)
        assert program is not None
        program.save(str(path))
        model = onnx.load(str(path))
        for key, value in describe(run, network).items():
            model.metadata_props.add(key=key, value=json.dumps(value))
        onnx.save(model, str(path))
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(np.asarray(session.run(["logits"], {"images": x.numpy()})[0]))


def describe(run: Run, network: Normalized) -> dict[str, Any]:
    """Return what a user of an export needs beside the weights: classes, preprocessing, temperature."""
    way = run.preprocessing
    facts = {"classes": list(network.classes or ()), "input": "RGB" if way.channels == 3 else "grey", "range": [0, 1]}
    temperature = _find_temperature(run, network)
    return {
        **facts,
        "size": list(way.size),
        "resize_to_cover": list(way.framed),
        **({} if temperature is None else {"temperature": temperature}),
    }


def _find_temperature(run: Run, network: nn.Module) -> float | None:
    """Return the temperature that was fitted for these weights, if one was."""
    found = read_calibration(run.path / CALIBRATION).get(network_digest(network)[:16])
    return None if found is None else float(found["temperature"])


def write_folder(folder: Path, run: Run, network: Normalized, to: str) -> None:
    """Write a folder that timm and transformers load, and check that they do.

    Raises:
        ModelError: timm cannot build the network: a treatment changed its structure.
    """
    x_bchw, backbone = _inputs(run), network.backbone
    normalized = (x_bchw - network.mean) / network.std
    weights = {key: value.contiguous().clone() for key, value in backbone.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    _check_timm(folder, run, network, normalized)
    if to == "hf":
        theirs = _open_in_transformers(folder)
        check_same_logits(backbone, normalized, lambda x: theirs(pixel_values=x).logits, f"'{run.path}'")
    write_card(folder, run, to, _find_temperature(run, network))


def _open_in_transformers(folder: Path) -> Any:
    """Return the folder's network; the bar that transformers draws while it loads would be noise."""
    from transformers import AutoModelForImageClassification
    from transformers.utils import logging as module

    theirs: Any = module
    drawn = theirs.is_progress_bar_enabled()
    theirs.disable_progress_bar()
    try:
        return AutoModelForImageClassification.from_pretrained(folder, local_files_only=True).eval()
    finally:
        if drawn:
            theirs.enable_progress_bar()


def _check_timm(folder: Path, run: Run, network: Normalized, x_bchw: Tensor) -> None:
    """Write the first configuration by which timm builds the network."""
    *others, last = _keywords(run)
    for keywords in (*others, last):
        write_config(folder, run, network, keywords)
        try:
            loaded = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
            check_same_logits(network.backbone, x_bchw, loaded, f"'{run.path}'")
            check_same_logits(_shake(network.backbone), x_bchw, _shake(loaded), f"'{run.path}'", _SHAKEN)
            return
        except (VitclinicError, RuntimeError, TypeError, ValueError, KeyError, AssertionError) as error:
            if keywords is last:
                raise _inexpressible(run) from error


def _shake(network: nn.Module) -> nn.Module:
    """Return a copy with noise on its linear layers, the same for the same network.

    While weights are small, attention is nearly uniform whatever is done to it: networks that compute different things
    then have the same logits.
    """
    copied, generator = copy.deepcopy(network), torch.Generator().manual_seed(0)
    for _, module in sorted(copied.named_modules(), key=lambda pair: pair[0]):
        if isinstance(module, nn.Linear):
            noise = torch.randn(module.weight.shape, generator=generator) / math.sqrt(module.in_features)
            module.weight.data += noise.to(module.weight)
    return copied


def _inexpressible(run: Run) -> ModelError:
    treatments = [treatment.name for treatment in run.recipe.treatments]
    why = f"with {', '.join(treatments)}" if treatments else f"{run.recipe.model.name} with these keywords"
    return ModelError(f"'{run.path}', {why}, is a network that timm cannot build from a name: export it to onnx.")


def _keywords(run: Run) -> Iterator[dict[str, Any]]:
    """Yield keywords for timm's factory, with the image size and, for networks that take any, without it."""
    spec, recipe = run.spec, run.recipe
    keywords = {**recipe.model.keywords, "num_classes": spec.num_classes, "in_chans": spec.in_chans}
    if recipe.model.name == "vit_tiny_fitted":
        from vitclinic.models.factory import fit_patch_size

        keywords.setdefault("patch_size", fit_patch_size(min(spec.img_size)))
    yield {"img_size": list(spec.img_size), **keywords}
    yield {key: value for key, value in keywords.items() if key != "img_size"}


def write_config(folder: Path, run: Run, network: Normalized, keywords: Mapping[str, Any]) -> None:
    """Write `config.json`, which timm and transformers read."""
    way, classes = run.preprocessing, list(network.classes or ())
    name = run.recipe.model.name.partition(".")[0]
    arguments = {key: value for key, value in keywords.items() if key != "num_classes"}
    shape = [way.channels, *way.size]
    published = {
        "input_size": shape,
        "fixed_input_size": "img_size" in keywords,
        "interpolation": "bicubic",
        "crop_pct": way.size[0] / way.framed[0],
        "crop_mode": "center",
        "mean": network.mean.flatten().tolist(),
        "std": network.std.flatten().tolist(),
        "num_classes": len(classes),
    }
    config = {
        "architecture": _PLAIN.get(name, name),
        "num_classes": len(classes),
        "num_features": getattr(network.backbone, "num_features", 0),
        "label_names": classes,
        "model_args": arguments,
        "pretrained_cfg": published,
        "model_type": "timm_wrapper",
        "architectures": ["TimmWrapperForImageClassification"],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
