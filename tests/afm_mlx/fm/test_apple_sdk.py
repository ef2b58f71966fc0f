"""Apple's own tests of its SDK, run on this package.

The sdist is downloaded when the test runs, and kept in pytest's cache. It has the tests, but not the tools,
schemas and fixtures that they import; `apple_sdk/` has replacements with the same names.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.package_index import sdist

OURS = Path(__file__).parent / "apple_sdk"

# Whole files, and tests of files the rest of which runs.
LEFT_OUT = {
    "needs a model that refuses, or a language that it refuses; ours have no guardrails": """
        test_error_handling::test_guardrail_violation_error
        test_error_handling::test_unsupported_language_or_locale_error
    """,
    "needs a model that follows instructions (three children, the word error), or a larger context": """
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
def test_apples_own_tests_pass(tmp_path):
    folder = shutil.copytree(sdist("apple-fm-sdk", "0.2.1"), tmp_path / "sdk")
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
    assert "164 passed, 15 deselected" in run.stdout, run.stdout[-500:]
