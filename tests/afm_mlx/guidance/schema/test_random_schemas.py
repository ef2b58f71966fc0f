"""Random schemas of all keywords, held against jsonschema."""

import json
from itertools import permutations

from afm_mlx.errors import ConstraintError
from bench.json_schemas import is_valid
from tests.tools.cases import each
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
