"""Prompts with images in the engine, against the same features put into embeddings by hand, without a cache."""

import asyncio
import copy
import itertools
import threading
from dataclasses import dataclass, replace
from typing import Literal

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.active import attach_adapter, detach_adapter
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.engine import scheduler
from afm_mlx.engine.async_engine import AsyncEngine
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.generation import batch_generate, generate, generate_as
from afm_mlx.engine.image_features import ImageFeatures, placed_images, prefix_names
from afm_mlx.engine.prefix_cache import PAGE, PrefixCache
from afm_mlx.engine.request import Embedding, PromptLogprobs, Request
from afm_mlx.engine.search import search
from afm_mlx.engine.speculation.drafting import Speculation
from afm_mlx.errors import ImageError, RequestError
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.loading.load import load
from afm_mlx.model.pooling import hidden_states
from afm_mlx.quantization.quantize_model import quantize_model
from afm_mlx.quantization.rule import QuantizationRule
from afm_mlx.tokenizer.chat_images import ChatImages
from afm_mlx.vision.encoder import VisionEncoder
from afm_mlx.vision.prompt_image import read_image
from tests.tools.adapters import draw_tensors, write_folder
from tests.tools.cases import all_pairs, each
from tests.tools.constraints import nano_tokenizer, wide_model
from tests.tools.engines import SIZES, Adapters, forced, logprobs_of, run, run_one
from tests.tools.models import random_config, random_model
from tests.tools.vision import TINY, give_eyes, picture

IMAGE = TINY.image_token_id
BOTH = ("int8", "float")


def seeing(rng, kv_bits=None, **sizes):
    """A tiny model with a vision part."""
    return random_model(
        random_config(rng, **{**SIZES, **sizes}, kv_bits=kv_bits, vision_config=TINY), rng
    )


@pytest.fixture
def model(rng):
    return seeing(rng)


def image(rng, mode="balanced"):
    return read_image(picture(rng, 90, 70), TINY, mode)


def words(rng, count):
    """Random tokens of text."""
    return [int(token) for token in rng.integers(IMAGE + 1, SIZES["vocab_size"], count)]


def prompt_of(*parts):
    """A prompt of lists of tokens and of images, and its images."""
    ids, images = [], []
    for part in parts:
        if isinstance(part, list):
            ids += part
        else:
            ids += [IMAGE] * part.tokens
            images.append(part)
    return ids, tuple(images)


def asked(*parts, **fields):
    ids, images = prompt_of(*parts)
    return Request(ids, **{"max_tokens": 5, "images": images, **fields})


def by_hand(model, request, tokens=()):
    """Embeddings (1, L, D) of a prompt with images and an answer: concatenated, nothing else."""
    parts, images = [], iter(request.images)
    for is_image, group in itertools.groupby(request.prompt, lambda token: token == IMAGE):
        group = list(group)
        while is_image and group:
            image = next(images)
            parts.append(model.vision.features(image))
            group = group[image.tokens :]
        if group:
            parts.append(model.embed(mx.array([group]))[0])
    if tokens:  # a random model may also say the placeholder, which is then a token as any other
        parts.append(model.embed(mx.array([tokens]))[0])
    return mx.concatenate(parts)[None]


def wanted_logprobs(model, request, tokens):
    logits = np.array(model(by_hand(model, request, tokens))[0].astype(mx.float32), np.float64)
    logits = logits[len(request.prompt) - 1 : -1]
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def assert_right(model, request, responses, atol=2e-4):
    """Each token of an answer is the likeliest after the tokens before it, with its log-probabilities."""
    assert responses[-1].error is None, responses[-1].error
    tokens = [response.token for response in responses]
    wanted = wanted_logprobs(model, request, tokens)
    np.testing.assert_allclose(logprobs_of(responses), wanted, atol=atol, rtol=0)


@pytest.fixture
def passes(monkeypatch):
    """The numbers of tiles in the encoder's passes that have begun."""
    passes, states = [], VisionEncoder.states

    def counted(self, pixels, *more):
        passes.append(pixels.shape[0])
        return states(self, pixels, *more)

    monkeypatch.setattr(VisionEncoder, "states", counted)
    return passes


@pytest.mark.parametrize(
    ("kv", "chunk", "mode", "before", "between"),
    all_pairs(BOTH, (None, 1, 7, 500), ("high", "balanced", "rapid"), (0, 3, 70), (0, 5)),
)
def test_a_prompt_with_images(rng, tokenizer, kv, chunk, mode, before, between):
    model = seeing(rng, kv_bits=8)
    parts = words(rng, before), image(rng, mode), words(rng, between), image(rng), words(rng, 4)
    request = asked(*parts)
    responses = run_one(model, tokenizer, request, kv=kv, prefill_step_size=chunk)
    # Codes of int8 are rounded, and the order of sums decides about the next one.
    assert_right(model, request, responses, atol=0.05)


@each(
    "options",
    [
        {},
        {"prefill_step_size": 16},
        {"kv_memory": 4 << 20},
        {"max_kv_size": 128, "sliding_window": True},
    ],
)
def test_ragged_batches_with_rows_without_images(rng, model, tokenizer, options):
    engine = Engine(model, tokenizer, max_batch=8, **options)
    requests = [
        asked(words(rng, 3), image(rng, "rapid"), words(rng, 2)),
        asked(words(rng, 9)),
        asked(image(rng, "rapid"), words(rng, 7)),
        asked(words(rng, 1)),
        asked(words(rng, 2), image(rng, "high"), words(rng, 1)),
        asked(image(rng, "rapid"), image(rng, "rapid"), words(rng, 1)),
    ]
    rows = [engine.submit(request) for request in requests]
    found = run(engine)
    for row, request in zip(rows, requests, strict=True):
        assert_right(model, request, found[row])


def test_short_prompts_share_a_chunk(rng, model, tokenizer, chunks):
    """One with an image in it, one that is over before the other's image, and one that is longer; and texts."""
    engine = Engine(model, tokenizer)
    shown = image(rng, "rapid")
    requests = [
        asked(words(rng, 6), shown, words(rng, 3)),
        asked(shown, words(rng, 2)),
        asked(words(rng, 2), shown, words(rng, 14)),
        asked(words(rng, 2)),
        asked(words(rng, 14)),
    ]
    rows = [engine.submit(request) for request in requests]
    found = run(engine)
    texts, *with_images = [shape[0] for shape in chunks]
    assert texts == 2
    assert set(with_images) == {3}
    for row, request in zip(rows, requests, strict=True):
        assert_right(model, request, found[row])


def test_a_text_waits_for_no_image_of_another_row(rng, model, tokenizer, monkeypatch):
    monkeypatch.setattr(scheduler.dispatch, "device", lambda: "cpu")
    monkeypatch.setattr(scheduler, "CPU_PATCHES_WHILE_DECODING", 1)
    engine = Engine(model, tokenizer)
    engine.submit(asked(words(rng, 2), image(rng), words(rng, 2)))
    text = engine.submit(Request(words(rng, 3), 2))
    responses = []
    while text not in responses:
        responses += [response.row for response in engine.step()]
    assert engine.image_features.passes == 0
    run(engine)
    assert engine.image_features.passes == 1


def test_texts_have_the_same_bits_with_and_without_a_vision_part(rng, tokenizer, passes):
    model = seeing(rng, kv_bits=8)
    blind = copy.deepcopy(model)
    blind.args, blind.vision = replace(model.args, vision_config=None), None
    requests = [Request(words(rng, n), 6) for n in (1, 5, 40)]
    answers = []
    for each_model in (model, blind):
        engine = Engine(each_model, tokenizer)
        rows = [engine.submit(request) for request in requests]
        found = run(engine)
        answers.append([logprobs_of(found[row]) for row in rows])
    for first, second in zip(*answers, strict=True):
        assert np.array_equal(first, second)
    assert not passes


@each(("patches", "steps"), [(10**9, 1), (441, 4), (882, 2), (1323, 2), (1, 4)])
def test_rows_decode_between_the_parts_of_an_image(
    rng, model, tokenizer, passes, monkeypatch, patches, steps
):
    """A tile has 441 patches, and three blocks and the adaptor are its steps."""
    passes.clear()
    monkeypatch.setattr(scheduler.dispatch, "device", lambda: "cpu")
    monkeypatch.setattr(scheduler, "CPU_PATCHES_WHILE_DECODING", patches)
    engine = Engine(model, tokenizer)
    text = engine.submit(Request(words(rng, 3), 40))
    for _ in range(3):
        engine.step()
    request = asked(words(rng, 2), image(rng, "high"), words(rng, 2))
    row = engine.submit(request)
    for count in range(5 * steps):
        assert engine.image_features.passes == count // steps
        assert [response.row for response in engine.step()] == [text]
        assert passes == [1] * (1 + count // steps)
    assert engine.image_features.passes == 5
    assert_right(model, request, run(engine)[row])


@each("on", ["cpu", "gpu"])
def test_without_other_rows_and_on_a_gpu_a_step_encodes_a_tile(
    rng, model, tokenizer, monkeypatch, on
):
    engine = Engine(model, tokenizer)
    monkeypatch.setattr(scheduler, "CPU_PATCHES_WHILE_DECODING", 1)
    if on == "gpu":
        monkeypatch.setattr(scheduler.dispatch, "device", lambda: "gpu")
        engine.submit(Request(words(rng, 3), 40))
        for _ in range(3):
            engine.step()
    engine.submit(asked(words(rng, 2), image(rng, "high"), words(rng, 2)))
    for count in range(5):
        assert engine.image_features.passes == count
        engine.step()
    monkeypatch.undo()
    run(engine)
    assert engine.image_features.passes == 5


def test_the_same_image_is_encoded_once(rng, model, tokenizer, passes):
    engine = Engine(model, tokenizer)
    one, two = image(rng), image(rng)
    requests = [
        asked(words(rng, 2), one, words(rng, 2)),
        asked(one, two, one, words(rng, 2)),
        asked(words(rng, 40), one, words(rng, 1)),
    ]
    rows = [engine.submit(request) for request in requests]
    found = run(engine)
    assert passes == [1, 1]
    for row, request in zip(rows, requests, strict=True):
        assert_right(model, request, found[row])
    # Another mode is another image.
    run_later = asked(image(rng), words(rng, 1)), asked(one, words(rng, 3))
    for request in run_later:
        engine.submit(request)
    run(engine)
    assert engine.image_features.passes == 3


def test_clients_share_no_features(rng, model, tokenizer):
    engine = Engine(model, tokenizer)
    shown = image(rng, "rapid")
    for client, passes in (("a", 1), ("b", 2), ("a", 2), ("b", 2)):
        for _ in range(2):  # at the same time
            engine.submit(asked(words(rng, 2), shown, words(rng, 2), client=client))
        run(engine)
        assert engine.image_features.passes == passes


@each(("budget", "kept"), [(0, 0), (16 * 64 * 4 - 1, 0), (16 * 64 * 4, 1), (2 * 16 * 64 * 4, 2)])
def test_features_are_kept_under_a_budget(rng, model, tokenizer, budget, kept, passes):
    passes.clear()
    features = ImageFeatures(budget)
    engine = Engine(model, tokenizer, image_features=features)
    images = [image(rng), image(rng), image(rng)]
    for shown in images:
        engine.submit(asked(words(rng, 1), shown, words(rng, 2)))
        run(engine)
    assert features.nbytes == kept * 16 * 64 * 4
    assert len(passes) == 3
    for shown in reversed(images):  # the last one was used last
        engine.submit(asked(words(rng, 1), shown, words(rng, 2)))
        run(engine)
    assert len(passes) == 6 - kept
    assert features.passes == len(passes)


def test_a_long_image_in_small_chunks_is_encoded_once_without_a_budget(
    rng, model, tokenizer, passes
):
    request = asked(words(rng, 1), image(rng, "high"), words(rng, 2))
    options = {"prefill_step_size": 8, "image_features": ImageFeatures(0)}
    assert_right(model, request, run_one(model, tokenizer, request, **options))
    assert sum(passes) - 5 == 5  # the oracle's are one pass of five tiles


@each("budget", [-1, 2.5, None])
def test_a_wrong_budget_is_refused(budget):
    with pytest.raises(RequestError, match="budget of images' features"):
        ImageFeatures(budget)


# The prefix cache


def test_an_image_in_the_prefix_cache_needs_no_pass(rng, tokenizer, passes):
    model = seeing(rng, kv_bits=8)
    options = {"prefix_cache": PrefixCache(1 << 24), "image_features": ImageFeatures(0)}
    engine = Engine(model, tokenizer, **options)
    shown, text = image(rng, "high"), words(rng, 3)
    answer = words(rng, 5)
    first = asked(text, shown, words(rng, 2), sampler=forced(answer))
    row = engine.submit(first)
    run(engine)
    assert passes == [1] * 5
    # The next turn of the conversation.
    second = replace(first, prompt=[*first.prompt, *answer, *words(rng, 3)], sampler=None)
    row = engine.submit(second)
    responses = run(engine)[row]
    assert responses[-1].cached_tokens >= len(first.prompt)
    assert passes == [1] * 5
    assert_right(model, second, responses, atol=0.05)


def test_other_images_never_match(rng, model, tokenizer, passes):
    prefixes = PrefixCache(1 << 24)
    engine = Engine(model, tokenizer, prefix_cache=prefixes)
    text, rest = words(rng, 10), words(rng, 5)
    base = picture(rng, 84, 84)
    tiles = np.array(read_image(base, TINY, "balanced").tiles)
    tiles[0, 40, 40, 1] ^= 1
    one = read_image(base, TINY, "balanced")
    changed = replace(one, tiles=tiles, digest=b"another")
    for shown, cached in ((one, 0), (changed, 10), (image(rng), 10), (one, 30)):
        request = asked(text, shown, rest)
        row = engine.submit(request)
        responses = run(engine)[row]
        assert responses[-1].cached_tokens == cached
        assert_right(model, request, responses)
    # Nor does text, whatever its ids are.
    row = engine.submit(Request([*text, *words(rng, 25)], 3))
    assert run(engine)[row][-1].cached_tokens == 10


def test_a_match_may_end_within_an_image(rng, model, tokenizer):
    """As after the eviction of a page, whose tokens are computed again with the rest of the image."""
    prefixes = PrefixCache(1 << 24)
    engine = Engine(model, tokenizer, prefix_cache=prefixes)
    request = asked(words(rng, PAGE - 20), image(rng, "high"), words(rng, 5))
    row = engine.submit(request)
    run(engine)
    while prefixes.tokens > PAGE:
        prefixes.evict(())
    row = engine.submit(request)
    responses = run(engine)[row]
    assert responses[-1].cached_tokens == PAGE
    assert_right(model, request, responses)


def test_names_in_prefix_caches(rng):
    one, two = image(rng, "rapid"), image(rng, "rapid")
    prompt, images = prompt_of([9, 8], one, two, one, [7])
    placed = placed_images(prompt, images, IMAGE)
    assert [each.places.tolist() for each in placed] == [
        [2, 3, 4, 5],
        [6, 7, 8, 9],
        [10, 11, 12, 13],
    ]
    names = prefix_names(prompt, placed)
    assert names[:2] + names[-1:] == [9, 8, 7]
    assert names[2:6] == names[10:14]
    assert len(set(names)) == 3 + 8
    assert all(2**63 <= name < 2**64 for name in names[2:-1])
    assert prefix_names(prompt[:3], []) == prompt[:3]


def test_a_folder_holds_pages_with_images(rng, tokenizer, tmp_path, passes):
    model = seeing(rng, kv_bits=8)
    shown = image(rng, "high")
    request = asked(words(rng, 50), shown, words(rng, 5))
    other = asked(request.prompt[:50], image(rng, "high"), request.prompt[-5:])
    answers = []
    for each_request, cached, count in ((request, 0, 5), (request, 128, 10), (other, 0, 15)):
        prefixes = PrefixCache(1 << 24, tmp_path / "pages")
        engine = Engine(model, tokenizer, prefix_cache=prefixes)
        row = engine.submit(each_request)
        responses = run(engine)[row]
        answers.append([response.token for response in responses])
        assert responses[-1].cached_tokens == cached
        # The image goes on behind the last whole page.
        assert len(passes) == count
        prefixes.close()
    assert answers[0] == answers[1]


def test_a_whole_image_in_the_folder_needs_no_pass(rng, tokenizer, tmp_path, passes):
    model = seeing(rng)
    request = asked(words(rng, 40), image(rng), words(rng, 10))
    for _ in range(2):
        prefixes = PrefixCache(1 << 24, tmp_path / "pages")
        run_one(model, tokenizer, request, prefix_cache=prefixes)
        prefixes.close()
    assert len(passes) == 1


# What else a request may ask for


@pytest.mark.parametrize("of", ["the prompt", "a draft model", "both"])
def test_drafts_are_exact(rng, tokenizer, of):
    model = seeing(rng)
    shown = image(rng)
    requests = [asked(words(rng, n), shown, words(rng, 3), max_tokens=20) for n in (2, 9)]
    requests.append(Request(words(rng, 4), 20))
    plain = [run_one(model, tokenizer, request) for request in requests]
    draft = None if of == "the prompt" else random_model(random_config(rng, **SIZES), rng)
    speculation = Speculation(draft, prompt_lookup=of != "a draft model", num_draft_tokens=3)
    engine = Engine(model, tokenizer, speculation=speculation)
    rows = [engine.submit(request) for request in requests]
    found = run(engine)
    for row, wanted in zip(rows, plain, strict=True):
        assert [r.token for r in found[row]] == [r.token for r in wanted]
    assert sum(found[row][-1].draft_counts.proposed for row in rows) > 0


def test_a_draft_model_with_a_vision_part_is_exact(rng, tokenizer):
    """Features never reach a draft model: it takes placeholders for tokens as any other."""
    model = seeing(rng)
    request = asked(image(rng, "rapid"), words(rng, 3), max_tokens=12)
    speculation = Speculation(copy.deepcopy(model), num_draft_tokens=2)
    responses = run_one(model, tokenizer, request, speculation=speculation)
    assert_right(model, request, responses)
    assert responses[-1].draft_counts.proposed > 0


def test_constraints(rng):
    tokenizer = nano_tokenizer()
    model = wide_model(rng, vision_config=TINY)
    request = asked(
        words(rng, 3),
        image(rng),
        words(rng, 2),
        constraint=Constraint.choices(["yes", "no, never"]),
    )
    responses = run_one(model, tokenizer, replace(request, max_tokens=20), kv="float")
    assert "".join(r.text for r in responses) in ("yes", "no, never")
    assert responses[-1].finish_reason == "stop"


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize(("keys", "count"), [("model.", 1), ("vision.", 3), ("", 3)])
def test_rows_with_different_adapters(rng, tokenizer, tmp_path, bits, keys, count, passes):
    model = seeing(rng)
    if bits is not None:
        quantize_model(model, model.args.to_dict(), QuantizationRule(bits, "balanced", "row"))
    added = Adapters(model, rng, tmp_path)
    with AdapterPool(model) as pool:
        added.add(pool, "one", 3, keys)
        added.add(pool, "two", 5, keys)
        engine = Engine(model, tokenizer, adapters=pool, prefix_cache=PrefixCache(1 << 24))
        parts = words(rng, 4), image(rng), words(rng, 3)
        names = ["one", None, "two"]
        requests = [asked(*parts, adapter=name) for name in names]
        rows = [engine.submit(request) for request in requests]
        found = run(engine)
        # Rows whose adapters don't change the vision part share an image's features.
        assert passes == [1] * count
        for name, row, request in zip(names, rows, requests, strict=True):
            merged = added.merged({} if name is None else {name: 1.0})
            assert_right(merged, request, found[row], atol=0.1 if bits else 5e-3)
        # Features are kept for each adapter.
        row = engine.submit(asked(words(rng, 1), *parts, adapter="two"))
        run(engine)
        assert engine.image_features.passes == count


def test_an_attached_adapter_changes_an_images_features(rng, model, tokenizer, tmp_path, passes):
    tensors = draw_tensors(model, rng, 2, "vision.")
    write_folder(tmp_path / "eyes", tensors)
    engine = Engine(model, tokenizer)
    request = asked(words(rng, 4), image(rng), words(rng, 3))
    answers = []
    for is_attached in (False, True, False):
        if is_attached:
            attach_adapter(model, tmp_path / "eyes")
        row = engine.submit(request)
        answers.append(run(engine)[row])
        assert_right(model, request, answers[-1], atol=5e-3)
        if is_attached:
            detach_adapter(model)
    first, second, third = map(logprobs_of, answers)
    assert np.array_equal(first, third)
    assert np.abs(first[0] - second[0]).max() > 1e-2
    assert engine.image_features.passes == 2


@pytest.mark.parametrize("bits", [8, 4])
def test_a_packed_vision_part(rng, tokenizer, bits):
    model = seeing(rng)
    quantize_model(model, model.args.to_dict(), QuantizationRule(bits, "balanced", "row"))
    request = asked(words(rng, 4), image(rng, "high"), words(rng, 3))
    responses = run_one(model, tokenizer, request, prefill_step_size=30)
    assert_right(model, request, responses, atol=0.1)


@each("start", [1, 4, 12, 21])
@each("chunk", [None, 5])
def test_scores(rng, model, tokenizer, start, chunk):
    request = asked(words(rng, 4), image(rng), words(rng, 6), max_tokens=0)
    request = replace(request, prompt_logprobs=PromptLogprobs(start, 2))
    responses = run_one(model, tokenizer, request, prefill_step_size=chunk)
    found = responses[-1].prompt_logprobs
    logits = np.array(model(by_hand(model, request))[0], np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    places = np.arange(start, len(request.prompt))
    wanted = logprobs[places - 1, np.array(request.prompt)[places]]
    np.testing.assert_allclose(found.logprobs, wanted, atol=1e-4, rtol=0)


@each("pooling", ["last", "mean"])
@each("chunk", [None, 5])
def test_embeddings(rng, model, tokenizer, pooling, chunk):
    requests = [
        asked(words(rng, n), image(rng), words(rng, 2), max_tokens=0, embedding=Embedding(pooling))
        for n in (1, 6)
    ]
    engine = Engine(model, tokenizer, prefill_step_size=chunk)
    rows = [engine.submit(request) for request in requests]
    found = run(engine)
    for row, request in zip(rows, requests, strict=True):
        states = np.array(hidden_states(model, by_hand(model, request))[0], np.float64)
        wanted = states[-1] if pooling == "last" else states.mean(0)
        wanted /= np.linalg.norm(wanted)
        np.testing.assert_allclose(found[row][-1].embedding, wanted, atol=1e-5, rtol=0)


def test_a_callers_cache_holds_an_images_positions(rng, tokenizer, passes):
    model = seeing(rng, kv_bits=8)
    engine = Engine(model, tokenizer)
    cache = engine.make_cache()
    answer, more = words(rng, 5), words(rng, 4)
    first = asked(words(rng, 3), image(rng), words(rng, 2), cache=cache, sampler=forced(answer))
    engine.submit(first)
    run(engine)
    assert len(passes) == 1
    # A second turn, of text; and a third, with another image.
    second = Request([answer[-1], *words(rng, 4)], 4, cache=cache, sampler=forced(more))
    row = engine.submit(second)
    responses = run(engine)[row]
    so_far = replace(first, prompt=[*first.prompt, *answer, *second.prompt[1:]])
    assert_right(model, so_far, responses, atol=0.05)
    assert passes[1:] == [1]  # of the oracle
    ids, images = prompt_of([more[-1]], image(rng), words(rng, 2))
    row = engine.submit(Request(ids, 4, images=images, cache=cache))
    responses = run(engine)[row]
    all_ids = [*so_far.prompt, *more, *ids[1:]]
    so_far = replace(first, prompt=all_ids, images=first.images + images)
    assert_right(model, so_far, responses, atol=0.05)


def test_progress_is_reported_and_waits_for_tiles(rng, model, tokenizer):
    seen = []
    request = asked(
        words(rng, 3),
        image(rng, "high"),
        words(rng, 2),
        on_prefill=lambda done, whole: seen.append((done, whole)),
    )
    run_one(model, tokenizer, request, prefill_step_size=50)
    assert seen == [(0, 85), (50, 85), (84, 85), (85, 85)]


# Ends


@each("steps", [1, 2, 4, 6])
def test_cancel_while_an_image_is_encoded(rng, model, tokenizer, steps, passes):
    passes.clear()
    engine = Engine(model, tokenizer, prefix_cache=PrefixCache(1 << 24))
    other = asked(words(rng, 2), image(rng, "rapid"), words(rng, 3))
    shown = image(rng, "high")
    cancelled = engine.submit(asked(words(rng, 2), shown, words(rng, 2)))
    for _ in range(steps):
        engine.step()
    engine.cancel(cancelled)
    assert not engine.busy
    # The features so far are gone, except whole ones.
    assert engine.image_features.nbytes == (80 * 64 * 4 if steps >= 5 else 0)
    row = engine.submit(other)
    assert_right(model, other, run(engine)[row])
    row = engine.submit(request := asked(words(rng, 1), shown, words(rng, 2)))
    assert_right(model, request, run(engine)[row])


def test_cancel_one_of_two_rows_with_the_same_image(rng, model, tokenizer):
    engine = Engine(model, tokenizer)
    shown = image(rng, "high")
    requests = [asked(words(rng, n), shown, words(rng, 2)) for n in (2, 60)]
    rows = [engine.submit(request) for request in requests]
    for _ in range(3):
        engine.step()
    engine.cancel(rows[0])
    found = run(engine)
    assert list(found) == [rows[1]]
    assert_right(model, requests[1], found[rows[1]])
    assert engine.image_features.passes == 5


def test_a_row_that_shares_a_chunk_is_cancelled_before_its_image(rng, model, tokenizer, passes):
    engine = Engine(model, tokenizer, prefill_step_size=30)
    kept = asked(image(rng, "rapid"), words(rng, 8))
    rows = [engine.submit(kept), engine.submit(asked(words(rng, 8), image(rng, "rapid"), [9]))]
    engine.step()
    assert len(passes) == 1
    engine.cancel(rows[1])
    found = run(engine)
    assert len(passes) == 1
    assert_right(model, kept, found[rows[0]])


class _Failing:
    """A vision part that fails at the second tile."""

    def __init__(self, vision, found):
        self._vision, self._found, self._count = vision, found, 0
        self.config = vision.config

    def whiten(self, tiles):
        return self._vision.whiten(tiles)

    def features(self, image):
        return self._vision.features(image)

    def steps(self, pixels):
        self._count += 1
        *states, tokens = self._vision.steps(pixels)
        if self._count == 2 and isinstance(self._found, Exception):
            yield states[0]
            raise self._found
        yield from states
        yield tokens * self._found if self._count == 2 else tokens


@each(
    ("found", "error", "message"),
    [(MemoryError("no memory"), MemoryError, "no memory"), (float("nan"), ImageError, "NaN")],
)
@each("alone", [True, False])
def test_a_failure_ends_its_row_alone(rng, tokenizer, found, error, message, alone):
    model = seeing(rng)
    vision = model.vision
    object.__setattr__(model, "vision", _Failing(vision, found))
    engine = Engine(model, tokenizer)
    sizes = (60, 61, 62) if alone else (2, 3, 4)  # those share a chunk, or don't
    requests = [asked(words(rng, n), image(rng, "rapid"), words(rng, 2)) for n in sizes]
    requests.append(Request(words(rng, 5), 5))
    rows = [engine.submit(request) for request in requests]
    answers = run(engine)
    failed = [row for row in rows if answers[row][-1].error is not None]
    assert len(failed) == 1
    assert isinstance(answers[failed[0]][-1].error, error)
    assert message in str(answers[failed[0]][-1].error)
    for row, request in zip(rows, requests, strict=True):
        if row not in failed:
            assert_right(model, request, answers[row])


# What is refused


def refusals(rng):
    shown, small = image(rng), image(rng, "rapid")
    ids, _ = prompt_of(words(rng, 2), shown, words(rng, 2))
    other = replace(TINY, image_size=112)
    return [
        (Request(ids), "has 16 image tokens .* its 0 images need 0"),
        (Request(ids, images=[shown, small]), "its 2 images need 20"),
        (Request(ids[:-1], images=[shown, small]), "need 20"),
        (Request(ids[2:-3], images=[small]), "has 15 image tokens"),
        (Request(words(rng, 2), images=[small]), "has 0 image tokens"),
        (Request(ids[:-2], images=[shown]), "ends with an image"),
        (Request(ids, images=["a.png"]), "images is"),
        (Request(ids, images=shown), "images is"),
        (
            Request(ids, images=[read_image(picture(rng, 90, 90), other, "balanced")]),
            "1 tiles of 112 pixels, and this model's have 1 of 84",
        ),
    ]


def test_what_does_not_fit_is_refused(rng, model, tokenizer):
    engine = Engine(model, tokenizer)
    for request, message in refusals(rng):
        with pytest.raises(RequestError, match=message):
            engine.submit(request)
    assert not engine.busy


def test_a_model_that_reads_text_only_refuses_images(rng, tokenizer):
    engine = Engine(random_model(random_config(rng, **SIZES), rng), tokenizer)
    with pytest.raises(RequestError, match="this model reads text only"):
        engine.submit(asked(words(rng, 2), image(rng), words(rng, 2)))
    # Its placeholder is a token as any other.
    engine.submit(Request([IMAGE] * 3, 1))
    assert len(list(engine.run())) == 1


def test_a_token_behind_an_image_is_not_healed(rng):
    tokenizer = nano_tokenizer()
    model = wide_model(rng, vision_config=TINY)
    text = tokenizer.encode("go")[-1:]
    for parts, shown in (((image(rng, "rapid"), text), ""), ((words(rng, 1), text), "go")):
        request = asked(*parts, heal=True, constraint=Constraint.text())
        engine = Engine(model, tokenizer)
        assert (engine.prepare(request).hidden > 0) == bool(shown)


def test_an_async_engine_takes_images(rng, model, tokenizer):
    request = asked(words(rng, 2), image(rng), words(rng, 2))

    engine = AsyncEngine(model, tokenizer)

    async def answer():
        return [response async for response in engine.stream(request)]

    responses = asyncio.run(answer())
    engine.close()
    assert_right(model, request, responses)


def test_an_engine_of_another_thread_takes_images(rng, model, tokenizer):
    request = asked(
        words(rng, 2), image(rng, "high"), words(rng, 2), sampler=forced([9, 8, 7, 6, 9])
    )
    found = []
    thread = threading.Thread(target=lambda: found.extend(run_one(model, tokenizer, request)))
    thread.start()
    thread.join()
    assert [response.token for response in found] == [9, 8, 7, 6, 9]


@dataclass
class Seen:
    colour: Literal["red", "blue"]
    count: Literal[1, 2]


def test_the_functions_of_generation_take_images(rng, tmp_path):
    model, tokenizer = load()
    give_eyes(model, tokenizer, rng)
    (tmp_path / "photo.png").write_bytes(picture(rng, 60, 60))
    shown = read_image(tmp_path / "photo.png", tokenizer.vision_config)
    content = [{"type": "image", "image": shown}, {"type": "text", "text": "What?"}]
    messages = [{"role": "user", "content": content}]
    images = ChatImages()
    ids = tokenizer.apply_chat_template(messages, images=images, add_generation_prompt=True)
    options = {"max_tokens": 8, "kv_bits": 16}
    answer = generate(model, tokenizer, ids, images=images.placed, **options)
    plain = tokenizer.apply_chat_template([{"role": "user", "content": "What?"}])
    both = batch_generate(model, tokenizer, [ids, plain], images=[images.placed, ()], **options)
    assert both.texts[0] == answer
    seen = generate_as(Seen, model, tokenizer, messages, max_tokens=30)
    assert isinstance(seen, Seen)
    given = {"images": images.placed, "max_tokens": 6, "seed": 1}
    found = search(model, tokenizer, ids, 2, verify=lambda answer: 1.0, **given)
    assert found.answers
