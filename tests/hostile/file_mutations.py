"""Mutations of files that hold models: JSON, safetensors, and bytes of any kind."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

Header: TypeAlias = dict[str, Any]
Generator: TypeAlias = np.random.Generator
T = TypeVar("T")

DTYPES = "F32 F16 BF16 F64 I8 U8 I16 U16 I32 U32 I64 U64 BOOL F8_E4M3 F4 C64".split()
DTYPES += ["", "x" * 3000]
NAMES = [
    "", "model", "a.b.c", "lora_a", "x" * 3000, "é\u202e\n\x00", "__metadata__", "../x", "0.keys",
]  # fmt: skip
# JSON values that a config should not hold, or only by chance.
NUMBERS = [0, -1, 1, 2, 3, 7, 20_000, 2**31 - 1, 2**31, 2**63, 2**64, 10**18, 10**400, -(10**400)]
FLOATS = [0.0, -0.0, 0.5, 1e-300, 1e300, 2.5, float("nan"), float("inf"), float("-inf")]
TEXTS = ["", "2", "int8", "é\u202e", "x" * 5000, "\n", "null", "afm7", "llama", "\u0000"]
OTHERS = [None, True, False, [], {}, [1], [[]], {"a": 1}, [None] * 100, {"bits": 2}, [1, 2, 3]]
# Numbers of a safetensors type, by NumPy's name for their bits.
SPECIAL = {
    "F32": ("<f4", [np.nan, np.inf, -np.inf, 0.0, -1.0, 1e-8, 1.0]),
    "F16": ("<f2", [np.nan, np.inf, -np.inf, 0.0, -1.0, 1e-8, 1.0]),
    "BF16": ("<u2", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0, 0x8000, 0x4000]),
    "U32": ("<u4", [0, 1, 2**32 - 1, 100]),
    "I32": ("<i4", [0, 1, -(2**31), 2**31 - 1, 100]),
    "I8": ("<i1", [0, 1, -128, 127, 100]),
    "U8": ("<u1", [0, 1, 128, 255, 100]),
}
SAME_WIDTH = {"F32": ["I32", "U32"], "U32": ["F32", "I32"], "I32": ["U32", "F32"], "U8": ["I8"]}
SAME_WIDTH |= {"I8": ["U8", "BOOL"], "F16": ["BF16", "I16", "U16"], "BF16": ["F16", "I16"]}


def pick(rng: Generator, options: Sequence[T]) -> T:
    return options[int(rng.integers(len(options)))]


def some_value(rng: Generator) -> Any:
    return copy.deepcopy(pick(rng, pick(rng, [NUMBERS, FLOATS, TEXTS, OTHERS])))


def changed_json(rng: Generator, values: Any) -> str:
    kind = int(rng.integers(12))
    if kind < 7:
        values = copy.deepcopy(values)
        for _ in range(2 if rng.random() < 0.2 else 1):
            change_inside(rng, values)
        return json.dumps(values)
    text = json.dumps(values)
    if kind < 10:  # a key twice: the last one counts
        digits, depth = "9" * pick(rng, [400, 4000, 5000]), pick(rng, [10, 300, 100_000])
        forms = [json.dumps(some_value(rng)), digits, "[" * depth + "]" * depth]
        key = pick(rng, [*values, "unknown"])
        return f"{text[:-1]}, {json.dumps(key)}: {forms[kind - 7]}}}"
    if kind == 10:
        return text[: int(rng.integers(len(text)))]
    others = ["", "[]", "null", "1", '"x"', "{}", "\ufeff{}", text + text, "NaN", "[" * 100_000]
    return pick(rng, others)


def change_inside(rng: Generator, value: Any, values: Sequence[Any] = (), deepest: int = 0) -> None:
    """Replace, drop, add, swap or nest (at most `deepest` times) something somewhere in lists and dicts."""
    while value and rng.integers(5):
        key = pick(rng, list(value) if isinstance(value, dict) else range(len(value)))
        if not isinstance(value[key], dict | list):
            break
        value = value[key]
    new = copy.deepcopy(pick(rng, values)) if values else some_value(rng)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    kind = rng.random() if keys else 1.0
    if kind > 0.9 and isinstance(value, list):
        value.append(new)
    elif kind > 0.9:
        value[pick(rng, [*keys, "unknown", "x" * 3000])] = new
    elif kind > 0.8:
        del value[pick(rng, keys)]
    elif kind > 0.7:
        one, other = pick(rng, keys), pick(rng, keys)
        value[one], value[other] = value[other], value[one]
    elif kind > 0.6 and deepest:
        key = pick(rng, keys)
        for _ in range(int(rng.integers(1, deepest))):
            value[key] = [value[key]] if rng.integers(2) else {"type": value[key]}
    else:
        key = pick(rng, keys)
        old = value[key]
        near = type(old) in (int, float) and abs(old) < 1e9 and rng.random() < 0.4
        value[key] = old * pick(rng, [2, -1, 0.5, 1.0, 1000]) if near else new


def changed_bytes(rng: Generator, data: bytes) -> bytes:
    kind, size = int(rng.integers(11)), len(data)
    at, few = int(rng.integers(size + 1)), int(rng.integers(1, 64))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + rng.bytes(few) + data[at:]
    if kind == 2:
        return data + rng.bytes(few)
    if kind == 3:
        return rng.bytes(int(rng.integers(200)))
    if kind == 4:
        return data[:at] + data[at + few :]
    if kind == 5:
        return data[: at + 8 * few] + data[at:]
    changed = np.frombuffer(data, np.uint8).copy()
    if kind == 6:
        changed[at : at + int(rng.integers(1, 200))] = pick(rng, [0, 255, 0x7F])
    else:
        # The start, where headers are, the end, where SentencePiece has its settings, or anywhere.
        places = pick(rng, [np.arange(size), np.arange(size)[:600], np.arange(size)[-300:]])
        for place in rng.choice(places, int(rng.integers(1, 8))) if size else []:
            changed[place] ^= 1 << int(rng.integers(8))
    return changed.tobytes()


def read_safetensors(path: Path) -> tuple[Header, bytes]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def safetensors_bytes(header: Header | str, data: bytes) -> bytes:
    encoded = (header if isinstance(header, str) else json.dumps(header)).encode(errors="replace")
    return struct.pack("<Q", len(encoded)) + encoded + data


def changed_safetensors(rng: Generator, header: Header, data: bytes) -> bytes:
    """A file with something changed in its header, in its numbers, or in its bytes."""
    header = copy.deepcopy(header)
    kind = int(rng.integers(10))
    if kind == 0:
        return safetensors_bytes(changed_json(rng, header), data)
    if kind == 1:
        return changed_bytes(rng, safetensors_bytes(header, data))
    if kind < 5:
        return safetensors_bytes(header, _changed_numbers(rng, header, data))
    names = [name for name in header if name != "__metadata__"]
    name = pick(rng, names)
    entry = header[name]
    shape, (begin, end) = entry["shape"], entry["data_offsets"]
    if kind == 5:
        entry["dtype"] = pick(rng, DTYPES)
    elif kind == 6:  # integers or booleans where floats belong, and the other way round
        entry["dtype"] = pick(rng, SAME_WIDTH[entry["dtype"]])
    elif kind == 7:
        size, others = int(np.prod(shape, dtype=np.int64)), [[0, 2**40], [-1], [1] * 1000, []]
        others += [shape[::-1], [*shape, 1], [1, *shape], [size], [2**32, *shape]]
        entry["shape"] = pick(rng, [*others, [*shape[:-1], 2**63]])
    elif kind == 8:
        other = header[pick(rng, names)]["data_offsets"]
        places = [[end, begin], [begin + 4, end + 4], [begin, 2**63], [0, len(data)], other]
        entry["data_offsets"] = pick(rng, [*places, [begin], []])
    else:
        del header[name]
        if rng.random() < 0.7:
            header[pick(rng, [*NAMES, *names[:2], name + "x"])] = entry
    return safetensors_bytes(header, data)


def _changed_numbers(rng: Generator, header: Header, data: bytes) -> bytes:
    entry = header[pick(rng, [name for name in header if name != "__metadata__"])]
    begin, end = entry["data_offsets"]
    bits, values = SPECIAL[entry["dtype"]]
    numbers = np.frombuffer(data[begin:end], bits).copy()
    if numbers.size:
        at = slice(None) if rng.random() < 0.2 else int(rng.integers(numbers.size))
        numbers[at] = pick(rng, values)
    return data[:begin] + numbers.tobytes() + data[end:]
