"""Rewards: numbers that say how good an answer to a prompt is.

A reward is named in one text, as `--rewards` and `--verify` take it:

    exact              1 if the answer equals the sample's "answer" or "completion", else 0
    regex:PATTERN      1 if the whole answer matches a pattern of Python's `re`, else 0
    schema             1 if the answer is JSON that is valid under the sample's schema, else 0
    schema:FILE.json   the same, with the schema of a file
    length:N           1 for up to N characters, N / length for more
    FILE.py:NAME       what a function `NAME(prompt, answer, sample)` of a Python file returns
    adapter:DIR        the reward of a reward adapter's folder; the prefix may be left out

A sample is the record of a data file that the prompt comes from, with all its keys.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np

from afm_mlx.errors import RewardError, did_you_mean, reason_of, shown
from afm_mlx.files import read_file
from afm_mlx.guidance.call_forms import AFM_CALLS, CallForm
from afm_mlx.measure.evaluation import is_right, natural_comparison, response_format_of
from afm_mlx.python_file import run_python_file

Reward: TypeAlias = Callable[[str, str, Mapping[str, Any]], float]
"""A function of a prompt's text, an answer and the sample; larger is better, and 1 or more passes a check."""

KINDS = "exact, regex:PATTERN, schema, schema:FILE.json, length:N, FILE.py:NAME and adapter:DIR"
PASSES = 1.0
"""The least reward with which an answer passes a check."""
_MAX_SCHEMA = 16 << 20  # bytes


class Answered(NamedTuple):
    """An answer, and what it answers: a prompt, the sample, and the sample's file and line if known."""

    prompt: str
    answer: str
    sample: Mapping[str, Any] = {}
    where: str = ""


@runtime_checkable
class BatchReward(Protocol):
    """A reward that is cheaper for many answers together, such as a reward adapter's."""

    def of_all(self, answers: Sequence[Answered]) -> Sequence[float]: ...


@dataclass(frozen=True)
class Rewards:
    """Several rewards, and the weights of their sum; R of each."""

    names: tuple[str, ...]
    functions: tuple[Reward | BatchReward, ...]
    weights: tuple[float, ...]

    def table(self, answers: Sequence[Answered]) -> np.ndarray:
        """Compute each reward of N answers: (N, R) float64, without weights.

        Raises:
            RewardError: if a reward raises or returns no finite number; names the reward, sample and prompt.
        """
        found = np.zeros((len(answers), len(self.names)))
        for column, (name, function) in enumerate(zip(self.names, self.functions, strict=True)):
            if isinstance(function, BatchReward):
                values = function.of_all(answers)
                for row, (each, value) in enumerate(zip(answers, values, strict=True)):
                    found[row, column] = _finite(name, each, value)
                continue
            for row, each in enumerate(answers):
                try:
                    value = function(each.prompt, each.answer, each.sample)
                except Exception as error:
                    problem = f"raised {type(error).__name__} ({reason_of(error)})"
                    raise RewardError(_about(name, problem, each)) from error
                found[row, column] = _finite(name, each, value)
        return found

    def totals(self, answers: Sequence[Answered]) -> np.ndarray:
        """Compute the weighted sum of all rewards of N answers: (N,) float64. Raises as `table` does."""
        total: np.ndarray = self.table(answers) @ np.array(self.weights)
        return total

    def __call__(self, prompt: str, answer: str, sample: Mapping[str, Any]) -> float:
        """Compute the weighted sum of all rewards of one answer."""
        return float(self.totals([Answered(prompt, answer, sample)])[0])


def make_rewards(
    names: Sequence[str],
    weights: Sequence[float] | None = None,
    *,
    form: CallForm = AFM_CALLS,
    adapter: Callable[[Path], Reward | BatchReward] | None = None,
) -> Rewards:
    """Make rewards by their names; see the module for the names. Runs the Python files that are named.

    Args:
        names: R names, at least one.
        weights: R finite numbers; pass None for 1 each.
        form: how the model writes tool calls, which `exact` compares.
        adapter: makes the reward of a reward adapter's folder; pass None if there is no model to run it.

    Raises:
        RewardError: for an unknown name, a pattern, schema or file that can't be used, or wrong weights.
    """
    if isinstance(names, str) or not names:
        raise RewardError(
            f"The rewards are {shown(names)}; a list of names is needed: {KINDS} are allowed."
        )
    given = [1.0] * len(names) if weights is None else list(weights)
    if len(given) != len(names):
        raise RewardError(
            f"There are {len(given)} weights for {len(names)} rewards; give one each."
        )
    numbers = [number for weight in given if (number := _number(weight)) is not None]
    if len(numbers) < len(given):
        raise RewardError(f"The rewards' weights are {shown(given)}; finite numbers are needed.")
    functions = tuple(_reward(name, form, adapter) for name in names)
    return Rewards(tuple(names), functions, tuple(numbers))


def prompt_text(sample: Mapping[str, Any]) -> str:
    """Return the text of a sample's prompt: a text, or the last message of the user among messages."""
    for message in reversed(messages_of(sample)):
        if isinstance(message, Mapping) and message.get("role") == "user":
            return str(message.get("content", ""))
    return ""


def messages_of(sample: Mapping[str, Any]) -> list[Any]:
    """Return the messages of a sample's prompt, whose text is the only message of a chat; empty without one."""
    prompt: Any = sample.get("prompt", sample.get("messages"))
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return list(prompt) if isinstance(prompt, list) else []


def _reward(
    name: str, form: CallForm, adapter: Callable[[Path], Reward | BatchReward] | None
) -> Reward | BatchReward:
    kind, colon, value = name.partition(":")
    if name == "exact":
        return _exact(form)
    if name == "schema" or (kind == "schema" and value):
        return _schema(Path(value) if value else None)
    if kind == "regex" and value:
        return _regex(value)
    if kind == "length" and value:
        return _length(value)
    if (kind == "adapter" and value) or (not colon and Path(name).expanduser().is_dir()):
        if adapter is None:
            raise RewardError(f"The reward {name} is an adapter's; a model is needed to run it.")
        return adapter(Path(value or name).expanduser())
    file, _, function = name.rpartition(":")
    if file.endswith(".py") and function:
        return _function(Path(file).expanduser(), function)
    raise RewardError(
        f"There is no reward {shown(name)}{did_you_mean(kind, ('exact', 'regex', 'schema', 'length'))}; "
        f"allowed are {KINDS}."
    )


def _exact(form: CallForm) -> Reward:
    def exact(prompt: str, answer: str, sample: Mapping[str, Any]) -> float:
        expected = sample.get("answer", sample.get("completion"))
        if not isinstance(expected, str):
            raise RewardError("the sample has no text 'answer' or 'completion' to compare with")
        messages = messages_of(sample)
        first = messages[0] if messages and isinstance(messages[0], Mapping) else {}
        tools = sample.get("tools") or first.get("tools") or ()
        has_format = response_format_of(messages) is not None
        compare = sample.get("compare") or natural_comparison(expected, has_format)
        return float(is_right(answer, expected, compare, form, tools))

    return exact


def _regex(text: str) -> Reward:
    try:
        pattern = re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise RewardError(f"The reward's pattern {shown(text)} can't be used: {error}.") from None
    return lambda prompt, answer, sample: float(pattern.fullmatch(answer.strip()) is not None)


def _length(text: str) -> Reward:
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) > 0):
        raise RewardError(f"The reward length has {shown(text)}; a number of characters is needed.")
    most = int(text)
    return lambda prompt, answer, sample: min(1.0, most / max(len(answer.strip()), 1))


def _schema(file: Path | None) -> Reward:
    given = None if file is None else schema_validator(_schema_in(file))

    def schema(prompt: str, answer: str, sample: Mapping[str, Any]) -> float:
        validator = given
        if validator is None:
            found = sample.get("schema")
            if found is None and (asked := response_format_of(messages_of(sample))) is not None:
                found = asked["json_schema"]["schema"]
            if found is None:
                raise RewardError("the sample has no 'schema', and no message a response_format")
            validator = schema_validator(found)
        try:
            value = json.loads(answer)
        except (ValueError, RecursionError):
            return 0.0
        return float(validator.is_valid(value))

    return schema


def _schema_in(file: Path) -> Any:
    try:
        return json.loads(read_file(file.expanduser(), _MAX_SCHEMA, pipes=True))
    except (OSError, ValueError, RecursionError) as error:
        raise RewardError(f"The schema {file} can't be read: {reason_of(error)}.") from None


def schema_validator(schema: Any) -> Any:
    """Return jsonschema's validator of a schema, which fetches nothing; `RewardError` for a wrong schema."""
    import jsonschema
    from jsonschema_specifications import REGISTRY

    try:
        kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        kind.check_schema(schema)
    except (jsonschema.SchemaError, TypeError, RecursionError) as error:
        message = getattr(error, "message", str(error))
        raise RewardError(f"The schema is not valid: {message}.") from None
    return kind(schema, registry=REGISTRY)


def _function(file: Path, name: str) -> Reward:
    try:
        found = getattr(run_python_file(file), name, None)
    except (Exception, SystemExit) as error:  # whatever the file's code raises
        raise RewardError(
            f"The reward's file {file} can't be run ({type(error).__name__}: {reason_of(error)})."
        ) from error
    if not callable(found):
        raise RewardError(
            f"{file} has no function {name}; it needs def {name}(prompt, answer, sample), which returns a "
            "number."
        )
    function: Reward = found
    return function


def _finite(name: str, each: Answered, value: object) -> float:
    number = _number(value)
    if number is None:
        problem = f"returned {shown(value)}; a finite number is needed"
        raise RewardError(_about(name, problem, each))
    return number


def _number(value: object) -> float | None:
    """Return a number as a float; None for NaN, infinity, and anything else."""
    try:
        number = float(value) if isinstance(value, Real | np.bool_) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _about(name: str, problem: str, each: Answered) -> str:
    where = f"{each.where}: " if each.where else ""
    return (
        f"{where}the reward {name} {problem}. The prompt is {shown(each.prompt)}, and the answer "
        f"{shown(each.answer)}."
    )
