"""Reads events out of messages, as instances of a class. Written for Apple's SDK:

python -m afm_mlx.fm examples/fm/extract_event.py
"""

import asyncio

import apple_fm_sdk as fm

MESSAGES = [
    "Fixchundia Tram is hosting the Strategy Social, Bistro Po, 19:51 this Tuesday.",
    "Reminder from Hana: Film Lecture, Monday in Gallery Sain, 22:55.",
]


@fm.generable("An event")
class Event:
    title: str
    person: str
    day: str
    time: str
    place: str


async def extract(message: str) -> Event:
    session = fm.LanguageModelSession()
    return await session.respond(f"Fill in the event.\n{message}", generating=Event)


async def main() -> None:
    for event in await asyncio.gather(*map(extract, MESSAGES)):
        print(f"{event.day} {event.time}: {event.title} by {event.person} at {event.place}")


asyncio.run(main())
