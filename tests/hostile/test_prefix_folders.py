"""Files of a prefix cache that lie about themselves, digests and all: answers stay what they were."""

import copy
import hashlib
import json

from afm_mlx.engine.engine import Engine
from afm_mlx.engine.prefix_cache import PAGE, PrefixCache
from afm_mlx.engine.request import Request
from tests.hostile.file_mutations import change_inside, changed_bytes, changed_json, pick
from tests.hostile.harness import Case, run_cases
from tests.tools.engines import SIZES, run, some_prompt, tiny
from tests.tools.models import WordTokenizer

DTYPES = [f"mlx.core.{name}" for name in ("int8", "float16", "bfloat16", "float32", "bool_", "x")]
AXES = [0, 1, 2, 8, 63, 64, 65, 128, -1, 2**31, 2**62, 2**64, 10**400, 1.5, None, True, "64", [1]]


def test_forged_files_change_no_answer(rng, tmp_path):
    tokenizer = WordTokenizer(SIZES["vocab_size"], ends=())
    model, prompt = tiny(rng, kv_bits=8), some_prompt(rng, 2 * PAGE + 5)

    def ask():
        prefixes = PrefixCache(1 << 30, tmp_path / "kept")
        engine = Engine(model, tokenizer, prefix_cache=prefixes)
        row = engine.submit(Request(prompt, 3, logprobs=False))
        responses = run(engine)[row]
        prefixes.close()
        return [response.token for response in responses]

    answer = ask()
    whole = {path: path.read_bytes() for path in (tmp_path / "kept").iterdir()}

    def generate(rng):
        path = pick(rng, list(whole))
        content = _forged(rng, whole[path])

        def use():
            for other, data in whole.items():
                other.write_bytes(data)
            path.write_bytes(content)
            assert ask() == answer

        return Case(f"{content[:1500]!r}", use)

    run_cases(generate, rng, 0.03)


def _forged(rng, data: bytes) -> bytes:
    """A file with another head or length, and a digest that is right for it."""
    length = int.from_bytes(data[32:40], "little")
    head, arrays = json.loads(data[40 : 40 + length]), data[40 + length :]
    kind = int(rng.integers(6))
    if kind == 0:
        return changed_bytes(rng, data)
    if kind == 1:
        text = changed_json(rng, head)
    elif kind == 2:
        change_inside(rng, head)
        text = json.dumps(head)
    elif kind == 3:
        array = pick(rng, head["arrays"])
        array[0] = pick(rng, DTYPES)
        text = json.dumps(head)
    elif kind == 4:
        shape = pick(rng, head["arrays"])[1]
        shape[int(rng.integers(len(shape)))] = copy.deepcopy(pick(rng, AXES))
        text = json.dumps(head)
    else:
        place = pick(rng, head["places"])
        place[int(rng.integers(2))] = copy.deepcopy(pick(rng, AXES))
        text = json.dumps(head)
    written = text.encode(errors="replace")
    said = pick(rng, [len(written)] * 5 + [0, 2**62, len(written) - 1, len(written) + 1])
    body = (
        said.to_bytes(8, "little")
        + written
        + pick(rng, [arrays] * 4 + [arrays[:-1], arrays + b"x"])
    )
    if body == data[32:]:
        body += b"x"
    return hashlib.sha256(body).digest() + body
