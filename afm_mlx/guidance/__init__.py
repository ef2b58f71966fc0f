"""Guided generation: what an answer must look like, and which tokens that allows next.

| file | what it holds |
| --- | --- |
| `constraint.py` | what an answer must look like, checked before anything is generated |
| `vocabulary.py` | llguidance's view of a tokenizer |
| `matcher.py` | the state of one row: the tokens that are allowed, and those that are forced |
| `unique_items.py` | lists whose items must differ: which tokens that forbids |
| `deep_stack.py` | a stack for llguidance's compiler, however deep a grammar goes |
| `completion.py` | the shortest text that brings an unfinished answer to an end |
| `tool_calls.py` | the constraint of an answer that may or must call tools |
| `schema/` | JSON schemas as grammars: rewritten where llguidance lacks a keyword, or refused |
| `types.py` | a Python type: its schema, instances from answers, snapshots of unfinished ones |
| `type_libraries.py`, `type_fields.py` | msgspec and pydantic, which know types; what annotations are made of |
| `pydantic_schema.py` | pydantic's schemas, made to say all that its types ask for |
| `type_schema.py` | their schemas, in the form in which AFM was shown schemas |
| `function_arguments.py` | a function's parameters as a type |
| `snapshots.py` | typed values from the beginning of a JSON text |
"""
