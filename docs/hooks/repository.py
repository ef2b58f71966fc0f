"""Files of the repository that pages link to, on the site: texts as pages, others as files to fetch.

On the site these files are under `repository/`, with their own paths, and links point there, so the same link
works in the repository and on the site.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = "repository/"
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what pages link to, and what those link to in turn."""
    to_read = [f for f in files.documentation_pages() if not f.generated_by]
    while to_read:
        for target in _outside(to_read.pop()):
            place = FOLDER + target
            if files.get_file_from_path(place) is None and (ROOT / target).is_file():
                added = File.generated(config, place, abs_src_path=str(ROOT / target))
                files.append(added)
                if added.is_documentation_page():
                    to_read.append(added)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = _repository_path(page.file)
    if here is None:
        return markdown

    def moved(link: re.Match[str]) -> str:
        target = _site_path(_resolved(here, link[2]))
        if files.get_file_from_path(target) is None:
            return link[0]  # the build says that it leads nowhere
        start = str(PurePosixPath(page.file.src_uri).parent)
        return link[1] + os.path.relpath(target, start) + link[3]

    return LINK.sub(moved, markdown)


def _outside(file: File) -> list[str]:
    """Paths in the repository, outside of docs/, that a page links to."""
    here = _repository_path(file)
    if here is None:
        return []
    targets = (_resolved(here, link[2]) for link in LINK.finditer(file.content_string))
    return [path for path in targets if not path.startswith(("docs/", ".."))]


def _repository_path(file: File) -> str | None:
    """Return the path of a page's text in the repository; None for pages that a hook writes."""
    if file.src_uri.startswith(FOLDER):
        return file.src_uri.removeprefix(FOLDER)
    return None if file.generated_by else f"docs/{file.src_uri}"


def _site_path(path: str) -> str:
    return path.removeprefix("docs/") if path.startswith("docs/") else FOLDER + path


def _resolved(here: str, link: str) -> str:
    return os.path.normpath(PurePosixPath(here).parent / link)
