"""Transcripts: the framework's JSON, what requests add to it, and the chat messages made of it."""

import asyncio
import copy
import json
import re

import pytest

from afm_mlx import fm
from afm_mlx.fm.transcript import Transcript
from afm_mlx.tokenizer.chat_messages import checked_messages
from afm_mlx.tokenizer.chat_template import ChatTemplate
from tests.tools.cases import each


@fm.generable("A report")
class Report:
    sky: str


async def _weather(city: str) -> str:
    """Weather of a city."""
    return city


TOOL = fm.Tool.from_function(_weather).tool_definition
CALLS = [{"name": "_weather", "arguments": f'{{"city": "{city}"}}'} for city in ("Århus", "Ulm")]
UUID = re.compile(r"[0-9A-F]{8}(-[0-9A-F]{4}){3}-[0-9A-F]{12}")


def read(document):
    return asyncio.run(Transcript.from_dict(document))


def written(transcript):
    return asyncio.run(transcript.to_dict())


def entries(transcript):
    return written(transcript)["transcript"]["entries"]


@pytest.fixture
def transcript():
    """One request that was answered with two calls and an object."""
    made = Transcript()
    made.add_instructions("Be brief.", [TOOL])
    made.add_prompt("Weather?", Report.generation_schema().response_format())
    first, second = made.add_tool_calls(
        [{"name": "_weather", "arguments": {"city": "Århus"}}, CALLS[1]]
    )
    made.add_tool_output(first, "_weather", "rain")
    made.add_tool_output(second, "_weather", "sun")
    made.add_response(fm.GeneratedContent({"sky": "mixed"}), ["afm"], source="Report")
    made.add_prompt("Thanks")
    made.add_response("Bye", ["afm"])
    return made


def test_entries_have_the_form_of_the_framework(transcript):
    document = written(transcript)
    assert (document["type"], document["version"]) == ("FoundationModels.Transcript", 1)
    found = document["transcript"]["entries"]
    ids = [entry.pop("id") for entry in found]
    parts = [p for e in found if e["role"] != "response" for p in e["contents"]]
    text_ids = [part.pop("id") for part in parts]
    call_ids = [call.pop("id") for call in found[2]["toolCalls"]]
    assert all(UUID.fullmatch(one) for one in ids + text_ids)
    assert ids[3:5] == call_ids
    assert len(set(ids)) == len(ids)

    def text(value):
        return [{"type": "text", "text": value}]

    schema = Report.generation_schema().response_format()["json_schema"]
    answer = {"source": "Report", "content": {"sky": "mixed"}}
    tool = {"role": "tool", "toolName": "_weather"}
    assert found == [
        {"role": "instructions", "contents": text("Be brief."), "tools": [TOOL]},
        {"role": "user", "contents": text("Weather?"), "options": {},
         "responseFormat": {"type": "jsonSchema", "jsonSchema": schema}},
        {"role": "response", "toolCalls": CALLS},
        {**tool, "toolCallID": call_ids[0], "contents": text("rain")},
        {**tool, "toolCallID": call_ids[1], "contents": text("sun")},
        {"role": "response", "contents": [{"type": "structure", "id": "0", "structure": answer}],
         "assets": ["afm"]},
        {"role": "user", "contents": text("Thanks"), "options": {}},
        {"role": "response", "contents": [{**text("Bye")[0], "id": "0"}], "assets": ["afm"]},
    ]  # fmt: skip


def test_what_was_read_is_written_with_all_that_is_unknown():
    document = {
        "version": 2,
        "type": "FoundationModels.Transcript",
        "more": [1],
        "transcript": {
            "kept": None,
            "entries": [
                {"role": "user", "id": "A", "contents": [{"type": "image", "at": 3}], "new": {"x": 1}}
            ],
        },
    }  # fmt: skip
    before = copy.deepcopy(document)
    transcript = read(document)
    document["transcript"]["entries"].clear()
    assert written(transcript) == before
    transcript.add_prompt("Next")
    assert written(transcript)["transcript"]["kept"] is None
    assert [entry["role"] for entry in entries(transcript)] == ["user", "user"]
    written(transcript)["transcript"]["entries"].clear()
    assert len(entries(transcript)) == 2
    with pytest.raises(fm.DecodingFailureError, match=r"Entry 0 .* 'image'"):
        transcript.messages()


Kind = fm.Transcript


def test_entries_are_typed_and_transcripts_are_made_of_them(transcript):
    document = written(transcript)
    document["transcript"]["entries"][1]["unknown"] = [1]
    again = read(document)
    names = "Instructions Prompt ToolCalls ToolOutput ToolOutput Response Prompt Response"
    assert [type(entry) for entry in again] == [getattr(Kind, name) for name in names.split()]
    assert len(again) == 8
    first, prompt, calls, output, *_ = again
    assert first.text == "Be brief."
    assert [tool.name for tool in first.tool_definitions] == ["_weather"]
    assert prompt.response_schema == Report.generation_schema().to_dict()
    assert [call.arguments.value() for call in calls.calls] == [{"city": "Århus"}, {"city": "Ulm"}]
    found = output.tool_name, output.call_id, output.text
    assert found == ("_weather", calls.calls[0].id, "rain")
    (structure,) = again[5].segments
    assert (structure.source, structure.content.value()) == ("Report", {"sky": "mixed"})
    assert (again[5].text, again[-1].assets) == ('{"sky": "mixed"}', ["afm"])
    made = fm.Transcript([*again[:2], again[-1]])
    assert entries(made) == [document["transcript"]["entries"][i] for i in (0, 1, 7)]
    assert again[1] in made
    assert made.messages()[0][1:] == [again.messages()[0][1], again.messages()[0][-1]]
    with pytest.raises(TypeError, match=r"Transcript\.Prompt; got 'Hi'"):
        fm.Transcript(["Hi"])
    image = {"role": "user", "id": "A", "contents": [{"type": "image", "at": 3}]}
    (part,) = read({"transcript": {"entries": [image]}})[0].segments
    assert (part.type, part.fields["at"]) == ("image", 3)


Random = fm.SamplingMode.random


@each(
    "options, expected",
    [
        (fm.GenerationOptions(), {}),
        (fm.GenerationOptions(fm.SamplingMode.greedy()), {"topK": 1}),
        (fm.GenerationOptions(Random(top=41, seed=73), 0.7, 256),
         {"topK": 41, "randomSeed": 73, "temperature": 0.7, "maximumResponseTokens": 256}),
        (fm.GenerationOptions(Random(probability_threshold=0.5)), {"topP": 0.5}),
        (fm.GenerationOptions(Random(probability_threshold=1.0)), {"topP": 1.0}),
        (fm.GenerationOptions(Random(seed=-4)), {"randomSeed": -4}),
    ],
)  # fmt: skip
def test_options_are_in_prompts_and_come_back(options, expected):
    prompt = fm.Transcript.Prompt("Hi", options)
    assert prompt.to_dict()["options"] == expected
    assert read(written(fm.Transcript([prompt])))[0].options == options


def test_invalid_options_and_arguments_are_errors_when_they_are_read():
    entry = {"role": "user", "id": "A", "contents": [], "options": {"temperature": -1}}
    transcript = read({"transcript": {"entries": [entry]}})
    with pytest.raises(fm.DecodingFailureError, match="prompt A: 'temperature'"):
        _ = transcript[0].options
    entry = {"role": "response", "id": "B", "toolCalls": [{"name": "a", "arguments": "{"}]}
    with pytest.raises(fm.DecodingFailureError, match="entry B"):
        _ = read({"transcript": {"entries": [entry]}})[0].calls


def nested(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


def test_deep_values_come_back():
    text = json.dumps(nested(700))
    part = {"type": "structure", "structure": {"content": json.loads(text)}}
    entry = {"role": "user", "id": "A", "contents": [part], "new": json.loads(text)}
    transcript = read({"transcript": {"entries": [entry]}})
    assert written(transcript) == {"transcript": {"entries": [entry]}}
    assert transcript.messages()[0][0]["content"] == text


@each(
    "transcript",
    [
        None,
        {"entries": []},
        {"entries": [{"role": "user"}]},
        {"entries": [{"role": "user", "id": "A"}]},
        {"entries": [{"id": "A", "contents": []}]},
        {"entries": [{"role": "pope", "id": "A", "contents": []}]},
        {"entries": [{"role": "user", "id": "A", "contents": [{"type": "text"}]}]},
        {"entries": [{"role": "user", "id": "A", "contents": [{"type": "structure"}]}]},
        {"entries": [{"role": "response", "id": "A", "toolCalls": [{"name": "a", "arguments": {}}]}]},
        {"entries": [{"role": 3, "id": "A", "contents": []}]},
        {"entries": [], "new": {1}},
        {"entries": [], "new": float("nan")},
        {"entries": [], "new": nested(100_000)},
        {"entries": {}},
        [],
    ],
)  # fmt: skip
def test_what_is_no_transcript_is_refused(transcript):
    document = {"type": "FoundationModels.Transcript", "version": 1, "transcript": transcript}
    if transcript == {"entries": []}:
        assert written(read(document)) == document
        return
    with pytest.raises(fm.DecodingFailureError, match="This is not a transcript"):
        read(document)


def prompts(transcript):
    return [e["contents"][0]["text"] for e in entries(transcript) if e["role"] == "user"]


def test_requests_that_share_a_transcript_keep_the_turns_of_each_other(transcript):
    drafts = [transcript.copy() for _ in range(3)]
    before, turns = drafts[1].turns()
    summary = Transcript()
    summary.add_prompt("Summary?")
    summary.add_response("Weather.")
    drafts[1] = drafts[1].with_entries([*before, *summary._entries, *turns[-1]])
    for i, draft in enumerate(drafts):
        draft.add_prompt(f"{i}?")
        draft.add_response(f"{i}.")
    for draft in drafts:
        transcript.merge(draft)
    assert prompts(transcript) == ["Summary?", "Thanks", "0?", "1?", "2?"]
    roles = [entry["role"] for entry in entries(transcript)]
    assert roles == ["instructions", *["user", "response"] * 5]


def test_messages_are_what_chat_templates_take(transcript):
    messages, tools = transcript.messages()
    assert tools == [TOOL]
    response_format = Report.generation_schema().response_format()
    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?", "response_format": response_format},
        {"role": "assistant", "content": "", "tool_calls": [{"function": call} for call in CALLS]},
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "sun"},
        {"role": "assistant", "content": '{"sky": "mixed"}'},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "Bye"},
    ]
    checked = checked_messages(messages)
    text = ChatTemplate().render(checked, tools=tools, arguments_are_decoded=True)
    assert '[{"name": "_weather", "arguments": {"city": "Århus"}}, ' in text
    assert "name: Report\ndescription: A report\nschema: {" in text
    assert "system tools: {" in text


def test_no_instructions_are_no_message():
    transcript = Transcript()
    assert transcript.messages() == ([], [])
    transcript.add_instructions("", [TOOL])
    transcript.add_prompt("Hi")
    assert transcript.messages() == ([{"role": "user", "content": "Hi"}], [TOOL])
    assert read(written(transcript)).messages() == transcript.messages()


def test_what_is_given_and_returned_is_not_shared(transcript):
    before = json.dumps(written(transcript))
    messages, tools = transcript.messages()
    tools[0]["function"].clear()
    messages[1]["response_format"]["json_schema"].clear()
    assert json.dumps(written(transcript)) == before
