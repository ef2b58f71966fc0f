"""Where the examples' scripts are, seeds, tamm's preprocessor, and a record of the values in their data."""

import string
import sys
from pathlib import Path

import pytest

from tests.tools.tokenizers import train_tiny_spm

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES / "adapters"))
sys.path.insert(0, str(EXAMPLES / "nano"))

import inbox  # noqa: E402


@pytest.fixture(params=list(inbox.TASKS))
def task(request) -> str:
    """A task of the example adapters."""
    return request.param


@pytest.fixture
def slots():
    """A function that returns the names of a wording's values."""
    return lambda text: {field for _, field, _, _ in string.Formatter().parse(text) if field}


@pytest.fixture
def seed(rng) -> int:
    return int(rng.integers(1 << 30))


@pytest.fixture
def drawn(monkeypatch) -> dict[str, set[str]]:
    """Values that were drawn for each split, while the test runs."""
    import values

    found: dict[str, set[str]] = {"train": set(), "test": set()}
    draw = values.Values.draw

    def recording_draw(self, kind, avoid=()):
        value = draw(self, kind, avoid)
        found[self.split].add(value)
        return value

    monkeypatch.setattr(values.Values, "draw", recording_draw)
    return found


@pytest.fixture(scope="session")
def spm(tmp_path_factory) -> Path:
    return train_tiny_spm(tmp_path_factory.mktemp("spm") / "tokenizer.model", "bpe")


@pytest.fixture
def preprocessor(spm):
    """tamm's, with the tokenizer of a tiny vocabulary."""
    from tamm.preprocessors.instruct_lm.afm import AFMChatTemplateV6Preprocessor
    from tamm.tokenizers.afm import AFMTokenizer

    tokenizer = AFMTokenizer(str(spm), extra_properties={"eot_id": 4})
    return AFMChatTemplateV6Preprocessor(tokenizer, prepend_system_message=False)
