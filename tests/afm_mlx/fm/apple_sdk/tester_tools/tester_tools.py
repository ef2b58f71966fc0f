"""The tools that the tests of Apple's SDK call; its sdist has the tests, but not these."""

import asyncio
import json

import apple_fm_sdk as fm

OPERATIONS = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b if b else "Error: b is 0",
}
USERS = {1: "Alice", 2: "Bob"}
BREADS = ["baguette", "focaccia", "rye", "sourdough"]


@fm.generable("Two numbers and what to do with them")
class CalculatorParams:
    operation: str = fm.guide("What to do", anyOf=list(OPERATIONS))
    a: float = fm.guide("The first number")
    b: float = fm.guide("The second number")


@fm.generable("Whose data is asked for")
class UserInfoParams:
    user_id: int = fm.guide("The user's number")


@fm.generable("A list and what to do with it")
class ListParams:
    items: list[str] = fm.guide("The list")
    action: str = fm.guide("What to do", anyOf=["count", "sum", "join"])


@fm.generable("True to fail")
class ErrorParams:
    should_fail: bool = fm.guide("True fails")


@fm.generable("What to say, and when")
class DelayParams:
    delay: float = fm.guide("Seconds", range=(0.0, 5.0))
    message: str = fm.guide("What is said")


@fm.generable("Which breads are wanted")
class BreadParams:
    searchTerm: str = fm.guide("A part of a bread's name")
    limit: int = fm.guide("How many at most", range=(1, 6))


class ToolOfClass(fm.Tool):
    @property
    def arguments_schema(self):
        return self.arguments.generation_schema()


class SimpleCalculatorTool(ToolOfClass):
    name = "simple_calculator"
    description = "Perform basic arithmetic operations"
    arguments = CalculatorParams

    async def call(self, args):
        operation, a, b = (args.value(for_property=name) for name in ("operation", "a", "b"))
        return f"{a} {operation} {b}: {OPERATIONS[operation](a, b)}"


class GetUserInfoTool(ToolOfClass):
    name = "get_user_info"
    description = "Get what is known about a user"
    arguments = UserInfoParams

    async def call(self, args):
        return json.dumps({"name": USERS.get(args.value(int, for_property="user_id"))})


class ProcessListTool(ToolOfClass):
    name = "process_list"
    description = "Count, add up or join a list"
    arguments = ListParams

    async def call(self, args):
        items = args.value(list, for_property="items")
        actions = {"count": len, "sum": sum, "join": ", ".join}
        return f"Result: {actions[args.value(str, for_property='action')](items)}"


class ErrorRaisingTool(ToolOfClass):
    name = "error_raising_tool"
    description = "Fails if should_fail is true"
    arguments = ErrorParams

    async def call(self, args):
        if args.value(bool, for_property="should_fail"):
            raise ValueError("Intentional error for testing")
        return "Success"


class AsyncDelayTool(ToolOfClass):
    name = "async_delay_tool"
    description = "Says something after a while"
    arguments = DelayParams

    async def call(self, args):
        await asyncio.sleep(args.value(float, for_property="delay"))
        return args.value(str, for_property="message")


class SearchBreadDatabaseTool(ToolOfClass):
    name = "searchBreadDatabaseTool"
    description = "Searches a database of breads"
    arguments = BreadParams

    async def call(self, args):
        term = args.value(str, for_property="searchTerm").lower()
        found = [bread for bread in BREADS if term in bread]
        return json.dumps(found[: args.value(int, for_property="limit")])
