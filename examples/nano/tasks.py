"""The seven tasks of the embedded model, as a seeded generator of chats.

A sample is a chat whose last message is the assistant's answer. Answers are a function of the prompt, so
the measure is exact match. The test split's values never occur in training (see `values.py`).

    python tasks.py            # print one sample of each task, as the model sees it
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from json_tasks import Sample, answer_from_tool, call_tool, extract_event
from small_talk import small_talk, thanks
from tamm.preprocessors.instruct_lm.afm import AFMChatTemplateV6Preprocessor
from tamm.preprocessors.instruct_lm.jinja import DEFAULT_SYSTEM_MESSAGE
from text_tasks import suggest_reply, summarize_thread, tag_topics
from tone_task import rewrite_tone
from values import Values

TASKS: dict[str, Callable[[Values], Sample]] = {
    "extract_event": extract_event,
    "call_tool": call_tool,
    "summarize_thread": summarize_thread,
    "rewrite_tone": rewrite_tone,
    "suggest_reply": suggest_reply,
    "tag_topics": tag_topics,
    "answer_from_tool": answer_from_tool,
}
# Shares of the training stream; tool calls copy the most and also occur inside `answer_from_tool`.
_SHARES = {
    "extract_event": 5,
    "call_tool": 5,
    "summarize_thread": 5,
    "rewrite_tone": 6,
    "suggest_reply": 4,
    "tag_topics": 3,
    "answer_from_tool": 5,
    "small_talk": 2,
    "conversation": 3,
}
_OTHER_SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Be brief.",
    "Help the user with short answers.",
)


def draw_sample(task: str, values: Values) -> dict[str, Any]:
    """Draw one chat: `{"task", "messages"}`, with `"tools"` where the task has them.

    The task is a key of `TASKS`, `"small_talk"`, or `"conversation"` (two or three turns of several tasks).
    """
    if task == "conversation":
        messages, tools = _conversation(values)
    elif task == "small_talk":
        messages, tools = small_talk(values)
    else:
        messages, tools = TASKS[task](values)
    system = DEFAULT_SYSTEM_MESSAGE
    if values.split == "train" and values.rng.random() < 0.1:
        system = values.rng.choice(_OTHER_SYSTEM_MESSAGES)
    sample = {"task": task, "messages": [{"role": "system", "content": system}, *messages]}
    return sample if tools is None else {**sample, "tools": tools}


def _conversation(values: Values) -> Sample:
    plain = (summarize_thread, rewrite_tone, suggest_reply, tag_topics)
    rng = values.rng
    messages, tools = rng.choice(
        (small_talk, small_talk, call_tool, answer_from_tool, extract_event, *plain)
    )(values)
    messages = list(messages)
    if rng.random() < 0.6:
        messages += rng.choice((small_talk, *plain))(values)[0]
    if messages[-1].get("tool_calls") is None and rng.random() < 0.5:
        messages += thanks(values)
    return messages, tools


def training_samples(seed: int) -> Iterator[dict[str, Any]]:
    """Yield training chats without end; equal seeds give equal streams."""
    values = Values(random.Random(f"train-{seed}"), "train")
    while True:
        yield draw_sample(draw_task(values.rng), values)


def draw_task(rng: random.Random) -> str:
    """Draw a task's name by its share of the training stream."""
    return rng.choices(list(_SHARES), list(_SHARES.values()))[0]


def test_samples(seed: int, per_task: int) -> list[dict[str, Any]]:
    """Return held-out chats: `per_task` different ones of each of the seven tasks, in the order of `TASKS`.

    Each is `{"task", "messages", "answer"}`, with `"tools"` where the task has them: the prompt's messages
    and the exact text that the assistant should write.
    """
    samples = []
    for task in TASKS:
        values = Values(random.Random(f"test-{seed}-{task}"), "test")
        seen: set[str] = set()
        while len(seen) < per_task:
            sample = draw_sample(task, values)
            key = json.dumps(sample)
            if key not in seen:
                seen.add(key)
                answer = answer_text(sample["messages"].pop())
                samples.append({**sample, "answer": answer})
    return samples


def answer_text(message: dict[str, Any]) -> str:
    """Return the text of an assistant message as the model writes it, its tool calls included."""
    update = AFMChatTemplateV6Preprocessor(None).maybe_update_message
    return update(copy.deepcopy(message))["content"]


def encode(
    preprocessor: AFMChatTemplateV6Preprocessor, sample: dict[str, Any], generate: bool = False
) -> tuple[list[int], list[int] | None]:
    """Encode a sample in the real chat format: input ids, and labels, or None where `generate` ends with a
    prompt.

    The preprocessor must have `prepend_system_message=False`: samples carry their system message. Labels are
    shifted by one and -100 outside the assistant's turns.
    """
    # The preprocessor edits the messages that it is given.
    messages = copy.deepcopy(sample["messages"])
    encoded = preprocessor(messages, tools=sample.get("tools"), generate_prefix=generate)
    return encoded.input_ids, encoded.label_ids


def render(sample: dict[str, Any]) -> str:
    """Return the chat as text in the real format, before the tokenizer replaces line breaks with `<n>`."""
    preprocessor = AFMChatTemplateV6Preprocessor(None, prepend_system_message=False)
    messages = [preprocessor.maybe_update_message(m) for m in copy.deepcopy(sample["messages"])]
    return preprocessor._jinja_chat_template.render(messages=messages, tools=sample.get("tools"))


if __name__ == "__main__":
    for each in [*test_samples(seed=0, per_task=1)]:
        print(f"--- {each['task']}\n{render(each)}\n=> {each['answer']}")
