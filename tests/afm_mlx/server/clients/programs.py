"""Small programs with other projects' clients, as in their documentation: python programs.py NAME URL

Each holds a conversation of several turns with the tool `weather` against the server of
`test_python_clients.py`, whose answers follow `STEPS`, and prints the last answer; or asks for the vectors of
some texts, and prints them.
"""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

MODEL = "tiny"
EMBEDDER = "afm-nano"
ASKED: list[str] = []
"""Cities that the tool was called with."""


def weather(city: str) -> str:
    """The weather of a city."""
    ASKED.append(city)
    return f"{city}: {len(ASKED)} degrees"


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather", "parameters": PARAMETERS},
}
QUESTIONS = ("Compare Rome and Oslo.", "And Lima?")


def with_litellm(url: str) -> str:
    """The loop of litellm's page on function calling, whole and as a stream."""
    return _litellm(f"openai/{MODEL}", f"{url}/v1")


def with_litellm_ollama(url: str) -> str:
    """The same over Ollama's API."""
    return _litellm(f"ollama_chat/{MODEL}", url)


def _litellm(model: str, address: str) -> str:
    import litellm

    messages = []
    for question, streams in zip(QUESTIONS, (False, True), strict=True):
        messages.append({"role": "user", "content": question})
        while True:
            response = litellm.completion(
                model=model,
                api_base=address,
                api_key="dummy",
                messages=messages,
                tools=[TOOL],
                tool_choice="auto",
                reasoning_effort="low",
                allowed_openai_params=["reasoning_effort"],
                stream=streams,
            )
            if streams:
                response = litellm.stream_chunk_builder(list(response), messages=messages)
            message = response.choices[0].message
            messages.append(message)  # with all that litellm adds to it
            if not message.tool_calls:
                break
            results = [
                {
                    "tool_call_id": call.id,
                    "role": "tool",
                    "name": call.function.name,
                    "content": weather(**json.loads(call.function.arguments)),
                }
                for call in message.tool_calls
            ]
            messages += reversed(results)  # not in the order of the calls
    return message.content


def with_ollama(url: str) -> str:
    """The loop of Ollama's page on tool calling, with a function as the tool, whole and as a stream."""
    import ollama

    client = ollama.Client(url)
    (name,) = (model.model for model in client.list().models)
    assert "tools" in client.show(name).capabilities
    messages = []
    for question, streams in zip(QUESTIONS, (False, True), strict=True):
        messages.append({"role": "user", "content": question})
        while True:
            answer = client.chat(name, messages, tools=[weather], stream=streams, think=True)
            parts = list(answer) if streams else [answer]
            calls = [call for part in parts for call in part.message.tool_calls or ()]
            text = "".join(part.message.content for part in parts)
            thought = "".join(part.message.thinking or "" for part in parts)
            said = {"role": "assistant", "content": text, "thinking": thought}
            messages.append({**said, "tool_calls": calls})
            if not calls:
                break
            for call in calls:
                result = weather(**call.function.arguments)
                name_of_tool = call.function.name
                messages.append({"role": "tool", "tool_name": name_of_tool, "content": result})
    return text


def with_autogen(url: str) -> str:
    """An assistant with a tool, which names itself and its user."""
    from autogen_agentchat.agents import AssistantAgent
    from autogen_agentchat.messages import TextMessage
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    async def talk() -> str:
        info = {
            "vision": False,
            "function_calling": True,
            "json_output": True,
            "family": "unknown",
            "structured_output": True,
        }
        client = OpenAIChatCompletionClient(
            model=MODEL, base_url=f"{url}/v1", api_key="dummy", model_info=info
        )
        agent = AssistantAgent(
            "assistant", client, tools=[weather], max_tool_iterations=4, reflect_on_tool_use=False
        )
        for question in QUESTIONS:
            result = await agent.run(task=[TextMessage(content=question, source="user")])
        await client.close()
        return result.messages[-1].content

    return asyncio.run(talk())


def with_langchain(url: str) -> str:
    """Messages and tools of LangChain, over chats."""
    return _langchain(url)


def with_langchain_responses(url: str) -> str:
    """The same over responses, whose items LangChain sends again."""
    return _langchain(url, use_responses_api=True, reasoning={"effort": "low", "summary": "auto"})


def with_langchain_ollama(url: str) -> str:
    """The same over Ollama's API."""
    return _langchain(url, over_ollama=True)


def _langchain(url: str, over_ollama: bool = False, **options) -> str:
    from langchain_core.messages import HumanMessage, SystemMessage
    from langchain_core.tools import tool
    from langchain_ollama import ChatOllama
    from langchain_openai import ChatOpenAI

    if over_ollama:
        chat = ChatOllama(model=MODEL, base_url=url, validate_model_on_init=True, num_ctx=4096)
    else:
        chat = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="dummy", **options)
    chat = chat.bind_tools([tool(weather)])
    messages = [SystemMessage("You know the weather.")]
    for question in QUESTIONS:
        messages.append(HumanMessage(question, name="Ann"))
        while True:
            answer = chat.invoke(messages)
            messages.append(answer)
            if not answer.tool_calls:
                break
            messages += [tool(weather).invoke(call) for call in answer.tool_calls]
        messages.append(SystemMessage("Be brief."))  # after other messages
    return answer.text if isinstance(answer.text, str) else answer.text()


def with_openai_agents(url: str) -> str:
    """OpenAI's agents over chats."""
    from agents import OpenAIChatCompletionsModel

    return _agents(url, OpenAIChatCompletionsModel)


def with_openai_agents_responses(url: str) -> str:
    """The same over responses."""
    from agents import OpenAIResponsesModel

    return _agents(url, OpenAIResponsesModel)


def _agents(url: str, kind) -> str:
    from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI
    from openai.types.shared import Reasoning

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="dummy")
    agent = Agent(
        name="assistant",
        instructions="You know the weather.",
        tools=[function_tool(weather)],
        model=kind(model=MODEL, openai_client=client),
        model_settings=ModelSettings(
            verbosity="low",
            truncation="auto",
            store=True,
            metadata={"a": "b"},
            reasoning=Reasoning(effort="low"),
        ),
    )
    items = []
    for question in QUESTIONS:
        result = Runner.run_sync(agent, [*items, {"role": "user", "content": question}])
        items = result.to_input_list()
    return result.final_output


def with_instructor(url: str) -> str:
    """A typed answer, with a retry because the first one is wrong."""
    import instructor
    from openai import OpenAI
    from pydantic import BaseModel, field_validator

    class Weather(BaseModel):
        city: str

        @field_validator("city")
        @classmethod
        def is_lima(cls, city: str) -> str:
            weather(city)
            if city != "Lima":
                raise ValueError("the city is Lima")
            return city

    client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="dummy"))
    answer = client.create(
        model=MODEL,
        response_model=Weather,
        messages=[{"role": "user", "content": QUESTIONS[1]}],
        max_retries=3,
    )
    return answer.city


def with_smolagents(url: str) -> str:
    """An agent whose answers are calls, too, of its tool `final_answer`."""
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    def find(city: str) -> str:
        """The weather of a city.

        Args:
            city: its name
        """
        return weather(city)

    find.__name__ = "weather"
    model = OpenAIModel(model_id=MODEL, api_base=f"{url}/v1", api_key="dummy")
    agent = ToolCallingAgent(tools=[tool(find)], model=model, verbosity_level=0)
    return [agent.run(question, reset=not i) for i, question in enumerate(QUESTIONS)][-1]


def with_llm(url: str) -> str:
    """The command `llm`, with a function, and once more in the same conversation."""
    return _llm(url, MODEL)


def with_llm_ollama(url: str) -> str:
    """The same over Ollama's API, with its plugin, which finds the model by itself."""
    os.environ["OLLAMA_HOST"] = url
    return _llm(url, f"ollama/{MODEL}")


def _llm(url: str, model: str) -> str:
    folder = Path(os.environ["HOME"])
    settings = {
        "model_id": MODEL,
        "model_name": MODEL,
        "api_base": f"{url}/v1",
        "supports_tools": True,
        "api_key_name": "dummy",
    }
    (folder / "extra-openai-models.yaml").write_text(json.dumps([settings]))
    code = f"""
def weather(city: str) -> str:
    "The weather of a city."
    with open({str(folder / "asked")!r}, "a") as file:
        print(city, file=file)
    return city + " is warm"
"""
    environment = {**os.environ, "LLM_USER_PATH": str(folder)}
    llm = [
        sys.executable,
        "-m",
        "llm",
        "prompt",
        "-m",
        model,
        "--key",
        "dummy",
        "--functions",
        code,
    ]
    for question, more in zip(QUESTIONS, ([], ["-c"]), strict=True):
        reported = subprocess.run(
            [*llm, *more, question], env=environment, text=True, capture_output=True, check=False
        )
        assert reported.returncode == 0, reported.stderr
    ASKED.extend((folder / "asked").read_text().split())
    return reported.stdout.strip()


# -- embeddings

DOCUMENTS = ["a cat", "Tax law of 1998", "a kitten " * 20]


def with_langchain_embeddings(url: str) -> list[list[float]]:
    """Documents and a query; without the check, which would send ids of OpenAI's own tokens."""
    from langchain_openai import OpenAIEmbeddings

    options = {"base_url": f"{url}/v1", "api_key": "dummy", "check_embedding_ctx_length": False}
    client = OpenAIEmbeddings(model=EMBEDDER, dimensions=32, **options)
    return [*client.embed_documents(DOCUMENTS), client.embed_query(DOCUMENTS[0])]


def with_llama_index_embeddings(url: str) -> list[list[float]]:
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    options = {"api_base": f"{url}/v1", "api_key": "dummy", "dimensions": 32}
    client = OpenAILikeEmbedding(model_name=EMBEDDER, **options)
    return [
        *client.get_text_embedding_batch(DOCUMENTS),
        client.get_query_embedding(DOCUMENTS[0]),
    ]


def with_langchain_ollama_embeddings(url: str) -> list[list[float]]:
    from langchain_ollama import OllamaEmbeddings

    client = OllamaEmbeddings(model=EMBEDDER, base_url=url, dimensions=32)
    return [*client.embed_documents(DOCUMENTS), client.embed_query(DOCUMENTS[0])]


if __name__ == "__main__":
    name, url = sys.argv[1:]
    found = globals()[f"with_{name}"](url)
    said = found.strip() if isinstance(found, str) else found
    print(json.dumps({"said": said, "asked": ASKED}))
