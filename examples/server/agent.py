"""An agent on a local server: the model asks for tools, which are run here, until it has an answer.

afm-mlx server
python examples/server/agent.py "Track order L5526." "Price of the Black Desk, please."

It needs nothing but OpenAI's client (pip install openai), and works with any server of /v1/responses.
"""

import argparse
import json
from collections.abc import Callable

from openai import OpenAI
from openai.types.responses import FunctionToolParam

PRICES = {"Golden Camera": 320, "Black Desk": 738}


def check_price(item: str) -> dict:
    """Price of an item"""
    return {"dollars": PRICES[item], "store": "Theater Duwal"}


def track_order(order: str) -> dict:
    """Find an order"""
    return {"city": "Hitton", "arrives": "March 14"}


TOOLS: dict[str, Callable[..., dict]] = {"check_price": check_price, "track_order": track_order}


def definition(name: str, argument: str) -> FunctionToolParam:
    """A tool as it is described to the model."""
    return {
        "type": "function",
        "name": name,
        "description": TOOLS[name].__doc__ or "",
        "parameters": {
            "type": "object",
            "properties": {argument: {"type": "string"}},
            "required": [argument],
        },
        "strict": True,
    }


DEFINITIONS = [definition("check_price", "item"), definition("track_order", "order")]


def answer(client: OpenAI, model: str, question: str) -> str:
    """Answer one question, with at most three rounds of tools."""
    response = client.responses.create(model=model, input=question, tools=DEFINITIONS)
    for _ in range(3):
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            break
        results = []
        for call in calls:
            print(f"    {call.name}({call.arguments})")
            try:
                result = TOOLS[call.name](**json.loads(call.arguments))
            except (KeyError, TypeError, ValueError) as error:  # the model reads what was wrong
                result = {"error": str(error)}
            results.append(
                {
                    "type": "function_call_output",
                    "call_id": call.call_id,
                    "output": json.dumps(result),
                }
            )
        # The server has kept what was said before.
        response = client.responses.create(
            model=model, input=results, tools=DEFINITIONS, previous_response_id=response.id
        )
    return response.output_text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--url", default="http://127.0.0.1:8080/v1")
    parser.add_argument("--key", default="none")
    parser.add_argument("--model", default="afm-nano")
    given = parser.parse_args()
    client = OpenAI(base_url=given.url, api_key=given.key)
    for question in given.questions:
        print(question)
        print(answer(client, given.model, question))


if __name__ == "__main__":
    main()
