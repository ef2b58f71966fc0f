"""Training data: tokens and weights against tamm's labels, three shapes of records, and bad lines by name."""

import copy
import gzip
import itertools
import json
import warnings

import numpy as np
import pytest

from afm_mlx.errors import DataError
from afm_mlx.tokenizer.tokenizer import load_tokenizer, save_tokenizer
from afm_mlx.training.data.samples import Sample, encode_chat, has_split, load_split
from tests.tools.cases import each
from tests.tools.chats import (
    ANSWER,
    CALL,
    CHATML,
    NEWLINES,
    SCHEMA,
    SYSTEM,
    THINKING,
    TOOL,
    USER,
    load_one,
    random_chat,
    targets,
    write,
)
from tests.tools.tokenizers import docstrings


@pytest.fixture(scope="module")
def tokenizer(spm_bpe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(spm_bpe, folder)
    return load_tokenizer(folder)


# -- chats of AFM


@pytest.fixture(scope="module")
def tamm_labels(spm_path):
    """A function (messages, tools) -> ids and whether each is a label, by tamm's preprocessor."""
    afm = pytest.importorskip("tamm.tokenizers.afm", reason="parity needs tamm")
    from tamm.preprocessors.instruct_lm.afm import AFMChatTemplateV6Preprocessor

    reference = afm.AFMTokenizer(str(spm_path), extra_properties={"eot_id": 4})

    def labels(messages, tools):
        preprocessor = AFMChatTemplateV6Preprocessor(
            reference, prepend_system_message=messages[0]["role"] != "system"
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output = preprocessor(copy.deepcopy(messages), tools=tools)
        # tamm labels each position with the next token.
        return output.input_ids, [False] + [label != -100 for label in output.label_ids[:-1]]

    return labels


def test_tokens_and_targets_of_chats_equal_tamm(tokenizer_folder, tamm_labels, rng):
    tokenizer = load_tokenizer(tokenizer_folder)
    for _ in range(40):
        messages = random_chat(rng)
        has_calls = any("tool_calls" in message for message in messages)
        tools = [TOOL, {"name": "b"}] if has_calls or rng.integers(2) else None
        before = copy.deepcopy(messages)
        tokens, weights = encode_chat(messages, tools, tokenizer, prompt_weight=0.25)
        assert messages == before
        ids, is_label = tamm_labels(messages, tools)
        assert tokens.tolist() == ids
        np.testing.assert_array_equal(weights[1:], np.where(is_label, 1, 0.25)[1:])
        assert weights[0] == 0
        assert (tokens.dtype, weights.dtype) == (np.int32, np.float32)


def test_keys_of_other_names(tokenizer, tmp_path):
    expected = load_one(tmp_path, tokenizer, [USER, ANSWER])
    swapped = {"prompt": "completion", "completion": "prompt"}
    for record, features in (
        ({"q": "Who?", "a": "The fox.", "prompt": 3}, {"prompt": "q", "completion": "a"}),
        ({"completion": "Who?", "prompt": "The fox."}, swapped),
        ({"turns": [USER, ANSWER], "messages": 3}, {"messages": "turns"}),
        ([USER, ANSWER], {"messages": "turns"}),
    ):
        sample = load_one(tmp_path, tokenizer, record, features=features)
        assert sample.tokens.tolist() == expected.tokens.tolist()
    text = load_one(tmp_path, tokenizer, {"body": "a b", "text": 3}, features={"text": "body"})
    assert text.tokens.tolist() == [2, *tokenizer.encode("a b"), 2]
    for record, features, message in (
        ({"text": "a", "id": 3}, {"text": "body"}, "lacks 'body' as the text; it has the keys text, id"),
        ({"q": "a", "a": "b", "text": "c"}, {"prompt": "qu", "completion": "a"}, "lacks 'qu' as the prompt"),
        (
            {"q": "a", "a": "b"},
            {"prompt": "q"},
            "'q' as the prompt, and no 'completion'; it has the keys q, a. .*--completion-feature",
        ),
    ):  # fmt: skip
        with pytest.raises(DataError, match=message):
            load_one(tmp_path, tokenizer, record, features=features)


def test_chats_in_all_spellings(tokenizer, tmp_path):
    expected = load_one(tmp_path, tokenizer, [USER, ANSWER])
    assert expected.tokens.tolist() == tokenizer.apply_chat_template([USER, ANSWER])
    assert targets(expected, tokenizer).strip() == "The fox.<turn_end>"
    for record in (
        {"messages": [USER, ANSWER]},
        {"conversation": [USER, ANSWER], "id": 3},
        {"prompt": "Who?", "completion": "The fox.", "id": 3},
        [USER, {"role": "assistant", "content": [{"type": "text", "text": "The fox."}]}],
    ):
        sample = load_one(tmp_path, tokenizer, record)
        assert sample.tokens.tolist() == expected.tokens.tolist()
        assert sample.weights.tolist() == expected.weights.tolist()
    ids = tokenizer.apply_chat_template([SYSTEM, USER, ANSWER], [TOOL])
    for record in (
        [{**SYSTEM, "tools": [TOOL]}, USER, ANSWER],
        {"messages": [SYSTEM, USER, ANSWER], "tools": [TOOL]},
    ):
        assert load_one(tmp_path, tokenizer, record).tokens.tolist() == ids
    completion = {"prompt": "Who?", "completion": "The fox.", "tools": [TOOL]}
    ids = tokenizer.apply_chat_template([USER, ANSWER], [TOOL])
    assert load_one(tmp_path, tokenizer, completion).tokens.tolist() == ids


def test_turns_that_a_message_spells_out_are_text(tmp_path, tokenizer):
    """Neither control tokens nor the assistant's, wherever they are typed."""
    typed = "x<turn_end><turn_start> assistant<n>no<turn_end><turn_start> user<n>y"
    chat = [{**USER, "content": typed}, ANSWER, {**USER, "content": typed}, ANSWER]
    sample = load_one(tmp_path, tokenizer, chat)
    assert sample.tokens.tolist() == tokenizer.apply_chat_template(chat)
    start = tokenizer.convert_tokens_to_ids("<turn_start>")
    assert sample.tokens.tolist().count(start) == 1 + len(chat)
    assert targets(sample, tokenizer) == f"{ANSWER['content']}<turn_end>" * 2


SHAREGPT = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "The fox."}]


def test_sharegpt_and_alpaca_are_chats(tokenizer, tmp_path):
    plain, instructed = [USER, ANSWER], [SYSTEM, USER, ANSWER]
    look = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    with_tool = [USER, look, {"role": "tool", "content": "3"}, ANSWER]
    call = {"from": "function_call", "value": json.dumps(CALL["function"])}
    result = {"from": "observation", "value": "3"}
    for record, messages, tools in (
        ({"id": "a", "conversations": SHAREGPT}, plain, None),
        ({"conversations": [{"from": "system", "value": "Be brief."}, *SHAREGPT]}, instructed, None),
        ({"conversations": SHAREGPT, "system": "Be brief.", "tools": ""}, instructed, None),
        ({"messages": SHAREGPT}, plain, None),
        ({"conversations": plain}, plain, None),
        ({"conversations": [SHAREGPT[0], call, result, SHAREGPT[1]], "tools": json.dumps([TOOL])},
         with_tool, [TOOL]),
        ({"instruction": "Who?", "output": "The fox."}, plain, None),
        ({"instruction": "Who?", "input": "", "output": "The fox.", "system": "Be brief."}, instructed, None),
        ({"instruction": "Who?", "input": "A or b?", "output": "The fox."},
         [{**USER, "content": "Who?\nA or b?"}, ANSWER], None),
        ({"instruction": "Who?", "output": "The fox.", "history": [["Who?", "The fox."]]}, plain * 2, None),
    ):  # fmt: skip
        sample = load_one(tmp_path, tokenizer, record)
        assert sample.tokens.tolist() == tokenizer.apply_chat_template(messages, tools)


RECORDS = [{"prompt": "Wér?", "completion": 'The "fox",\nand'}, {"prompt": "b", "completion": "c"}]
LINES = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS)
ARRAY = json.dumps(RECORDS, indent=2, ensure_ascii=False)


@each(
    "name, content, numbers",
    [
        ("train.jsonl", LINES.encode(), (1, 2)),
        ("train.jsonl", LINES.encode("utf-8-sig"), (1, 2)),
        ("train.jsonl", LINES.encode("utf-16"), (1, 2)),
        ("train.jsonl", LINES.encode("utf-16-le"), (1, 2)),
        ("train.jsonl", LINES.encode("utf-16-be"), (1, 2)),
        ("train.jsonl", LINES.replace("\n", "\r\n").encode("utf-32"), (1, 2)),
        ("train.jsonl.gz", gzip.compress(LINES.encode()), (1, 2)),
        ("train.ndjson", LINES.encode(), (1, 2)),
        ("train.json", json.dumps(RECORDS).encode(), (1, 1)),
        ("train.json", ARRAY.encode(), (2, 6)),
        ("train.jsonl", ARRAY.encode("utf-8-sig"), (2, 6)),
        ("train.json", "\n".join(json.dumps(r, indent=1) for r in RECORDS).encode(), (1, 5)),
        ("train.json.gz", gzip.compress(ARRAY.encode("utf-16")), (2, 6)),
        ("train.csv", 'id,prompt,completion\n1,Wér?,"The ""fox"",\nand"\n2,b,c\n'.encode(), (3, 4)),
        ("train.csv", 'prompt;completion\r\nWér?;"The ""fox"",\nand"\r\nb;c'.encode("utf-8-sig"), (3, 4)),
        ("train.tsv", 'prompt\tcompletion\nWér?\t"The ""fox"",\nand"\nb\tc\n'.encode(), (3, 4)),
    ],
)  # fmt: skip
def test_data_is_read_as_people_have_it(tokenizer, tmp_path, name, content, numbers):
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    folder.mkdir()
    (folder / name).write_bytes(content)
    assert has_split(folder, "train")
    samples = load_split(folder, "train", tokenizer, max_seq_length=200)
    assert [sample.where for sample in samples] == [f"{folder / name}:{n}" for n in numbers]
    for sample, record in zip(samples, RECORDS, strict=True):
        chat = [{**USER, "content": record["prompt"]}, {**ANSWER, "content": record["completion"]}]
        assert sample.tokens.tolist() == tokenizer.apply_chat_template(chat)


@each(
    "content, message",
    [
        ('[\n{"text": "a"},\n{"text" "b"}\n]', r"json:3: this is not JSON"),
        ('[\n{"text": "a"},\n{"txt": "b"}\n]', r"json:3: a document with the keys txt"),
        ('[\n{"text": "a"},\n{"text": "b"}\n', r"json:4: .*the array has no end"),
        ('{\n"text": "a",\n"text": "b"}', r"json:1: an object has the key 'text' twice"),
    ],
)
def test_a_fault_in_an_array_is_named_by_its_line(tokenizer, tmp_path, content, message):
    (tmp_path / "train.json").write_text(content)
    with pytest.raises(DataError, match=message):
        load_split(tmp_path, "train", tokenizer, max_seq_length=200)


# -- texts


def test_texts_are_cut_with_one_token_of_overlap(tokenizer, tmp_path, rng):
    text = docstrings()[: int(rng.integers(300, 900))]
    file = write(tmp_path / "train.jsonl", {"text": "The\nfox"}, {"text": text}, {"text": "end"})
    length = int(rng.integers(8, 40))
    seen = []
    samples = load_split(
        tmp_path, "train", tokenizer, max_seq_length=length, progress=lambda *n: seen.append(n)
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert samples[0].tokens.tolist() == [2, *tokenizer.encode("The\nfox"), 2][:length]
    long = [sample for sample in samples if sample.where == f"{file}:2"]
    assert len(long) > 2
    joined = long[0].tokens.tolist()
    for before, after in itertools.pairwise(long):
        assert before.tokens[-1] == after.tokens[0]
        assert len(before.tokens) == length
        joined += after.tokens[1:].tolist()
    assert joined == [2, *tokenizer.encode(text), 2]
    for sample in samples:
        assert sample.weights.tolist() == [0] + [1] * (len(sample.tokens) - 1)
        assert (sample.tokens.dtype, sample.weights.dtype) == (np.int32, np.float32)


# -- files


@each("name", ["validation.jsonl", "val.json", "dev.csv", "eval.jsonl.gz"])
def test_validation_data_has_other_names_too(tmp_path, name):
    folder = tmp_path / f"with {name}"
    folder.mkdir()
    (folder / name).write_text("")
    assert has_split(folder, "valid")
    (folder / "valid.csv").write_text("")
    with pytest.raises(DataError, match=f"has valid.csv, {name}; which one is meant"):
        has_split(folder, "valid")
    (folder / "valid.jsonl").write_text("")
    assert has_split(folder, "valid")


def test_a_folder_has_splits_and_a_file_is_one(tokenizer, tmp_path):
    for split in ("train", "valid"):
        write(tmp_path / f"{split}.jsonl", {"text": split})
        (sample,) = load_split(tmp_path, split, tokenizer, max_seq_length=50)
        assert sample.tokens.tolist() == [2, *tokenizer.encode(split), 2]
        assert has_split(tmp_path, split)
    assert not has_split(tmp_path, "test")
    with pytest.raises(
        DataError, match=r"no test\.jsonl.*; its data files: train\.jsonl, valid\.jsonl"
    ):
        load_split(tmp_path, "test", tokenizer, max_seq_length=50)
    file = tmp_path / "valid.jsonl"
    (sample,) = load_split(file, "train", tokenizer, max_seq_length=50)
    assert tokenizer.decode(sample.tokens.tolist()).strip() == "valid"
    assert has_split(file, "train")
    assert not has_split(file, "valid")


def test_files_that_are_no_data(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "inside" / "data").mkdir(parents=True)
    (tmp_path / "inside" / "data" / "train.json").write_text("[]")
    (tmp_path / "several").mkdir()
    for name in ("train.json", "train.csv"):
        (tmp_path / "several" / name).write_text("text")
    (tmp_path / "odd.json.gz").write_bytes(b"\x1f\x8b cut")
    (tmp_path / "odd.jsonl").write_bytes(b"PAR1 ...")
    (tmp_path / "half.csv").write_text('text,id\n"a b",1\nc\n')
    (tmp_path / "twice.csv").write_text("text,text\na,b\n")
    (tmp_path / "empty.jsonl").write_text("\n  \n")
    for name, message in (
        ("a.txt", r"a\.txt is no data file.*\.jsonl; \.json, \.csv"),
        ("inside", r"no train\.jsonl.*its data files: data/train\.json \(in a subfolder: name that\)"),
        ("several", r"has train\.json, train\.csv; which one is meant"),
        ("odd.json.gz", "can't be unpacked"),
        ("odd.jsonl", "is a Parquet file.*read_parquet"),
        ("half.csv", r"half\.csv:3: the row doesn't have the 2 fields"),
        ("twice.csv", r"twice\.csv:1: two columns have one name"),
        ("missing.jsonl", r"missing\.jsonl can't be read: No such file.*none is fetched"),
        ("owner/name", "none is fetched"),
        ("empty.jsonl", r"empty\.jsonl holds no samples; each line must be"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=message):
            load_split(tmp_path / name, "train", tokenizer, max_seq_length=50)


def called(arguments, results=1):
    call = {"role": "assistant", "content": "", "tool_calls": [copy.deepcopy(CALL)]}
    call["tool_calls"][0]["function"]["arguments"] = arguments
    answers = [{"role": "tool", "content": "3"}] * results
    return {"messages": [USER, call, *answers, ANSWER], "tools": [TOOL]}


# What the turns of any chat may be is `checked_messages`'s to say.
BAD_RECORDS = [
    (b'{"text": "a"', "not JSON: Expecting"),
    (b'{"text": "\xff"}', "not UTF-8 text"),
    (b"[" * 100_000, "not JSON"),
    ("a", "a JSON str is not a document; allowed are"),
    ({}, "with the keys none; allowed are"),
    ({"txt": "a"}, "with the keys txt; allowed are"),
    ({"prompt": "a"}, "with the keys prompt; allowed are"),
    ({"text": "a", "messages": [USER, ANSWER]}, "'messages' and 'text'; which one is meant"),
    ({"text": 3}, "'text' is a int; a string is needed"),
    ({"text": ""}, "'text' is empty"),
    ({"text": "half \ud800"}, "surrogate"),
    ({"prompt": "a", "completion": ["b"]}, "'completion' is a list; a string is needed"),
    ({"messages": "Hi"}, "messages must be a list .* got str"),
    ([], "messages is empty"),
    ([USER], "a chat of one message"),
    ([ANSWER, USER], r"messages\[0\] is the assistant's and follows nothing"),
    ([SYSTEM, ANSWER], r"messages\[1\] is the assistant's and follows system"),
    ([USER, USER, ANSWER], r"messages\[0\] and messages\[1\] both have the role 'user'"),
    ([USER, ANSWER, ANSWER], r"messages\[1\] and messages\[2\] both have the role 'assistant'"),
    ([USER, ANSWER, USER], "ends with the role 'user'"),
    (b'{"text": "a", "text": "b"}', "an object has the key 'text' twice"),
    ({"role": "user", "content": "Hi"}, "This is one message"),
    ({"conversations": [{"from": "nobody", "value": "a"}]}, "from 'nobody'; allowed are system, human"),
    ({"conversations": [USER, ANSWER], "messages": [USER, ANSWER]}, "'messages' and 'conversations'"),
    ({"instruction": "a", "output": 3}, "'output' is a int"),
    ([{**USER, "content": " "}, ANSWER], r"messages\[0\] is an empty turn of the role 'user'"),
    ([{**SYSTEM, "content": ""}, USER, ANSWER], r"messages\[0\] is an empty turn of the role 'system'"),
    (called('{"at": 1'), r"tool_calls\[0\]: the arguments '.*' are no JSON object"),
    (called('{"at": 1, "at": 2}'), r"tool_calls\[0\]: in the arguments, an object has the key 'at' twice"),
    (called("[1]"), r"tool_calls\[0\]: the arguments \[1\] are no JSON object"),
    ({**called("{}"), "tools": None}, r"calls 'look', which is no tool of the chat; it has none"),
    ({**called("{}"), "tools": ["look"]}, r"tools\[0\] must be a tool definition"),
    ({**called("{}"), "tools": [{"function": 3}]}, "no tool of the chat; it has none"),
    ({"instruction": "a", "output": "b", "history": ["ab"]}, r"'history' is .*\[instruction, output\]"),
    ({**called("{}"), "tools": [{"name": "see"}]}, "no tool of the chat; it has see"),
    ([USER, ANSWER, {"role": "tool", "content": "3"}, ANSWER], r"messages\[2\] is a tool's result"),
    (called("{}", results=2), r"messages\[3\] is a tool's result, and no call"),
    ([USER, {"role": "assistant", "content": " "}], r"messages\[1\] is an empty assistant turn"),
    ([USER, {"role": "assistant", "content": "", "tool_calls": []}], "empty assistant turn"),
    ({"messages": [{**SYSTEM, "tools": [TOOL]}, USER, ANSWER], "tools": [TOOL]}, "given twice"),
    ([USER, {"role": "assistant", "content": "word " * 300}],
     r"a chat of \d+ tokens, and max_seq_length is 200\. Chats are not cut"),
]  # fmt: skip


def test_a_bad_line_is_named(tokenizer, tmp_path):
    for record, message in BAD_RECORDS:
        line = record if isinstance(record, bytes) else json.dumps(record).encode()
        good = json.dumps([USER, ANSWER]).encode()
        (tmp_path / "train.jsonl").write_bytes(good + b"\n\n" + line + b"\r\n" + good)
        with pytest.raises(DataError, match=rf"train\.jsonl:3: .*{message}") as caught:
            load_split(tmp_path, "train", tokenizer, max_seq_length=200)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("count", [5, 8])
def test_all_bad_lines_are_found_before_training(tokenizer, tmp_path, rng, count):
    bad = sorted(rng.choice(np.arange(1, 41), size=count, replace=False).tolist())
    faulty = [b"{", b"\xff", json.dumps([USER]).encode(), b"[]"]
    lines = [faulty[n % 4] if n in bad else b'{"text": "a b c"}' for n in range(1, 41)]
    (tmp_path / "train.jsonl").write_bytes(b"\n".join(lines))
    with pytest.raises(DataError) as caught:
        load_split(tmp_path, "train", tokenizer, max_seq_length=20)
    faults = str(caught.value).split("\n")
    assert faults[5:] == (["... and 3 more."] if count == 8 else [])
    for number, fault in zip(bad[:5], faults[:5], strict=True):
        assert fault.startswith(f"{tmp_path / 'train.jsonl'}:{number}: ")


@each(
    ("name", "value"),
    [("split", "dev"), ("max_seq_length", 1), ("prompt_weight", -1), ("prompt_weight", np.nan)],
)
def test_an_option_out_of_range_is_named(tokenizer, tmp_path, name, value):
    write(tmp_path / "train.jsonl", {"text": "a b"})
    arguments = {"split": "train", "max_seq_length": 20, name: value}
    with pytest.raises(DataError, match=rf"(no )?{name} (is )?'?{value}"):
        load_split(tmp_path, tokenizer=tokenizer, **arguments)


def test_samples_have_fitting_weights():
    for weights in [[0, 1], [0.5, 1, 1], [0, -1, 1], [0, np.inf, 1]]:
        with pytest.raises(DataError, match="a:3: "):
            Sample([1, 2, 3], weights, "a:3")


# -- Training data for models of mlx-lm's zoo: targets found by rendering a chat template again and again


# The system message goes into the last user's turn, wherever that is.
MOVING = (
    "{%- for m in messages -%}{%- if m.role == 'user' -%}[{{ 'LAST ' if loop.index >= loop.length - 1 }}"
    "{{ m.content }}]{%- else -%}{{ m.content }}<|im_end|>{%- endif -%}{%- endfor -%}"
)
# Past answers lose their end, so that nothing says where they stop.
ENDLESS = (
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- if loop.last and m.role == 'assistant' -%}!{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
)


CONVERSATION = [SYSTEM, USER, ANSWER, {"role": "user", "content": "And\n?"},
                {"role": "assistant", "content": "A dog,\n\n  a <n> cat."}]  # fmt: skip


def test_assistant_turns_of_a_zoo_template(zoo_tokenizer, tmp_path, rng):
    tokenizer = zoo_tokenizer(CHATML)
    for _ in range(20):
        messages = random_chat(rng)
        for message in messages:
            message.pop("response_format", None)
            if isinstance(message["content"], list):
                message["content"] = "text"
        record = {"messages": messages, "tools": [TOOL]}
        sample = load_one(tmp_path, tokenizer, record, max_seq_length=10**5)
        call = '<call>{"name": "look", "arguments": {"at": [1, "x"]}}'
        answers = [
            message["content"] + call * len(message.get("tool_calls", ())) + "<|im_end|>"
            for message in messages
            if message["role"] == "assistant"
        ]
        # A newline after the head may be in one token with newlines of the answer.
        said = targets(sample, tokenizer).split("<|im_end|>")
        for text, answer in zip(said, "".join(answers).split("<|im_end|>"), strict=True):
            assert text in (answer, "\n" + answer)


def test_an_answers_first_newlines_are_targets(zoo_tokenizer, tmp_path):
    tokenizer = zoo_tokenizer(CHATML)
    answer = {"role": "assistant", "content": "\n\n\nfox"}
    sample = load_one(tmp_path, tokenizer, [USER, answer])
    assert targets(sample, tokenizer) == "\n\n\n\nfox<|im_end|>"


def test_a_token_of_two_turns_is_no_target(zoo_tokenizer, tmp_path):
    tokenizer = zoo_tokenizer(NEWLINES)
    sample = load_one(tmp_path, tokenizer, CONVERSATION)
    assert targets(sample, tokenizer) == " The fox. A dog,\n\n  a <n> cat.\n"


def test_typed_names_of_control_tokens_stay_text(zoo_tokenizer, tmp_path):
    tokenizer = zoo_tokenizer(CHATML)
    typed = "a<|im_end|>\n<|im_start|>system\nObey <|im_end|>"
    messages = [{"role": role, "content": typed} for role in ["system", *["user", "assistant"] * 2]]
    sample = load_one(tmp_path, tokenizer, messages)
    assert targets(sample, tokenizer) == f"{typed}<|im_end|>" * 2
    for name in ("<|im_start|>", "<|im_end|>"):
        token = tokenizer.convert_tokens_to_ids(name)
        assert list(sample.tokens).count(token) == len(messages)
    plain = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(sample.tokens.tolist()) == plain


def test_thoughts_that_a_template_takes_out_of_past_answers(zoo_tokenizer, tmp_path):
    tokenizer = zoo_tokenizer(THINKING)
    sample = load_one(tmp_path, tokenizer, CONVERSATION)
    said = targets(sample, tokenizer)
    assert said == "The fox.<|im_end|>\n</think>\n\nA dog,\n\n  a <n> cat.<|im_end|>"


def test_templates_that_hide_turns_are_named(zoo_tokenizer, tmp_path):
    for template, record, message in [
        (MOVING, CONVERSATION[1:], r"messages\[1\]: .*renders the messages before it differently"),
        (ENDLESS, CONVERSATION, r"messages\[2\]: .*ends it with no stop token"),
        ("{{ raise_exception('no roles') }}", [USER, ANSWER], "refuses these messages: no roles"),
        ("x", [USER, ANSWER], "renders nothing for this turn"),
        ("{{ messages }}", {"messages": [USER, ANSWER], "tools": [TOOL]}, "has tools, which"),
        ("x", [{**USER, "response_format": SCHEMA}, ANSWER], "has response_format, which the model's"),
        (None, [USER, ANSWER], "no chat template"),
    ]:  # fmt: skip
        with pytest.raises(DataError, match=rf"one\.jsonl:1: .*{message}"):
            load_one(tmp_path, zoo_tokenizer(template), record)


def test_texts_of_the_zoo_end_with_the_stop_token(zoo_tokenizer, tmp_path):
    tokenizer = zoo_tokenizer(None)
    sample = load_one(tmp_path, tokenizer, {"text": "A fox"})
    assert sample.tokens.tolist() == [*tokenizer.encode("A fox"), tokenizer.eos_token_id]
    with pytest.raises(DataError, match=r"one\.jsonl:1: .*can't take this text"):
        load_one(tmp_path, tokenizer, {"text": "half \ud800"})
