"""JSON schemas as grammars: whatever is generated is valid, and what can't be honoured is refused beforehand.

llguidance compiles JSON schemas itself, but honours under half of the official test suite, and its numbers
have no end. So it is given a grammar in its Lark syntax, compiled in four steps:

    schema  --references-->  formulas  --expansion-->  cases  --containers, numbers, strings-->  rules  --> Lark

- A **node** is one schema of the document, its **place** the JSON pointer to it. A **formula** joins nodes by
  and, or, not. A **case** is a set of values of one type: **words** (null, true, false), numbers, strings,
  arrays or objects. A schema is the union of its cases: `allOf` intersects them, `anyOf` adds more, `not` is
  the union of what contradicts each keyword; `oneOf`, `if` and dependencies follow from these.
- A case of objects has a **layer** for each schema that speaks of properties. Items and properties that a
  keyword has looked at are **evaluated**; `unevaluated...` keywords are about the others.
- Schemas of properties and items stay formulas in the cases, and become rules, which may be recursive. Rules
  that no finite document matches are removed, with the alternatives that need them.
- Patterns and formats become sets of strings (`regular`), which have intersections and complements.

| file | what it holds |
| --- | --- |
| `compile.py` | the entry, `schema_grammar` |
| `references.py` | refusals, the work budget, drafts, references, formulas |
| `cases.py`, `expansion.py` | keywords to cases, formulas to cases, complements included |
| `numbers.py`, `strings.py`, `patterns.py`, `regular.py` | plain values, and their JSON text |
| `containers.py`, `rules.py` | cases as rules, and rules as Lark |

The grammar never allows an invalid document. It leaves out some valid ones:

- Text is as `json.dumps` writes it, without escapes of printable characters; control characters come only as
  `\\n`, `\\t`, `\\r`, `\\b`, `\\f`, unless the schema names them. Decimals have at most 15 digits; integers 18,
  or more if a bound needs them. Exponents are written only without bounds. Listed values come as in the schema.
- Properties come in one order: of `x-order`, else as listed, then required unlisted ones, then others.
  Of `minProperties`, at most one is met by a name that is not listed, as such a name could come twice.
- Formats are kept: `strings.py` has patterns for all that the drafts list.
- A pattern means what ECMA's rules and Python's, which `jsonschema` uses, have in common.
- Keywords of newer or older drafts (`const` in draft 4, `dependencies` in 2020-12) are honoured where they only
  rule documents out.
- Complements leave out numbers that are not multiples, arrays with equal items, and what `unevaluated...` would
  refuse.

Refused with their place: back-references, look-behind, word borders and look-ahead inside a repetition of
patterns; references to other documents; schemas that no document fulfils or that exceed the work budget.
"""
