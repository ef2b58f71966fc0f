"""A server whose model checks guesses: the same answers, and how many guesses were right."""

import json

from tests.afm_mlx.server.test_openai_chat import ANSWER, EVENT, EVENT_FORMAT, FORMAL, TOOLS, TRACK
from tests.tools.server import running_server

ASKED = (
    {"messages": [{"role": "user", "content": FORMAL}]},
    {"messages": [{"role": "user", "content": EVENT}], "response_format": EVENT_FORMAT},
    {"messages": [{"role": "user", "content": TRACK}], "tools": TOOLS, "tool_choice": "required"},
    {"messages": [{"role": "user", "content": FORMAL}], "temperature": 1, "seed": 3, "n": 2},
    {"messages": [{"role": "user", "content": FORMAL}], "logprobs": True, "top_logprobs": 2},
    {"messages": [{"role": "user", "content": FORMAL}], "frequency_penalty": 1.5, "max_tokens": 20},
)


def told(answer):
    return [(c.message.content, c.message.tool_calls and [
        (call.function.name, call.function.arguments) for call in c.message.tool_calls
    ], c.finish_reason) for c in answer.choices]  # fmt: skip


def test_answers_are_those_without_guesses_and_usage_tells_of_them():
    with running_server() as server:
        assert not server.served.drafts
        client = server.openai()
        wanted = [told(client.chat.completions.create(model="afm-nano", **a)) for a in ASKED]
        plain = client.chat.completions.create(model="afm-nano", **ASKED[0])
        assert plain.usage.completion_tokens_details is None
    with running_server(draft_model="afm-nano", num_draft_tokens=3, prompt_lookup=True) as server:
        client = server.openai()
        found = [client.chat.completions.create(model="afm-nano", **a) for a in ASKED]
        assert [told(answer) for answer in found] == wanted
        assert wanted[0][0][0] == ANSWER
        accepted = [a.usage.completion_tokens_details.accepted_prediction_tokens for a in found]
        rejected = [a.usage.completion_tokens_details.rejected_prediction_tokens for a in found]
        assert all(accepted)
        assert all(count >= 0 for count in rejected)
        text = client.completions.create(model="afm-nano", prompt=["a b", "c d"], max_tokens=9)
        details = text.usage.completion_tokens_details
        assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 0
        stream = client.chat.completions.create(
            model="afm-nano", stream=True, stream_options={"include_usage": True}, **ASKED[0]
        )
        *_, last = stream
        assert last.usage.completion_tokens_details.accepted_prediction_tokens > 0
        figures = server.http().get("/metrics").text
        assert 'afm_mlx:spec_decode_num_draft_tokens_total{model_name="afm-nano"}' in figures
        assert json.loads(found[1].choices[0].message.content)
