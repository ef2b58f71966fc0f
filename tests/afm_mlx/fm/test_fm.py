"""The package: its names, its import, and the hierarchy of its errors."""

import subprocess
import sys

import pytest

from afm_mlx import fm

SCRIPT = """
import sys
from afm_mlx import fm
assert not {"mlx.core", "numpy", "llguidance", "msgspec"} & set(sys.modules), "importing costs too much"
from afm_mlx.fm.__main__ import stand_in
stand_in()
stand_in()
import apple_fm_sdk
import apple_fm_sdk.generation_guide as guides
from apple_fm_sdk.generable_utils import generable
from apple_fm_sdk.generation_property import Property
from apple_fm_sdk.generable import GeneratedContent
from apple_fm_sdk.prompt import ImageAttachment
assert apple_fm_sdk is fm and GeneratedContent is fm.GeneratedContent and guides.guide is fm.guide
assert callable(fm.generable), "the module took the decorator's place"
assert generable is fm.generable
"""


def test_the_package_is_light_and_stands_in_for_apples():
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)


def test_names_that_there_are_not_are_refused():
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = fm.Nothing


def test_errors_have_the_hierarchy_of_the_sdk():
    generation = {
        e for e in vars(fm).values() if isinstance(e, type) and issubclass(e, fm.GenerationError)
    }
    assert {e.__name__ for e in generation} == {
        *("GenerationError", "ExceededContextWindowSizeError", "AssetsUnavailableError"),
        *("GuardrailViolationError", "UnsupportedGuideError", "UnsupportedLanguageOrLocaleError"),
        *("DecodingFailureError", "RateLimitedError", "ConcurrentRequestsError", "RefusalError"),
    }
    for error in (fm.GenerationError, fm.InvalidGenerationSchemaError, fm.ToolCallError):
        assert error.__bases__ == (fm.FoundationModelsError,)
    refusal = fm.RefusalError("no", "why", [1])
    found = str(refusal), refusal.debug_description, refusal.explanation_entries
    assert found == ("no", "why", [1])
    assert fm.RefusalError("no").explanation_entries == []
    cause = KeyError("x")
    failed = fm.ToolCallError("search", cause)
    assert (failed.tool_name, failed.underlying_error) == ("search", cause)
    assert "search" in str(failed)
    assert [code.value for code in fm.GenerationErrorCode] == [*range(11), 255]
    assert fm.GenerationErrorCode.INVALID_SCHEMA == 10
