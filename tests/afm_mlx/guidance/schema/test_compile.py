"""Whole schemas: random ones of all keywords, and the official suite, held against jsonschema."""

import json
from itertools import permutations

import pytest

from afm_mlx.errors import ConstraintError
from bench.json_schemas import Measurement, is_valid, measure_suite
from tests.tools.cases import each
from tests.tools.package_index import sdist
from tests.tools.random_schemas import in_draft, random_document, random_schema

DRAFTS = {
    4: "http://json-schema.org/draft-04/schema#",
    7: "http://json-schema.org/draft-07/schema#",
    2019: "https://json-schema.org/draft/2019-09/schema",
    2020: "https://json-schema.org/draft/2020-12/schema",
}
SCHEMAS = {4: 15, 7: 20, 2019: 15, 2020: 60}


@each("draft", list(DRAFTS))
def test_random_schemas_are_kept_or_refused(checker, rng, draft):
    """No invalid document is generated or accepted, and few valid ones are rejected."""
    accepted = rejected = 0
    for child in rng.spawn(SCHEMAS[draft]):
        schema = in_draft(random_schema(child), draft)
        if not isinstance(schema, dict):
            continue
        schema = {"$schema": DRAFTS[draft], **schema}
        try:
            checker.check(schema, generated=2)
        except ConstraintError:
            continue
        matcher = checker.matcher(schema)
        for document in (random_document(child) for _ in range(10)):
            has = any(checker.has(matcher, text) for text in _orders(document))
            assert not has or is_valid(schema, document), f"{schema} accepts {json.dumps(document)}"
            accepted += has
            rejected += not has and is_valid(schema, document)
    if draft == 2020:  # keywords that older drafts don't know are honoured all the same
        assert rejected <= 0.1 * accepted


def _orders(document):
    if not isinstance(document, dict):
        return [document]
    return [{name: document[name] for name in names} for names in permutations(document)]


@pytest.mark.slow
def test_the_official_suite_is_kept_or_refused(rng):
    """The suite is in jsonschema's source distribution."""
    folder = sdist("jsonschema", "4.26.0") / "json"
    figures = measure_suite(folder, Measurement(int(rng.integers(2**32)), documents=5))
    assert figures.faults == []
    assert figures.wrong == figures.invalid == 0
    assert figures.schemas > 350
    assert figures.honoured >= 0.85 * figures.schemas
    assert figures.honoured > 1.5 * figures.alone
    assert figures.accepted >= 0.9 * (figures.accepted + figures.rejected)
    assert max(figures.seconds) < 20
