"""Guided generation: what an answer must look like, and which tokens that allows next.

| file | what it holds |
| --- | --- |
| `constraint.py` | what an answer must look like, checked before anything is generated |
| `vocabulary.py` | llguidance's view of a tokenizer |
| `matcher.py` | the state of one row: the tokens that are allowed, and those that are forced |
"""
