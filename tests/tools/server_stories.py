"""Prompts that afm-nano was trained on, for tests that need sensible answers."""

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
EVENT_FIELDS = ("title", "person", "day", "time", "place")
EVENT_ANSWER = dict(
    zip(
        EVENT_FIELDS,
        ("Strategy Social", "Fixchundia Tram", "Tuesday", "19:51", "Bistro Po"),
        strict=True,
    )
)


def parameters(name):
    """The schema of a tool with one text as its argument."""
    return {"type": "object", "properties": {name: {"type": "string"}}, "required": [name]}
