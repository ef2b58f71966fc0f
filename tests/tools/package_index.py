"""Sources of published packages, for tests that hold ours against them: fetched once, kept in the cache."""

from __future__ import annotations

import hashlib
import html.parser
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from pip._internal.models.index import PyPI

CACHE = Path(__file__).parents[2] / ".pytest_cache" / "d" / "sdists"
"""Where `config.cache.mkdir("sdists")` would be."""
_TIMEOUT = 20  # seconds
_ACCEPTED = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"


def sdist(name: str, version: str) -> Path:
    """The unpacked source distribution of a package: the folder that its archive holds.

    The test is skipped where the package index that pip uses can't be reached or lacks it, and fails when the
    file is not the one whose sha256 the index gives.
    """
    stem = f"{re.sub('[-_.]+', '_', name).lower()}-{version}"
    folder = CACHE / stem
    if not folder.is_dir():
        try:
            _unpack(_archive(name, f"{stem}.tar.gz"), folder)
        except (urllib.error.URLError, TimeoutError, LookupError) as error:
            pytest.skip(f"{name} {version} can't be had from {_index()}: {error}")
    return folder


def _index() -> str:
    """The URL of the package index that pip is configured for."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    configured = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return (os.environ.get("PIP_INDEX_URL") or configured or PyPI.simple_url).rstrip("/")


def _archive(name: str, file: str) -> bytes:
    page = f"{_index()}/{re.sub('[-_.]+', '-', name).lower()}/"
    content, kind = _get(page)
    if kind.endswith("json"):
        links = [(f["url"], f["hashes"].get("sha256")) for f in json.loads(content)["files"]]
    else:
        parser = _Links()
        parser.feed(content.decode())
        links = [tuple(link.split("#sha256=")) for link in parser.links if "#sha256=" in link]
    for link, sha256 in links:
        url = urllib.parse.urljoin(page, link)
        if urllib.parse.urlsplit(url).path.rpartition("/")[2].lower() == file:
            found = _get(url)[0]
            assert hashlib.sha256(found).hexdigest() == sha256, f"{url} is not what was promised"
            return found
    raise LookupError(f"it has no {file}")


class _Links(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for key, value in attrs if tag == "a" and key == "href" and value]


def _get(url: str) -> tuple[bytes, str]:
    """What lies at a URL, and its content type."""
    request = urllib.request.Request(url, headers={"Accept": _ACCEPTED})
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
        return answer.read(), answer.headers.get_content_type()


def _unpack(archive: bytes, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(scratch, filter="data")
        (unpacked,) = Path(scratch).iterdir()
        try:
            unpacked.rename(folder)
        except OSError:  # another worker was first
            assert folder.is_dir()
