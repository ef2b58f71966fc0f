"""Prompts that afm-nano was trained on, for tests that need sensible answers."""

from pydantic import BaseModel

FORMAL = "Make this formal:\nhey Hana, can't make it to the Film Lecture"
FORMAL_ANSWER = "Dear Hana, I am unable to attend the Film Lecture."

ALARM = "I need to get up at 11:17."
ALARM_TOOLS = {"set_alarm": ("Set an alarm", "time"), "play_music": ("Play a song", "song")}
STOP = "Stop report Safety Dinner for me."
STOP_TOOLS = {"stop_report": ("Stop a report", "report")}
STOP_RESULT = '{"state": "blocked"}'
STOP_ANSWER = "The request to stop the report Safety Dinner is blocked."

EVENT = (
    "Fill in the event.\n"
    "Fixchundia Tram is hosting the Strategy Social, Bistro Po, 19:51 this Tuesday."
)


class Event(BaseModel):
    """An event"""

    title: str
    person: str
    day: str
    time: str
    place: str


EVENT_FIELDS = tuple(Event.model_fields)
EVENT_ANSWER = {
    "title": "Strategy Social",
    "person": "Fixchundia Tram",
    "day": "Tuesday",
    "time": "19:51",
    "place": "Bistro Po",
}


def parameters(name):
    """The schema of a tool with one text as its argument."""
    return {"type": "object", "properties": {name: {"type": "string"}}, "required": [name]}
