"""Grammars of schemas, and documents that they have."""

from __future__ import annotations

import json

import pytest

from afm_mlx.guidance.matcher import Matcher
from afm_mlx.guidance.schema.compile import schema_grammar
from bench.json_schemas import Measurement, is_valid


class Checker:
    """Compares grammars with jsonschema."""

    def __init__(self) -> None:
        self._measurement = Measurement(0, 0)

    def seed(self, rng) -> None:
        """What is generated from here on follows from a generator."""
        self._measurement.rng = rng

    def check(self, schema, valid=(), invalid=(), generated=5) -> None:
        """A grammar has the valid documents and not the invalid ones, and what it generates is valid."""
        matcher = self.matcher(schema)
        for document in valid:
            assert is_valid(schema, document), f"no case: {document} is invalid"
            assert self.has(matcher, document), f"{document} is rejected"
        for document in invalid:
            assert not is_valid(schema, document), f"no case: {document} is valid"
            assert not self.has(matcher, document), f"{document} is accepted"
        for _ in range(generated):
            text, is_whole, error = self._measurement.sample(matcher)
            assert not error, f"{error} after {text}"
            assert not is_whole or is_valid(schema, json.loads(text)), f"{text} is invalid"

    def matcher(self, schema) -> Matcher:
        return self._measurement.compiled(schema_grammar(schema))

    def has(self, matcher: Matcher, document) -> bool:
        text = json.dumps(document, ensure_ascii=False)
        return self._measurement.try_document(text, matcher)

    def generated(self, matcher: Matcher):
        """A generated document; None when it was cut."""
        text, is_whole, error = self._measurement.sample(matcher)
        assert not error, f"{error} after {text}"
        return json.loads(text) if is_whole else None

    def text(self, schema) -> str:
        """A generated document, whole or cut."""
        return self._measurement.sample(self.matcher(schema))[0]


@pytest.fixture(scope="session")
def _checker():
    return Checker()


@pytest.fixture
def checker(_checker, rng):
    _checker.seed(rng)
    return _checker
