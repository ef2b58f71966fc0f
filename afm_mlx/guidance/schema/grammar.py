"""A JSON schema as a grammar of llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher

from afm_mlx.errors import ConstraintError

OPTIONS: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as `json.dumps` writes it: AFM was trained on that, and white space can't fill an answer."""


def schema_grammar(schema: Mapping[str, Any] | bool) -> str:
    """The grammar of all JSON texts that are valid under a schema.

    Raises:
        ConstraintError: for a keyword that can't be honoured, with its place in the schema.
    """
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=OPTIONS)
    refused, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if refused:
        raise ConstraintError(f"The JSON schema can't be honoured: {' '.join(messages)}")
    return grammar
