"""Calls of tools: made side by side, each with a text as its result."""

from __future__ import annotations

import asyncio
import contextvars
import json
from collections.abc import Mapping, Sequence
from typing import Any

from afm_mlx.fm.errors import ToolCallError
from afm_mlx.fm.generable import GeneratedContent
from afm_mlx.fm.tool import Tool


async def run_calls(
    calls: Sequence[Mapping[str, Any]],
    tools: Mapping[str, Tool],
    context: contextvars.Context,
    raises: bool,
) -> list[str]:
    """Make calls at the same time.

    Args:
        calls: `name` and `arguments` (a JSON object) of each.
        tools: the tools by their names.
        context: the context that the calls run in.
        raises: whether a tool that fails ends the request; else the model reads why as the tool's result.

    Returns:
        The results, as texts.

    Raises:
        ToolCallError: for the first tool that failed, once all the others have ended.
    """
    tasks = [
        asyncio.create_task(_run(call, tools, raises), context=context.copy()) for call in calls
    ]
    try:
        return list(await asyncio.gather(*tasks))
    except GeneratorExit:  # the event loop has ended
        raise
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def _run(call: Mapping[str, Any], tools: Mapping[str, Tool], raises: bool) -> str:
    name, task = call["name"], asyncio.current_task()
    try:
        if name not in tools:
            raise LookupError(f"there is no tool {name!r}; there are {', '.join(tools)}.")
        text = _text(await tools[name].call(GeneratedContent(call["arguments"])))
    except asyncio.CancelledError as error:
        if task is None or task.cancelling():
            raise
        # Of something that the tool waited for: nobody has cancelled the request.
        text = _failed(name, RuntimeError(f"cancelled {error}".strip()), error, raises)
    except Exception as error:
        text = _failed(name, error, error, raises)
    # Half surrogate pairs, as names of files may have them, are no text to the tokenizer.
    return text.encode("utf-8", "replace").decode()


def _failed(name: str, error: Exception, cause: BaseException, raises: bool) -> str:
    if raises:
        raise ToolCallError(name, error) from cause
    return f"Tool error: {error}"


def _text(result: Any) -> str:
    """A result as text; JSON, where it is more than that."""
    if isinstance(result, str):
        return result
    if isinstance(result, GeneratedContent):
        return result.to_json()
    if isinstance(result, dict | list):
        try:
            return json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError):
            return str(result)
    return str(result)
