"""A real browser for tests of pages: the machine's Chromium or Chrome, or the one that Playwright fetched."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

COMMANDS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
# Without its sandbox it also runs as root, as in containers: it opens our page only. A GPU process costs time.
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--in-process-gpu")
MAC_CHROME = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")


def _executable(own: str) -> str | None:
    found = next(filter(None, map(shutil.which, COMMANDS)), None)
    return found or next((str(path) for path in (MAC_CHROME, Path(own)) if path.exists()), None)


@contextmanager
def browser() -> Iterator[Any]:
    """Start a browser. Without one the test is skipped, or fails if AFM_MLX_REQUIRE_BROWSER is 1."""
    unavailable = pytest.fail if os.environ.get("AFM_MLX_REQUIRE_BROWSER") == "1" else pytest.skip
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        unavailable("Playwright is not installed: it has no wheels for this machine")
    with sync_playwright() as playwright:
        executable = _executable(playwright.chromium.executable_path)
        if executable is None:
            unavailable(
                "no browser: install Chromium or Chrome, or run `python -m playwright install chromium`"
            )
        started = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        try:
            yield started
        finally:
            started.close()
