"""Pairs for contrastive training: lines that are refused by name, and batches that hold every pair once."""

import dataclasses
import json

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.errors import DataError
from afm_mlx.training.data.pairs import Pair, PairBatches, load_pairs
from tests.tools.cases import each
from tests.tools.cli import lines


def encode(text, is_query):
    """A token for each letter, and one that only queries have."""
    return [1] * is_query + [ord(letter) for letter in text]


def random_pairs(rng, count):
    """Texts of different lengths, some queries with two positives, and up to three negatives."""

    def text(letter):
        return letter * int(rng.integers(1, 40)) + str(int(rng.integers(1 << 30)))

    queries = [text("q") for _ in range(count - count // 4)]
    queries += queries[: count // 4]
    negatives = rng.integers(0, 4, count)
    return [
        Pair(query, text("p"), tuple(text("n") for _ in range(n)), f"line {i}")
        for i, (query, n) in enumerate(zip(queries, negatives, strict=True))
    ]


def make(pairs, **options):
    return PairBatches(pairs, encode, **({"batch_size": 5, "max_seq_length": 64} | options))


def texts_of(batch):
    """The batch's texts, queries first, from its groups."""
    rows = [
        bytes(row[:length].tolist()).decode()
        for tokens, lengths in zip(batch.tokens, batch.lengths, strict=True)
        for row, length in zip(np.array(tokens), lengths.tolist(), strict=True)
    ]
    return [rows[row] for row in batch.rows.tolist()]


def test_lines_become_pairs(tmp_path):
    file = lines(
        tmp_path / "train.jsonl",
        {"query": "a?", "positive": "a."},
        {"query": "b?", "positive": "b.", "negative": ["c.", "d."]},
        {"query": "e?", "positive": "e.", "negative": "f."},
        {"query": "g?", "positive": "g.", "negative": None},
    )
    found = [dataclasses.astuple(pair)[:3] for pair in load_pairs(tmp_path, "train")]
    assert found == [
        ("a?", "a.", ()),
        ("b?", "b.", ("c.", "d.")),
        ("e?", "e.", ("f.",)),
        ("g?", "g.", ()),
    ]
    assert load_pairs(tmp_path, "train")[3].where == f"{file}:4"


@each(
    "line, fault",
    [
        ([1], "this is none"),
        ({}, "this has the keys none"),
        ({"query": "a"}, "this has the keys query"),
        ({"query": "a", "positive": "b", "negatives": []}, "query, positive, negatives"),
        ({"query": "a", "positive": 3}, "'positive' is 3; a text"),
        ({"query": " ", "positive": "b"}, "'query' is ' '; a text"),
        ({"query": "a", "positive": "b", "negative": {}}, "'negative' is {}; a list"),
        ({"query": "a", "positive": "b", "negative": ["c", ""]}, r"'negative\[1\]' is ''; a text"),
        (
            {"query": "a", "positive": "b", "negative": ["c", "b"]},
            "the positive is also a negative",
        ),
    ],
)
def test_lines_that_are_no_pairs(tmp_path, line, fault):
    lines(tmp_path / "train.jsonl", {"query": "a", "positive": "b"}, line)
    with pytest.raises(DataError, match=rf"train.jsonl:2: .*{fault}"):
        load_pairs(tmp_path, "train")


def test_an_epoch_has_each_pair_once_and_its_texts_whole(rng):
    pairs = random_pairs(rng, 23)
    batches = make(pairs, group_rows=7, seed=int(rng.integers(99)))
    assert batches.per_epoch == 5
    by_query = {(f"\1{p.query}", p.positive): p for p in pairs}
    orders = []
    for epoch in range(2):
        seen = []
        for step in range(5 * epoch, 5 * epoch + 5):
            batch = batches(step)
            count = batch.weights.size
            assert count in (4, 5)
            assert mx.array_equal(batch.weights, mx.ones(count))
            texts = texts_of(batch)
            chosen = [by_query[pair] for pair in zip(texts[:count], texts[count:], strict=False)]
            assert texts[2 * count :] == [text for pair in chosen for text in pair.negatives]
            seen += [pair.where for pair in chosen]
            for tokens, lengths in zip(batch.tokens, batch.lengths, strict=True):
                assert tokens.shape[0] <= 7
                assert tokens.shape[1] % 16 == 0
                assert tokens.shape[1] - 16 < lengths.max().item() <= tokens.shape[1]
        assert sorted(seen) == sorted(pair.where for pair in pairs)
        orders.append(seen)
    assert orders[0] != orders[1]
    # A batch is a function of its number alone.
    assert texts_of(make(pairs, group_rows=7, seed=batches.seed)(7)) == texts_of(batches(7))
    plain = make(pairs, shuffle=False)
    assert [plain.texts(step) for step in (0, 5)] == [plain.texts(0)] * 2


def test_what_a_query_is_not_compared_with():
    """Its other positives, and texts that equal its own; never its own, and nothing else."""
    pairs = [
        Pair("when?", "noon", ("wet",), "1"),
        Pair("when?", "at twelve", (), "2"),
        Pair("at what time?", "noon", ("at twelve",), "3"),
    ]
    batch = make(pairs, shuffle=False)(0)
    assert texts_of(batch)[3:] == ["noon", "at twelve", "noon", "wet", "at twelve"]
    assert batch.excluded.tolist() == [
        [False, True, True, False, True],
        [True, False, True, False, True],
        [True, False, False, False, False],
    ]


def test_equal_texts_are_excluded_from_other_batches_of_the_split_too():
    pairs = [Pair("when?", "noon", (), "1"), Pair("where?", "here", ("twelve",), "2")]
    pairs += [Pair("when?", "twelve", (), "3")]
    batches = make(pairs, batch_size=2, shuffle=False)
    assert batches(0).excluded.tolist() == [[False, False, True], [False, False, False]]


def test_data_that_is_of_no_use(rng):
    pairs = [Pair("a", "b", (), "one"), Pair("c", "d" * 65, (), "f.jsonl:7")]
    with pytest.raises(
        DataError, match=r"f\.jsonl:7: a text of 65 tokens, and max_seq_length is 64"
    ):
        make(pairs)
    with pytest.raises(DataError, match="one and the same text"):
        make([Pair("a", "b", (), "one"), Pair("c", "b", (), "two")])
    make([Pair("a", "b", ("c",), "one")])


def test_the_fingerprint_tells_batches_apart(rng):
    pairs = random_pairs(rng, 8)
    first = make(pairs)
    assert first.fingerprint == make(list(pairs)).fingerprint
    others = [
        make(pairs, batch_size=4),
        make(pairs, seed=1),
        make(pairs, shuffle=False),
        make(pairs, group_rows=3),
        make(pairs[:-1]),
        make([dataclasses.replace(pairs[0], positive="new"), *pairs[1:]]),
        make([dataclasses.replace(pairs[0], negatives=("new",)), *pairs[1:]]),
    ]
    assert len({each.fingerprint for each in [first, *others]}) == 8
    assert json.loads(json.dumps(first.fingerprint)) == first.fingerprint


def test_what_people_are_shown(rng):
    pairs = [Pair("a", "bc", ("d",), "one"), Pair("a", "d", (), "two")]
    batches = make(pairs, group_rows=2)
    assert batches.summary == "2 pairs, 5 tokens, 1 hard negatives"
    assert batches.layout == "5 pairs, texts of up to 16 tokens"
    assert batches.shape == (2, 16, 0)
    assert make(pairs).shape == (5, 16, 0)
    assert len(batches) == 2
