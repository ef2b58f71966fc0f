"""Expands formulas to cases, schema by schema.

The strict expansion never allows too much: its cases have valid documents only, and a complement's cases
invalid ones only. The wide one never allows too little: it shows that two schemas have no document in common,
so that `oneOf` needs no complements.

Schemas of properties and items are expanded where the grammar reaches them. References, `allOf`, `anyOf`,
`oneOf`, `not` and `if` are about the same value and are expanded at once; a schema that refers to itself this
way has no meaning and is refused.

A document is invalid when one keyword rejects it, so the complement of a schema is a union. Complements that
no grammar can express (an array with two equal items, a number that is not a multiple) are left out, which
allows less.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from afm_mlx.errors import ConstraintError
from afm_mlx.guidance.schema.cases import (
    EVERY_CASE,
    Arrays,
    Case,
    Contains,
    Keywords,
    Layer,
    Numbers,
    Objects,
    Some,
    Strings,
    Words,
    arrays,
    constants,
    joined,
    numbers,
    objects,
    pattern,
    strings,
    typed_case,
    types,
    unevaluating,
)
from afm_mlx.guidance.schema.numbers import exact
from afm_mlx.guidance.schema.patterns import searched
from afm_mlx.guidance.schema.references import (
    FALSE,
    TRUE,
    CompileBudget,
    Document,
    Formula,
    Node,
    check_count,
    conjunction,
    disjunction,
    honoured_keywords,
    negation,
    pointer,
    refuse,
    refuse_at,
)
from afm_mlx.guidance.schema.regular import complement
from afm_mlx.guidance.schema.strings import LOOSE
from afm_mlx.guidance.schema.strings import PATTERNS as FORMATS

MAX_IN_PLACE = 50  # deepest nesting of schemas about one value, by references or inside each other
_SUBSETS = 4
"""Most alternatives of `anyOf` whose combinations are followed for what they evaluate together."""
_LOOK = 3  # levels of required properties that are followed to tell that two objects differ
_EVERY = tuple(EVERY_CASE.values())


class Expansion:
    """Expands formulas of one document to cases; `is_wide` if they may allow too much, instead of too little.

    Attributes:
        dropped: places of keywords whose complement is left out.
    """

    def __init__(self, document: Document, budget: CompileBudget, is_wide: bool = False) -> None:
        self.document = document
        self.dropped: list[str] = []
        self.budget, self._is_wide = budget, is_wide
        self._known: dict[Formula, tuple[Case, ...]] = {TRUE: _EVERY, FALSE: ()}
        self._open: dict[Formula, None] = {}
        self._void: set[Formula] = set()
        self._wide = self if is_wide else Expansion(document, budget, is_wide=True)

    def cases(self, formula: Formula) -> tuple[Case, ...]:
        """Return the cases of a formula, cached: sets of values of one type each, whose union stands for it.

        A formula joins schemas by and, or, not. Raises `ConstraintError` for what can't be honoured.
        """
        if (known_cases := self._known.get(formula)) is not None:
            return known_cases
        place = self.document.place(formula)
        if formula in self._open:
            refuse_at(
                place,
                "a schema refers to itself without an end, so no document is valid. Fix the reference.",
            )
        if len(self._open) >= MAX_IN_PLACE:
            refuse_at(
                place, f"more than {MAX_IN_PLACE} nested schemas apply to one value. Use fewer."
            )
        self._open[formula] = None
        try:
            result = self._expanded(formula, place)
        finally:
            del self._open[formula]
        check_count(place, len(result))
        self._known[formula] = result
        return result

    def _expanded(self, formula: Formula, place: str) -> tuple[Case, ...]:
        if formula[0] == "and":
            # Contradictions end the work early; alternatives come last.
            parts = sorted(formula[1], key=lambda part: part[0] == "or")
            result = list(self.cases(parts[0]))
            for part in parts[1:]:
                result = self._product(result, self.cases(part), place)
            return tuple(result)
        if formula[0] == "or":
            return joined(case for part in formula[1] for case in self.cases(part))
        node = self.document.nodes[formula[1]]
        if node.value is False:
            return () if formula[2] else _EVERY
        return tuple(self._inside(node) if formula[2] else self._outside(node))

    def _product(self, a: list[Case], b: tuple[Case, ...], place: str) -> list[Case]:
        """Return the intersections of each case of `a` with each case of `b` that may have values."""
        self.budget.spend(place, len(a) * len(b))
        met = [x.intersect(y) for x in a for y in b if type(x) is type(y)]  # type: ignore[arg-type]
        result = list(dict.fromkeys(x for x in met if x is not None and not self._is_void(x)))
        check_count(place, len(result))
        return result

    def _inside(self, node: Node) -> list[Case]:
        """Return the cases of a schema."""
        document, place = self.document, node.place
        value = honoured_keywords(node.value, node.draft, strictly=self._is_wide)
        result = []
        for name in types(value, place):
            case = typed_case(name, value, node, document, self._is_wide)
            result += [] if self._is_void(case) else [case]
        for key in ("const", "enum"):
            if key in value:
                listed, formulas = constants(node, document, key)
                listed += [unevaluating(case) for one in formulas for case in self.cases(one)]
                result = self._product(result, tuple(listed), place)
        for formula in self._in_place(node, value):
            result = self._product(result, self.cases(formula), place)
        for key in () if self._is_wide else ("unevaluatedProperties", "unevaluatedItems"):
            if key in value:
                rest = document.below(node, key)
                result = [_with_unevaluated(case, rest, key) for case in result]
        return result

    def raw_cases(self, formula: Formula) -> list[Case]:
        """Return the cases that a schema's own keywords allow, also those that no value fulfils."""
        node = self.document.nodes[formula[1]] if formula[0] == "node" and formula[2] else None
        if node is None or not isinstance(node.value, dict):
            return list(self.cases(formula))
        value = honoured_keywords(node.value, node.draft, strictly=False)
        if "$ref" in value and len(value) == 1:
            return self.raw_cases(self.document.referred(node, "$ref"))
        return [
            typed_case(name, value, node, self.document, False) for name in types(value, node.place)
        ]

    def _outside(self, node: Node) -> list[Case]:
        """Return the cases of a schema's complement; record keywords whose complement is left out."""
        document, place, is_wide = self.document, node.place, self._is_wide
        value = honoured_keywords(node.value, node.draft, strictly=not is_wide)
        named = types(value, place)
        cases = [
            Numbers(is_integer=False) if name == "number" and "integer" in named else case
            for name, case in EVERY_CASE.items()
            if name not in named
        ]

        def drop(key: str, instead: list[Case]) -> None:
            self.dropped.append(pointer(place, key))
            cases.extend(instead if is_wide else [])

        if "integer" in named or "number" in named:
            whole = numbers({k: v for k, v in value.items() if k != "multipleOf"}, place, False)
            if whole.low is not None:
                cases.append(Numbers(high=whole.low, below=not whole.above))
            if whole.high is not None:
                cases.append(Numbers(low=whole.high, above=not whole.below))
            if "multipleOf" in value:
                drop("multipleOf", [Numbers()])
        if "string" in named:
            cases += _not_strings(value, node, is_wide)
        if "array" in named:
            cases += _not_arrays(arrays(value, node, document))
            if value.get("uniqueItems") is True:
                drop("uniqueItems", [Arrays(least=2)])
        if "object" in named:
            cases += _not_objects(objects(value, node, document))
        for key in ("unevaluatedItems", "unevaluatedProperties"):
            if key in value:
                drop(key, [*_EVERY])
        result = [case for case in cases if not self._is_void(case)]
        for key in ("const", "enum"):
            if key in value:
                listed, formulas = constants(node, document, key)
                nested: list[Case] = [Arrays(), Objects()]
                for formula in formulas:
                    nested = self._product(nested, self.cases(negation(formula)), place)
                result += [*_unlisted(listed), *nested]
        for formula in self._in_place(node, value):
            result += self.cases(negation(formula))
        return list(dict.fromkeys(map(unevaluating, result)))

    def _in_place(self, node: Node, value: Keywords) -> list[Formula]:
        """List formulas of other schemas about the same value, all of which hold."""
        document = self.document
        references = ("$ref", "$dynamicRef", "$recursiveRef")
        result = [document.referred(node, key) for key in references if key in value]
        for key in ("allOf", "anyOf", "oneOf"):
            if key not in value:
                continue
            if not isinstance(value[key], list) or not value[key]:
                reason = "it is a list of schemas, with one at least."
                refuse(pointer(node.place, key), value[key], reason)
            parts = [document.below(node, key, i) for i in range(len(value[key]))]
            if key == "allOf":
                result += parts
            else:
                result.append(self._any_of(parts) if key == "anyOf" else self._one_of(parts, node))
        if "not" in value:
            result.append(negation(document.below(node, "not")))
        if "if" in value and (document.has_unevaluated or "then" in value or "else" in value):
            condition = document.below(node, "if")
            then = document.below(node, "then") if "then" in value else TRUE
            other = document.below(node, "else") if "else" in value else TRUE
            both = conjunction(condition, then), conjunction(negation(condition), other)
            result.append(disjunction(*both) if condition != TRUE else then)
        return result + self._dependent(node, value)

    def _any_of(self, parts: list[Formula]) -> Formula:
        """Return the formula that one part or more hold: all combinations if `unevaluated...` needs them."""
        if not self.document.has_unevaluated or len(parts) > _SUBSETS:
            return disjunction(*parts)
        subsets = [s for size in range(1, len(parts) + 1) for s in combinations(parts, size)]
        return ("or", tuple(dict.fromkeys(conjunction(*subset) for subset in subsets)))

    def _one_of(self, parts: list[Formula], node: Node) -> Formula:
        """Return the formula that one part alone holds: each, with the complements of parts that overlap it."""
        if self._is_wide:
            return disjunction(*parts)
        # Parts that list different plain values do not overlap; only the other pairs are compared.
        listed = [self._wide.plain_values(part) for part in parts]
        others = [i for i, values in enumerate(listed) if values is None]
        owners: dict[str, list[int]] = {}
        for i, values in enumerate(listed):
            for value in values or ():
                owners.setdefault(value, []).append(i)
        pairs = dict.fromkeys(pair for own in owners.values() for pair in combinations(own, 2))
        pairs |= dict.fromkeys(
            (i, j) for i in range(len(parts)) for j in others if i < j or listed[i] is not None
        )
        self.budget.spend(node.place, len(pairs) // 2)
        shared: list[list[Formula]] = [[] for _ in parts]
        for i, j in map(sorted, pairs):
            if not self.are_disjoint(parts[i], parts[j]):
                shared[i].append(negation(parts[j]))
                shared[j].append(negation(parts[i]))
        return disjunction(
            *(conjunction(part, *wrong) for part, wrong in zip(parts, shared, strict=True))
        )

    def plain_values(self, formula: Formula) -> set[str] | None:
        """Return the values of a formula as texts, if it lists plain values only; else None."""
        try:
            cases = self.cases(formula)
        except ConstraintError:
            return None
        found: set[str] = set()
        for case in cases:
            if isinstance(case, Words):
                found.update(case.words)
            elif isinstance(case, Numbers | Strings) and case.values is not None:
                kind = "n" if isinstance(case, Numbers) else "s"
                found.update(f"{kind}{exact(v) if kind == 'n' else v}" for v in case.values)
            else:
                return None
        return found

    def _dependent(self, node: Node, value: Keywords) -> list[Formula]:
        """List formulas of the conditions on objects that have a property."""
        document, result = self.document, []
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            given = value.get(key, {})
            if not isinstance(given, dict):
                refuse(pointer(node.place, key), given, "it is an object.")
            for name, wanted in given.items():
                wanted = [wanted] if isinstance(wanted, str) else wanted
                has = document.made(node, {"type": "object", "required": [name]}, key, name)
                if isinstance(wanted, list):
                    others = {"type": "object", "required": wanted}
                    then = document.made(node, others, key, name, "then")
                else:
                    then = document.below(node, key, name)
                result.append(disjunction(negation(has), conjunction(has, then)))
        return result

    def are_disjoint(self, a: Formula, b: Formula) -> bool:
        """True if no document can be valid under both formulas."""
        return self._wide.is_void(conjunction(a, b), 0)

    def is_void(self, formula: Formula, depth: int) -> bool:
        """True if a search of bounded depth shows that every case of the formula is empty."""
        if formula == TRUE or depth >= _LOOK:
            return False
        if formula in self._void or formula == FALSE:
            return True
        if formula in self._open:
            return False
        try:
            cases = self.cases(formula)
        except ConstraintError:
            return False  # it is refused where it is used, if it is
        if all(self._is_void(case, depth + 1) for case in cases):
            self._void.add(formula)
            return True
        return False

    def _is_void(self, case: Case, depth: int = 0) -> bool:
        """True if the case, and a search of the values that it needs from `depth` on, show that it is empty."""
        if isinstance(case, Words):
            return False
        if isinstance(case, Numbers | Strings):
            return case.is_void()
        least = max(case.least, len(case.required)) if isinstance(case, Objects) else case.least
        if case.most is not None and least > case.most:
            return True
        return any(self.is_void(formula, depth) for formula in case.needed())


def _with_unevaluated(case: Case, rest: Formula, key: str) -> Case:
    """Apply a schema to everything in a case that no keyword has evaluated."""
    if isinstance(case, Arrays) and key == "unevaluatedItems" and case.evaluated is not None:
        allowed = disjunction(rest, *case.evaluated_by)
        others = Arrays(prefix=(TRUE,) * case.evaluated, items=allowed, evaluated=None)
        return case.intersect(others)
    if isinstance(case, Objects) and key == "unevaluatedProperties":
        evaluating = [layer for layer in case.layers if layer.is_evaluating]
        if any(layer.is_rest_evaluated for layer in evaluating):
            return case
        names = dict.fromkeys(name for layer in evaluating for name, _ in layer.properties)
        patterns = dict.fromkeys(text for layer in evaluating for text, _ in layer.patterns)
        own = Layer(
            properties=tuple((name, TRUE) for name in names),
            patterns=tuple((text, TRUE) for text in patterns),
            rest=rest,
            is_rest_evaluated=True,
        )
        return case.intersect(Objects(layers=(own,)))
    return case


# -- complements


def _not_strings(value: Keywords, node: Node, is_wide: bool) -> list[Case]:
    lengths = {k: v for k, v in value.items() if k not in ("pattern", "format")}
    case = strings(lengths, node.place, True)
    cases: list[Case] = [Strings(longest=case.shortest - 1)] if case.shortest else []
    if case.longest is not None:
        cases.append(Strings(shortest=case.longest + 1))
    if "pattern" in value:
        found = pattern(value["pattern"], pointer(node.place, "pattern"), wide=not is_wide)
        cases.append(Strings(parts=(complement(found),)))
    if (name := value.get("format")) in FORMATS:
        found = searched((FORMATS if is_wide else LOOSE)[name], wide=not is_wide)
        cases.append(Strings(parts=(complement(found),)))
    return cases


def _not_arrays(case: Arrays) -> list[Case]:
    cases: list[Case] = [Arrays(most=case.least - 1)] if case.least else []
    if case.most is not None:
        cases.append(Arrays(least=case.most + 1))
    for i, schema in enumerate(case.prefix):
        if schema != TRUE:
            cases.append(Arrays(prefix=(*(TRUE,) * i, negation(schema)), least=i + 1))
    if case.items != TRUE:
        start = len(case.prefix)
        if case.items == FALSE:
            cases.append(Arrays(least=start + 1))
        else:
            wrong = Contains(start, negation(case.items), 1, None)
            cases.append(Arrays(contains=(wrong,), least=start + 1))
    for one in case.contains:
        if one.least:
            cases.append(Arrays(contains=(replace(one, least=0, most=one.least - 1),)))
        if one.most is not None:
            cases.append(Arrays(contains=(replace(one, least=one.most + 1, most=None),)))
    return cases


def _not_objects(case: Objects) -> list[Case]:
    absent = [Layer(properties=((name, FALSE),)) for name in case.required]
    cases: list[Case] = [Objects(layers=(layer,)) for layer in absent]
    if case.least:
        cases.append(Objects(most=case.least - 1))
    if case.most is not None:
        cases.append(Objects(least=case.most + 1))
    for layer in case.layers:
        for name, schema in layer.properties:
            if schema != TRUE:
                wrong = Layer(properties=((name, negation(schema)),))
                cases.append(Objects(layers=(wrong,), required=(name,)))
        for text, schema in layer.patterns:
            if schema != TRUE:
                cases.append(Objects(some=(Some(negation(schema), like=text),)))
        if layer.rest != TRUE:
            names = tuple(name for name, _ in layer.properties)
            patterns = tuple(text for text, _ in layer.patterns)
            unlisted = Some(negation(layer.rest), besides=names, unlike=patterns)
            cases.append(Objects(some=(unlisted,)))
    cases += [Objects(some=(Some(TRUE, name=negation(schema)),)) for schema in case.names]
    return cases


def _unlisted(cases: list[Case]) -> list[Case]:
    """Return the cases of nulls, Booleans, numbers and strings that are not listed."""
    words = {word for case in cases if isinstance(case, Words) for word in case.words}
    numbers = [v for case in cases if isinstance(case, Numbers) for v in case.values or ()]
    texts = [v for case in cases if isinstance(case, Strings) for v in case.values or ()]
    kept = tuple(word for word in ("null", "true", "false") if word not in words)
    other = Numbers(excluded=frozenset(map(exact, numbers))), Strings(excluded=frozenset(texts))
    return [*([Words(kept)] if kept else []), *other]
