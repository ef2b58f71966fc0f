"""Mutations of files that hold models: JSON, safetensors, and bytes of any kind."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

Header: TypeAlias = dict[str, Any]
Generator: TypeAlias = np.random.Generator
T = TypeVar("T")

DTYPES = ["F32", "F16", "BF16", "F64", "I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64", "BOOL"]
DTYPES += ["F8_E4M3", "F4", "C64", "", "x" * 3000]
NAMES = [
    "", "model", "a.b.c", "lora_a", "x" * 3000, "é\u202e\n\x00", "__metadata__", "../x", "0.keys",
]  # fmt: skip


def pick(rng: Generator, options: Sequence[T]) -> T:
    return options[int(rng.integers(len(options)))]


def some_value(rng: Generator) -> Any:
    """A JSON value that a config should not hold, or only by chance."""
    numbers = [
        0,
        -1,
        1,
        2,
        3,
        7,
        20_000,
        2**31 - 1,
        2**31,
        2**63,
        2**64,
        10**18,
        10**400,
        -(10**400),
    ]
    floats = [0.0, -0.0, 0.5, 1e-300, 1e300, 2.5, float("nan"), float("inf"), float("-inf")]
    texts = ["", "2", "int8", "é\u202e", "x" * 5000, "\n", "null", "afm7", "llama", "\u0000"]
    others = [None, True, False, [], {}, [1], [[]], {"a": 1}, [None] * 100, {"bits": 2}, [1, 2, 3]]
    return pick(rng, pick(rng, [numbers, floats, texts, others]))


def changed_json(rng: Generator, values: Any) -> str:
    """The text of a JSON object with something changed in it."""
    values = json.loads(json.dumps(values))
    kind = int(rng.integers(12))
    if kind < 7:
        _change_inside(rng, values)
        if rng.random() < 0.2:
            _change_inside(rng, values)
        return json.dumps(values)
    text = json.dumps(values)
    if kind == 7:  # a key twice: the last one counts
        key = pick(rng, [*values, "unknown"])
        return f"{text[:-1]}, {json.dumps(key)}: {json.dumps(some_value(rng))}}}"
    if kind == 8:
        key, digits = pick(rng, list(values)), "9" * pick(rng, [400, 4000, 5000])
        return f"{text[:-1]}, {json.dumps(key)}: {digits}}}"
    if kind == 9:
        key, depth = pick(rng, list(values)), pick(rng, [10, 300, 100_000])
        return f"{text[:-1]}, {json.dumps(key)}: {'[' * depth}{']' * depth}}}"
    if kind == 10:
        return text[: int(rng.integers(len(text)))]
    return pick(
        rng, ["", "[]", "null", "1", '"x"', "{}", "\ufeff{}", text + text, "NaN", "[" * 100_000]
    )


def _change_inside(rng: Generator, values: Any) -> None:
    """Replace, drop, or add a value somewhere in objects and lists."""
    place = values
    while isinstance(place, dict | list) and place and rng.random() < 0.7:
        inner = place.values() if isinstance(place, dict) else place
        inner = [each for each in inner if isinstance(each, dict | list) and each]
        if not inner:
            break
        place = pick(rng, inner)
    if isinstance(place, list):
        place[int(rng.integers(len(place)))] = some_value(rng)
        return
    keys = [*place]
    kind = rng.random() if keys else 1.0
    if kind < 0.7:
        key = pick(rng, keys)
        old = place[key]
        near = type(old) in (int, float) and abs(old) < 1e9 and rng.random() < 0.4
        place[key] = old * pick(rng, [2, -1, 0.5, 1.0, 1000]) if near else some_value(rng)
    elif kind < 0.85:
        del place[pick(rng, keys)]
    else:
        place[pick(rng, [*keys, "unknown", "x" * 3000])] = some_value(rng)


def changed_bytes(rng: Generator, data: bytes) -> bytes:
    """Cut off, flipped, filled, or with something in between."""
    kind, size = int(rng.integers(6)), len(data)
    at = int(rng.integers(size + 1))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + rng.bytes(int(rng.integers(1, 64))) + data[at:]
    if kind == 2:
        return data + rng.bytes(int(rng.integers(1, 64)))
    if kind == 3:
        return rng.bytes(int(rng.integers(200)))
    changed = np.frombuffer(data, np.uint8).copy()
    if kind == 4:
        changed[at : at + int(rng.integers(1, 200))] = pick(rng, [0, 255, 0x7F])
    else:
        within = size if rng.random() < 0.5 else min(size, 600)  # the start, where headers are
        for place in rng.integers(within, size=int(rng.integers(1, 8))):
            changed[place] ^= 1 << int(rng.integers(8))
    return changed.tobytes()


def read_safetensors(path: Path) -> tuple[Header, bytes]:
    """The header of a valid file, and its data."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def safetensors_bytes(header: Header | str, data: bytes) -> bytes:
    encoded = (header if isinstance(header, str) else json.dumps(header)).encode(errors="replace")
    return struct.pack("<Q", len(encoded)) + encoded + data


def changed_safetensors(rng: Generator, header: Header, data: bytes) -> bytes:
    """A file with something changed in its header, in its numbers, or in its bytes."""
    header = json.loads(json.dumps(header))
    tensors = [name for name in header if name != "__metadata__"]
    change = pick(
        rng, [_type, _same_width, _shape, _offsets, _name, _numbers, _numbers, _numbers, None, None]
    )
    if change is None:
        kind = rng.random()
        if kind < 0.3:
            return safetensors_bytes(changed_json(rng, header), data)
        return changed_bytes(rng, safetensors_bytes(header, data))
    data = change(rng, header, pick(rng, tensors), data)
    return safetensors_bytes(header, data)


def _type(rng: Generator, header: Header, name: str, data: bytes) -> bytes:
    header[name]["dtype"] = pick(rng, DTYPES)
    return data


def _same_width(rng: Generator, header: Header, name: str, data: bytes) -> bytes:
    """Integers or booleans where floats belong, and the other way round."""
    width = {
        "F32": ["I32", "U32"],
        "U32": ["F32", "I32"],
        "I32": ["U32", "F32"],
        "I8": ["U8", "BOOL"],
    }
    width |= {"F16": ["BF16", "I16", "U16"], "BF16": ["F16", "I16"]}
    header[name]["dtype"] = pick(rng, width[header[name]["dtype"]])
    return data


def _shape(rng: Generator, header: Header, name: str, data: bytes) -> bytes:
    shape = header[name]["shape"]
    header[name]["shape"] = pick(
        rng,
        [
            shape[::-1],
            [*shape, 1],
            [1, *shape],
            [int(np.prod(shape, dtype=np.int64))],
            [],
            [0, 2**40],
            [2**32, *shape],
            [-1],
            [1] * 1000,
            [*shape[:-1], 2**63],
        ],
    )
    return data


def _offsets(rng: Generator, header: Header, name: str, data: bytes) -> bytes:
    begin, end = header[name]["data_offsets"]
    other = header[pick(rng, [n for n in header if n != "__metadata__"])]["data_offsets"]
    header[name]["data_offsets"] = pick(
        rng,
        [[end, begin], [begin + 4, end + 4], [begin, 2**63], [0, len(data)], other, [begin], []],
    )
    return data


def _name(rng: Generator, header: Header, name: str, data: bytes) -> bytes:
    entry = header.pop(name)
    if rng.random() < 0.7:
        others = [n for n in header if n != "__metadata__"]
        header[pick(rng, [*NAMES, *others[:1], name + "x"])] = entry
    return data


def _numbers(rng: Generator, header: Header, name: str, data: bytes) -> bytes:
    """NaN, infinity or other numbers at a place, or everywhere."""
    entry = header[name]
    begin, end = entry["data_offsets"]
    types = {"F32": "<f4", "F16": "<f2", "U32": "<u4", "I32": "<i4", "I8": "<i1", "BF16": "<u2"}
    numbers = np.frombuffer(data[begin:end], types[entry["dtype"]]).copy()
    if not numbers.size:
        return data
    at = slice(None) if rng.random() < 0.2 else int(rng.integers(numbers.size))
    if entry["dtype"] == "BF16":
        numbers[at] = pick(rng, [0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0, 0x8000, 0x4000])
    elif entry["dtype"].startswith("F"):
        numbers[at] = pick(rng, [np.nan, np.inf, -np.inf, 0.0, -1.0, 1e-8, 1.0])
    else:
        limits = np.iinfo(numbers.dtype)
        numbers[at] = pick(rng, [0, 1, limits.min, limits.max, 100])
    return data[:begin] + numbers.tobytes() + data[end:]


def place_in(rng: Generator, value: Any, deeper: int) -> tuple[Any, Any] | None:
    """A container somewhere inside a JSON value, and a key of it; None when there is nothing inside.

    Args:
        rng: draws it.
        value: a list or dict.
        deeper: of so many chances, all but one go on into a container.
    """
    while keys := list(value) if isinstance(value, dict) else list(range(len(value))):
        key = pick(rng, keys)
        inner = value[key]
        if not (isinstance(inner, dict | list) and inner and rng.integers(deeper)):
            return value, key
        value = inner
    return None
