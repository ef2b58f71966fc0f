"""The Swift package: its sources can be parsed, and the names in them are a bundle's. No compiler is needed.

The types are checked by nobody here: the workflow Swift builds the package on a Mac.
"""

import re

import numpy as np
import pytest

from tests.conftest import SEED
from tests.tools.coreai import make_bundle
from tests.tools.documents import ROOT

PACKAGE = ROOT / "examples" / "swift"
SOURCES = [file for file in PACKAGE.rglob("*.swift") if ".build" not in file.parts]


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: file.name)
def test_sources_can_be_parsed(file):
    tree_sitter = pytest.importorskip("tree_sitter")
    swift = tree_sitter.Language(pytest.importorskip("tree_sitter_swift").language())

    def parse(content):
        return tree_sitter.Parser(swift).parse(content).root_node

    content = file.read_bytes()
    assert not parse(content).has_error
    assert parse(content[: len(content) // 2]).has_error


def test_names_are_a_bundle_s(spm, tmp_path):
    """Functions, inputs and states that the sources call, and files that they read."""
    authoring = pytest.importorskip("coreai.authoring", reason="pip install '.[coreai]'")
    made = make_bundle(tmp_path, spm, np.random.default_rng(SEED))
    asset = authoring.AIModelAsset.load(made.bundle / "tiny.aimodel").summary()
    source = (PACKAGE / "Sources" / "AFMBundle" / "AdaptedAnswers.swift").read_text()
    (step, prompt, suffix) = (
        re.search(pattern, source)[1]
        for pattern in (r'"(\w+)" : "prompt', r'"(prompt_)\\\(', r'"" : "(\w+)"')
    )
    for name, extra in ((step, set()), (f"{prompt}4", {"count"})):
        for end in ("", suffix):
            assert name + end in asset.function_names
        inputs = {each for each, _ in asset.function_inputs(name)}
        assert inputs == {"tokens", "position"} | extra
    assert set(re.findall(r'inputs\["(\w+)"\]', source)) == {"tokens", "position", "count"}
    assert set(re.findall(r'state\("(\w+)"\)', source)) == {"keys", "values"}
    assert (made.bundle / "tokenizer" / "tokenizer.json").is_file()
