"""`/v1/responses`.

| file | what it holds |
| --- | --- |
| `routes.py` | the routes |
| `ask.py` | what a body asks for: items as messages, tools, formats |
| `answer.py` | a response, its items, and the events of its stream |
| `stream.py` | from the events of generation to these |
| `kept_responses.py` | responses that later requests go on from |
"""
