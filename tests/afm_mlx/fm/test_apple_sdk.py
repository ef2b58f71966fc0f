"""Apple's own tests of its SDK, on this package.

The sdist is fetched from the package index when the test runs, and kept in pytest's cache. It has the tests,
but not the tools, schemas and fixtures that they import: `apple_sdk/` has ours, with the same names.
"""

import hashlib
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

SDIST = "apple_fm_sdk-0.2.1.tar.gz"
SHA256 = "e1801d68ae0517f8524c31723b1dc1a662bf9d06b7a9cc765c9dddb77e647980"
OURS = Path(__file__).parent / "apple_sdk"

# Whole files, and tests of files the rest of which runs.
LEFT_OUT = {
    "needs a model that sees": """
        test_image_prompts::test_text_and_image_prompt
        test_image_prompts::test_multiple_images_with_text
        test_image_prompts::test_image_only_with_session_instructions
        test_image_prompts::test_image_list_with_session_instructions
        test_image_prompts::test_guided_generation_with_image
        test_image_prompts::test_guided_generation_with_schema_and_image
        test_image_prompts::test_guided_generation_with_multiple_images
        test_image_prompts::test_attachment_with_label
        test_image_prompts::test_attachment_without_label
        test_image_prompts::test_multiple_attachments_with_labels
        test_image_prompts::test_text_dense_image_analysis
    """,
    "needs a model that refuses, or a language that it refuses; ours have no guardrails": """
        test_error_handling::test_guardrail_violation_error
        test_error_handling::test_unsupported_language_or_locale_error
    """,
    "needs a model that does as it is told (three children, the word error), or a larger context": """
        test_guided_generation::test_person_generable test_json_guided_generation::test_person_schema
        test_guided_generation::test_pet_club_generable test_json_guided_generation::test_pet_club_schema
        test_guided_generation::test_newsletter_generable test_json_guided_generation::test_newsletter_schema
        test_tool::test_tool_error_handling
    """,
    "needs a model whose answers take more than a tenth of a second": """
        test_memory::test_timeout_handling test_memory::test_error_path_cleanup_cancelled_request
        test_memory::test_concurrent_requests_queued
    """,
    "is a script that takes minutes": """
        test_memory_stress
    """,
    "looks at addresses of objects of Apple's library": """
        test_transcript::test_transcript_lifetime_with_session
        test_transcript::test_transcript_pointer_validity
    """,
    "imports the module that binds Apple's library": """
        test_error_handling::test_status_code_mapping
    """,
}


@pytest.mark.slow
def test_apples_own_tests_pass(tmp_path, pytestconfig):
    with tarfile.open(sdist(Path(pytestconfig.cache.mkdir("apple-fm-sdk")))) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / SDIST.removesuffix(".tar.gz")
    tests = folder / "tests"
    shutil.copytree(OURS, tests, dirs_exist_ok=True)
    (tests / "apple_conftest.py").rename(tests / "conftest.py")
    left_out = [
        f"--deselect=tests/{file}.py{separator}{test}"
        for names in LEFT_OUT.values()
        for file, separator, test in (name.partition("::") for name in names.split())
    ]

    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *left_out, "tests"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )

    assert run.returncode == 0, run.stdout[-20000:] + run.stderr
    assert "skipped" not in run.stdout, run.stdout


def sdist(cache: Path) -> Path:
    """The path of Apple's sdist; skips the test where it can't be had."""
    path = cache / SDIST
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != SHA256:
        try:
            data = download()
        except (OSError, LookupError) as error:
            pytest.skip(f"{SDIST} can't be had: {error}")
        assert hashlib.sha256(data).hexdigest() == SHA256, f"{SDIST} is not the file that it was"
        path.write_bytes(data)
    return path


def download() -> bytes:
    """The sdist from the package index that pip is set up for."""
    project = f"{index_url().rstrip('/')}/apple-fm-sdk/"
    accept = "application/vnd.pypi.simple.v1+json, text/html;q=0.1"
    request = urllib.request.Request(project, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=60) as page:
        is_json, text = "json" in page.headers.get_content_type(), page.read().decode()
    if is_json:
        links = [file["url"] for file in json.loads(text)["files"]]
    else:
        links = [html.unescape(link) for link in re.findall(r'href="([^"]+)"', text)]
    link = next((one for one in links if SDIST in one), None)
    if link is None:
        raise LookupError(f"{project} doesn't have it")
    with urllib.request.urlopen(urllib.parse.urljoin(project, link), timeout=60) as file:
        return file.read()


def index_url() -> str:
    """The address of the package index."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    configured = subprocess.run(command, capture_output=True, text=True, timeout=60)
    own = os.environ.get("PIP_INDEX_URL") or configured.stdout.strip()
    return own or "https://pypi.org/simple"
