"""Join the pages that lie at the root of the repository to the site, and mend links that lead out of docs/.

In the repository README.md links to docs/train.md and docs/train.md to ../CHANGELOG.md. On the site the root's pages
are index.md, architecture.md, contributing.md and changelog.md; links to other files lead to their source.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
_LINK = re.compile(r"(\]\()(?!https?://|mailto:|#)([^)\s#]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, uri in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite each relative link from the place of its page in the repository to its place on the site."""
    uri = page.file.src_uri
    source = next((name for name, place in PAGES.items() if place == uri), f"docs/{uri}")

    def rewrite(found: re.Match[str]) -> str:
        target = normpath(str(PurePosixPath(source).parent / found[2]))
        if target in PAGES:
            place = PAGES[target]
        elif target.startswith("docs/"):
            place = target.removeprefix("docs/")
        else:
            return f"{found[1]}{config.extra['repository']}/blob/main/{target}"
        return found[1] + relpath(place, str(PurePosixPath(uri).parent))

    return _LINK.sub(rewrite, markdown)
