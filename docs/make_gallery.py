"""Draw the figures of docs/gallery.md: two small networks trained on `shapes`, examined, their page photographed.

python docs/make_gallery.py          some minutes on two cores; needs chromium and Playwright
"""

from __future__ import annotations

import io
import shutil
import tempfile
from contextlib import chdir
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

import vitclinic

OUT = Path(__file__).resolve().parent / "gallery"
FIGURES = {
    "fourier": "fourier-depth",
    "variance": None,
    "cka": None,
    "lesion": None,
    "token_similarity": None,
    "attention_entropy": None,
    "attention_distance": None,
    "hessian_spectrum": None,
    "landscape": None,
    "corruptions": None,
    "frequency_noise": None,
}
"""The probe, and which of its figures; the first unless named."""
SETTINGS = {"landscape": {"points": 11, "images": 128}, "hessian_spectrum": {"batches": 4}}
COMMON = {
    "data": {"source": "shapes:1000", "augment": "light"},
    "epochs": 4,
    "batch_size": 64,
}
NETWORKS = {
    "ViT": {"name": "vit_tiny_patch16_224", "patch_size": 4, "embed_dim": 96, "depth": 6, "num_heads": 3},
    "ResNet": {"name": "preact_resnet18", "stem": "cifar", "channels": [16, 32, 64, 128]},
}
COLOURS = 48


def main() -> None:
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        for name, model in NETWORKS.items():
            vitclinic.train(COMMON, model=model, out=name)
        exams = vitclinic.examine(list(NETWORKS), probes=list(FIGURES), settings=SETTINGS, limit=128)
        photograph(Path(exams.report("page.html")).resolve())


def photograph(page: Path) -> None:
    """Save one small image of each figure."""
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        window = browser.new_page(viewport={"width": 760, "height": 900})
        window.set_default_timeout(120_000)
        window.goto(page.as_uri())
        for probe, figure in FIGURES.items():
            section = window.locator(f"details.probe#{probe}, details.probe[id$='{probe}']").first
            place = section.locator(f"#figure-{figure}" if figure else "figure[id^='figure-']").first
            heavy = place.locator("xpath=ancestor::details[contains(@class, 'heavy')]")
            if heavy.count():
                heavy.locator("summary").first.click()
            place.scroll_into_view_if_needed()
            place.locator(".js-plotly-plot .main-svg, canvas").first.wait_for()
            window.wait_for_timeout(1500)
            save(place.locator(".plot").first.screenshot(), OUT / f"{probe}.png")
        browser.close()


def save(png: bytes, path: Path) -> None:
    image = Image.open(io.BytesIO(png)).convert("RGB").quantize(COLOURS)
    image.save(path, optimize=True)


if __name__ == "__main__":
    main()
