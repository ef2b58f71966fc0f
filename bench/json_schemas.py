"""Measure how many JSON schemas are honoured, here and by llguidance alone, and if generated values are valid.

    git clone https://github.com/json-schema-org/JSON-Schema-Test-Suite suite
    git clone https://github.com/guidance-ai/jsonschemabench schemas
    pip install '.[test]'
    python -m bench.json_schemas --suite suite --schemas schemas --count 1000 --seed 0 --documents 3

Of the suite, the schemas of draft 2020-12 are taken, optional ones aside; of the bench, as many of each of
its ten sets. For each schema that is honoured, documents are generated with the embedded model's tokenizer:
every token that the grammar allows is as likely as the next, which comes to corners where a model would not.
`jsonschema` judges them with its checks of formats, by the draft that the schema is written in; `multipleOf`
is decided in decimal, as the drafts define it, where `jsonschema` divides binary numbers. The suite's own
documents are tried, too: invalid ones have to be rejected; valid ones are accepted as far as the grammar allows
their order of properties and their form of numbers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from llguidance import LLMatcher, LLParserLimits

from afm_mlx.errors import ConstraintError
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.guidance.matcher import Matcher, fill_masks
from afm_mlx.guidance.schema.compile import schema_grammar
from afm_mlx.guidance.schema.numbers import exact
from afm_mlx.guidance.schema.references import draft_of
from afm_mlx.guidance.token_bytes import ll_tokenizer
from afm_mlx.loading.resolve import EMBEDDED_MODEL, resolve_model
from afm_mlx.tokenizer.tokenizer import load_tokenizer

TOKENS = 256
"""Tokens of a generated document at most."""
ENDING = 0.25
"""How often a token is chosen of those that may end a string, a list, an object or the document."""
_LIMITS = LLParserLimits(verbose_errors=False)


def _multiples(validator: Any, step: Any, number: Any, schema: Any) -> Iterator[Any]:
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if is_number and exact(number) % exact(step):
        yield jsonschema.ValidationError(f"{number} is not a multiple of {step}")


_VALIDATORS = {
    draft: jsonschema.validators.extend(kind, {"multipleOf": _multiples})
    for draft, kind in {
        4: jsonschema.Draft4Validator,
        6: jsonschema.Draft6Validator,
        7: jsonschema.Draft7Validator,
        2019: jsonschema.Draft201909Validator,
        2020: jsonschema.Draft202012Validator,
    }.items()
}


@dataclass
class Figures:
    """What was counted of one set of schemas.

    Attributes:
        schemas: number of schemas that were tried.
        alone: number of schemas that llguidance honours by itself, without `schema_grammar`.
        refused: number of schemas that we refuse, by the keyword that the error names.
        valid, cut, invalid: numbers of generated documents; `cut` ones reached the token limit.
        accepted, rejected: numbers of valid documents of the suite that the grammar accepts and rejects.
        wrong: number of invalid documents of the suite that the grammar accepts.
        seconds: processor seconds for making and compiling each grammar.
        faults: descriptions of our errors, such as an invalid document, each with the schema's name.
    """

    schemas: int = 0
    alone: int = 0
    honoured: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    valid: int = 0
    cut: int = 0
    invalid: int = 0
    accepted: int = 0
    rejected: int = 0
    wrong: int = 0
    seconds: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


class Measurement:
    """Tries schemas: makes their grammars, and generates documents from these.

    Args:
        seed: seed of the generated documents.
        documents: number of documents to generate for each schema.

    Attributes:
        rng: random generator that chooses tokens.
    """

    def __init__(self, seed: int, documents: int) -> None:
        self._tokenizer = load_tokenizer(resolve_model(EMBEDDED_MODEL))
        self._inner = ll_tokenizer(self._tokenizer)
        self.rng, self._documents = np.random.default_rng(seed), documents
        texts = [self._inner.decode_str([token]) for token in range(self._inner.vocab_size)]
        self._is_ending = np.array([any(c in text for c in '"]}') for text in texts])
        self._is_ending[list(self._tokenizer.eos_token_ids)] = True

    def try_schema(self, name: str, schema: Any, figures: Figures) -> Matcher | None:
        """Try a schema, and add the outcome to `figures`; return its grammar's matcher, None if it is
        refused.
        """
        figures.schemas += 1
        figures.alone += _is_honoured_alone(schema)
        start = time.process_time()
        try:
            grammar = schema_grammar(schema)
        except ConstraintError as error:
            figures.seconds.append(time.process_time() - start)
            figures.refused[_keyword(str(error))] += 1
            return None
        except Exception as error:  # whatever goes wrong is a fault of ours
            figures.faults.append(f"{name}: {type(error).__name__}: {error}"[:300])
            return None
        try:
            matcher = self.compiled(grammar)
        except ConstraintError as error:
            figures.faults.append(f"{name}: {error}"[:300])
            return None
        figures.seconds.append(time.process_time() - start)
        figures.honoured += 1
        for _ in range(self._documents):
            self._generate(name, schema, matcher, figures)
        return matcher

    def compiled(self, grammar: str) -> Matcher:
        """Return a matcher at the start of a grammar, for the embedded model's tokenizer."""
        return Matcher(Constraint(grammar, "JSON schema"), self._tokenizer)

    def try_document(self, text: str, matcher: Matcher) -> bool:
        """True if the grammar of `matcher` accepts the whole document `text`."""
        matcher = matcher.copy()
        try:
            for token in self._inner.tokenize_str(text):
                matcher.accept(token)
        except ConstraintError:
            return False
        return matcher.is_complete

    def _generate(self, name: str, schema: Any, matcher: Matcher, figures: Figures) -> None:
        text, is_whole, error = self.sample(matcher)
        if error:
            figures.faults.append(f"{name}: {error} after {text[:100]}")
        elif not is_whole:
            figures.cut += 1
        elif is_valid(schema, json.loads(text)):
            figures.valid += 1
        else:
            figures.invalid += 1
            figures.faults.append(f"{name}: invalid {text[:200]}")

    def sample(self, matcher: Matcher) -> tuple[str, bool, str]:
        """Generate a text of random allowed tokens; return it, True if it is complete, and an error or ""."""
        matcher = matcher.copy()
        tokens: list[int] = []
        try:
            while not matcher.is_stopped:
                if len(tokens) == TOKENS:
                    return self._inner.decode_str(tokens), False, ""
                bits = fill_masks([matcher]).view(np.uint8)[0]
                allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
                if not len(allowed):
                    return self._inner.decode_str(tokens), False, "no token is allowed"
                ending = allowed[self._is_ending[allowed]]
                if len(ending) and self.rng.random() < ENDING:
                    allowed = ending
                token = int(self.rng.choice(allowed))
                matcher.accept(token)
                if token in self._tokenizer.eos_token_ids:
                    break
                tokens.append(token)
        except ConstraintError as error:
            return self._inner.decode_str(tokens), False, str(error)
        return self._inner.decode_str(tokens), True, ""


def is_valid(schema: Any, document: Any) -> bool:
    """True if a document is valid, formats included, by the draft of its schema."""
    kind = _VALIDATORS[draft_of(schema)]
    return kind(schema, format_checker=kind.FORMAT_CHECKER).is_valid(document)


def _is_honoured_alone(schema: Any) -> bool:
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    return not LLMatcher.validate_grammar_with_warnings(grammar, limits=_LIMITS)[0]


def _keyword(message: str) -> str:
    """Return the last keyword of the place that a refusal's `message` names, or its reason."""
    found = re.search(r"honoured: (?:at \S+, (.{30,50}?) |\S*/(\S+) is )", message)
    return (found[1] or found[2]) if found else message[:60]


def suite_cases(folder: Path) -> Iterator[tuple[str, Any, list[dict[str, Any]]]]:
    """Yield name, schema and documents of the suite's cases of draft 2020-12, without the optional ones."""
    for file in sorted((folder / "tests" / "draft2020-12").glob("*.json")):
        for case in json.loads(file.read_text()):
            yield f"{file.stem}: {case['description']}", case["schema"], case["tests"]


def measure_suite(folder: Path, measurement: Measurement) -> Figures:
    """Try the official suite in `folder`, and return the figures."""
    figures = Figures()
    for name, schema, tests in suite_cases(folder):
        matcher = measurement.try_schema(name, schema, figures)
        for test in tests if matcher else []:
            has = any(measurement.try_document(text, matcher) for text in _texts(test["data"]))
            figures.accepted += has and test["valid"]
            figures.rejected += test["valid"] and not has
            if has and not test["valid"]:
                figures.wrong += 1
                figures.faults.append(f"{name}: accepts {json.dumps(test['data'])[:100]}")
    return figures


def _texts(document: Any) -> Iterator[str]:
    """Yield a document as JSON, in up to 120 orders of the outermost object's properties."""
    if not isinstance(document, dict):
        yield json.dumps(document, ensure_ascii=False)
        return
    for names in itertools.islice(itertools.permutations(document), 120):
        yield json.dumps({name: document[name] for name in names}, ensure_ascii=False)


def bench_schemas(folder: Path, count: int, seed: int) -> Iterator[tuple[str, str, Any]]:
    """Yield set, name and schema of `count` schemas of JSONSchemaBench, equally many of each set."""
    sets = sorted(path for path in (folder / "data").iterdir() if path.is_dir())
    rng = np.random.default_rng(seed)
    for path in sets:
        files = sorted(path.glob("*.json"))
        for i in sorted(rng.choice(len(files), min(count // len(sets), len(files)), replace=False)):
            yield path.name, f"{path.name}/{files[i].name}", json.loads(files[i].read_text())


def measure_sets(
    folder: Path, count: int, seed: int, measurement: Measurement
) -> dict[str, Figures]:
    """Return the figures of each set of JSONSchemaBench, over a sample of schemas."""
    result: dict[str, Figures] = {}
    for set_name, name, schema in bench_schemas(folder, count, seed):
        measurement.try_schema(name, schema, result.setdefault(set_name, Figures()))
    return result


def table(sets: dict[str, Figures]) -> str:
    """Return the figures as a table in Markdown, followed by the reasons of refusals."""
    heads = "schemas,honoured,llguidance alone,valid,cut,invalid,ms median,p99,max"
    lines = [f"| set | {' | '.join(heads.split(','))} |", "|---" * 10 + "|"]
    for name, one in sets.items():
        ms = 1e3 * np.array(one.seconds or [0.0])
        times = f"{np.median(ms):.1f} | {np.percentile(ms, 99):.0f} | {ms.max():.0f}"
        shares = " | ".join(
            f"{n} ({100 * n / max(1, one.schemas):.1f} %)" for n in (one.honoured, one.alone)
        )
        lines.append(
            f"| {name} | {one.schemas} | {shares} | {one.valid} | {one.cut} | {one.invalid} | {times} |"
        )
    return "\n".join(lines)


def total(sets: list[Figures]) -> Figures:
    """Return the sums of the figures of several sets."""
    result = Figures()
    for one in sets:
        for name, value in vars(one).items():
            setattr(result, name, getattr(result, name) + value)
    return result


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", type=Path, help="folder of JSON-Schema-Test-Suite")
    parser.add_argument("--schemas", type=Path, help="folder of jsonschemabench")
    parser.add_argument(
        "--count", type=int, default=1000, help="schemas of jsonschemabench in all (default 1000)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the choice and of what is generated (default 0)"
    )
    parser.add_argument(
        "--documents", type=int, default=3, help="to generate for each schema (default 3)"
    )
    parser.add_argument("--faults", type=int, default=10, help="faults to print (default 10)")
    args = parser.parse_args(arguments)
    measurement = Measurement(args.seed, args.documents)
    sets: dict[str, Figures] = {}
    if args.suite:
        sets["official suite, 2020-12"] = suite = measure_suite(args.suite, measurement)
    if args.schemas:
        bench = measure_sets(args.schemas, args.count, args.seed, measurement)
        sets |= bench | {"JSONSchemaBench": total(list(bench.values()))}
    print(table(sets))
    for name, one in sets.items():
        print(f"\n{name}, refused: " + ", ".join(f"{n} {k}" for k, n in one.refused.most_common()))
    if args.suite:
        print(
            f"\nDocuments of the suite: {suite.accepted} valid ones accepted, {suite.rejected} rejected; "
            f"{suite.wrong} invalid ones accepted."
        )
    faults = [
        fault for name, one in sets.items() if name != "JSONSchemaBench" for fault in one.faults
    ]
    print(f"\nFaults: {len(faults)}")
    for fault in faults[: args.faults]:
        print(f"  {fault}")


if __name__ == "__main__":
    main()
