"""`/v1/messages`, Anthropic's API, as coding tools speak it.

| file | what it holds |
| --- | --- |
| `routes.py` | the routes |
| `ask.py` | what a body asks for: blocks as messages, tools, formats |
| `answer.py` | a message, its blocks, and the events of its stream |
| `stream.py` | from the events of generation to these |
"""
