"""Guided generation: constraints on answers, and the tokens that they allow next.

| file | what it holds |
| --- | --- |
| `constraint.py` | constraints, checked before anything is generated |
| `call_forms.py` | how families of models write calls of tools |
| `tool_calls.py` | the constraint of an answer that may or must call tools |
| `keyword_arguments.py` | arguments of calls that are keywords, not JSON |
| `answer_parts.py` | splitting an answer into thoughts, text and calls |
| `schema/` | JSON schemas as grammars |
| `matcher.py` | the state of one row: allowed tokens, forced tokens, the shortest completion |
| `unique_items.py` | lists whose items must differ |
| `token_bytes.py` | tokenizers for llguidance |
| `deep_stack.py` | calls of llguidance's compiler, bounded in stack and time |
| `types.py` | Python types as answers: instances, and snapshots of unfinished ones |
| `type_libraries.py`, `pydantic_schema.py` | reading types with msgspec or pydantic |
"""
