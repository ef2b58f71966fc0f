"""Answers with what functions return: the model chooses one and writes its arguments.

python examples/fm/call_tool.py
"""

import asyncio

from afm_mlx import fm

PRICES = {"Golden Camera": 320, "Black Desk": 738}


async def check_price(item: str) -> dict[str, str | int]:
    """Price of an item"""
    return {"dollars": PRICES[item], "store": "Theater Duwal"}


def track_order(order: str) -> dict[str, str]:
    """Find an order"""
    return {"city": "Hitton", "arrives": "March 14"}


async def main() -> None:
    for question in ("Track order L5526.", "Price of the Black Desk, please."):
        session = fm.LanguageModelSession(tools=[check_price, track_order])
        print(f"{question} {await session.respond(question)}")
        entries = (await session.transcript.to_dict())["transcript"]["entries"]
        for call in entries[2]["toolCalls"]:
            print(f"    {call['name']}({call['arguments']})")


asyncio.run(main())
