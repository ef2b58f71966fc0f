"""JSON schemas as grammars: whatever is generated is valid, and what can't be honoured is refused beforehand.

llguidance compiles JSON schemas itself, but honours under half of the official test suite. So its own compiler
is left aside; it is given a grammar in its Lark syntax. A schema becomes one in four steps, each a pure
function of the one before:

    schema  --references, drafts-->  formulas  --expansion, complements-->  cases  --*_rules-->  rules  --> Lark

- A **formula** joins schemas by and, or, not. A **case** is what they allow of one type: some numbers, some
  strings, some arrays, some objects. A schema is the union of its cases; `allOf` is where two meet, `anyOf` is
  more of them, `not` is the union of what contradicts each keyword. `oneOf`, `if` and the dependencies follow
  from these.
- Schemas of properties and items stay formulas in the cases, and become rules of their own, which may be
  recursive. Rules that no finite document fulfils are taken out; so are the alternatives that need them.
- Patterns and formats become sets of strings (`regular`), which intersect and have complements.

| file | what it holds |
| --- | --- |
| `grammar.py` | the whole way: `schema_grammar` |
| `drafts.py`, `references.py`, `formulas.py` | the document: drafts 4 to 2020-12, what a `$ref` stands for |
| `cases.py`, `keywords.py` | sets of values of one type, and what keywords say about them |
| `expansion.py`, `complements.py` | formulas to cases |
| `numbers.py`, `strings.py`, `formats.py`, `patterns.py`, `regular.py` | plain values and their JSON text |
| `rules.py`, `builder.py`, `array_rules.py`, `object_rules.py` | cases to rules, and rules to Lark |
| `refusals.py` | errors with the place in the schema, and the budget that bounds the work |

The grammar never allows an invalid document. It allows fewer than all valid ones in these ways:

- Text is as `json.dumps` writes it, without escapes of printable characters; control characters come only as
  `\\n`, `\\t`, `\\r`, `\\b`, `\\f`, unless the schema names them. Decimals have at most 15 digits; integers 18,
  or as many as a bound asks for. Exponents are written only without bounds. Listed numbers and constants come
  as the schema writes them.
- Properties come in one order: of `x-order`, else as listed, then those that are only required, then others.
  Of `minProperties`, one at most is met by a name that is not listed, as such a name could come twice.
- Lists of `uniqueItems` are marked for `unique_items`, which forbids equal items while they are written.
- Formats are kept: `formats.py` has patterns for all that the drafts list.
- A pattern holds what it means by ECMA's rules and by Python's, which `jsonschema` uses.
- Keywords that a newer or older draft has (`const` in draft 4, `dependencies` in 2020-12) are honoured, too,
  where that only rules documents out.
- Complements leave out numbers that are no multiple, arrays with equal items, and what `unevaluated...` would
  refuse.

Refused by their place: back-references, look-behind, word borders and look-ahead
inside a repetition in patterns; references to other documents; what no document can fulfil; what multiplies
beyond a budget.
"""

from afm_mlx.guidance.schema.grammar import schema_grammar

__all__ = ["schema_grammar"]
