"""Python's clients: `python asks.py openai` prints as JSON what that one made of its answers."""

import asyncio
import json
import sys
from typing import Any, Literal

from pydantic import BaseModel

QUESTION = "Who is Hugo?"
SAID: Any = [{"role": "user", "content": QUESTION}]
ASKED: Any = {"model": "demo", "temperature": 0, "max_tokens": 100}
RESPONSE: Any = {"model": "demo", "temperature": 0, "max_output_tokens": 100, "input": SAID}
ONCE: Any = {"tool_choice": "required", "parallel_tool_calls": False}


class Person(BaseModel):
    who: Literal["Hugo"]


def look_up(who: Literal["Hugo"]) -> str:
    """Look somebody up."""
    return f"{who} is a hedgehog"


FUNCTION = {"name": "look_up", "parameters": Person.model_json_schema()}


def openai() -> dict[str, object]:
    from openai import OpenAI, pydantic_function_tool

    client, tools = OpenAI(max_retries=0), [pydantic_function_tool(Person, name="look_up")]
    chats, responses, asked = client.chat.completions, client.responses, {**ASKED, "messages": SAID}
    whole = chats.create(**asked)
    with chats.stream(**asked, stream_options={"include_usage": True}) as stream:
        streamed = stream.get_final_completion()
    said = chats.parse(**asked, tools=tools, **ONCE).choices[0].message
    (call,) = said.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "A hedgehog"}
    chats.create(**asked | {"messages": [*SAID, said, result]}, tools=tools)
    with responses.stream(**RESPONSE) as events:
        kinds = [event.type for event in events]
        final = events.get_final_response()
    flat = [{"type": "function", **tools[0]["function"]}]
    with responses.stream(**RESPONSE, tools=flat, **ONCE) as events:
        (use,) = events.get_final_response().output
    output = {"type": "function_call_output", "call_id": use.call_id, "output": "A hedgehog"}
    responses.create(**RESPONSE | {"input": [*SAID, use, output]})
    texts = {each.choices[0].message.content for each in (whole, streamed)} | {final.output_text}
    found = chats.parse(**asked, response_format=Person).choices[0].message.parsed
    same = found == responses.parse(**RESPONSE, text_format=Person).output_parsed
    return {
        "streamed": texts == {responses.create(**RESPONSE).output_text} != {""},
        "usage": streamed.usage == whole.usage and final.usage.output_tokens > 0,
        "found": repr(found) if same else None,
        "called": [call.function.name, use.parsed_arguments],
        "ends": [kinds[0], kinds[-1]],
    }


def anthropic() -> dict[str, object]:
    from anthropic import Anthropic

    messages = Anthropic(max_retries=0).messages
    asked: Any = {"model": "demo", "messages": SAID, "system": "Be brief."}
    whole = messages.create(**asked, max_tokens=100)
    with messages.stream(**asked, max_tokens=100) as stream:
        text = "".join(stream.text_stream)
    counted = messages.count_tokens(**asked).input_tokens
    asked["tools"] = [{"name": "look_up", "input_schema": FUNCTION["parameters"]}]
    once: Any = {"type": "any", "disable_parallel_tool_use": True}
    with messages.stream(**asked, max_tokens=100, tool_choice=once) as stream:
        (call,) = stream.get_final_message().content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "A hedgehog"}
    turns = [*SAID, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    messages.create(**asked | {"messages": turns}, max_tokens=9)
    return {
        "streamed": [each.type for each in whole.content] == ["text"] and text != "",
        "usage": counted == whole.usage.input_tokens + whole.usage.cache_read_input_tokens,
        "called": [call.name, call.input],
    }


def litellm() -> dict[str, object]:
    import litellm

    asked: Any = {**ASKED, "model": "openai/demo", "max_retries": 0, "messages": SAID}
    whole = litellm.completion(**asked)
    joined = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)))
    asked["tools"] = [{"type": "function", "function": FUNCTION}]
    (call,) = litellm.completion(**asked, **ONCE).choices[0].message.tool_calls
    again = {**RESPONSE, "model": "openai/demo", "max_retries": 0}
    response = litellm.responses(**again)
    events = [each.type for each in litellm.responses(**again, stream=True)]
    text = response.output[0].content[0].text
    return {
        "streamed": joined.choices[0].message.content == text != "",
        "usage": response.usage.output_tokens == whole.usage.completion_tokens,
        "called": [call.function.name, json.loads(call.function.arguments)],
        "ends": [events[0], events[-1]],
    }


def instructor() -> dict[str, object]:
    import instructor
    from openai import OpenAI

    client = instructor.from_openai(OpenAI(max_retries=0))
    asked: Any = {"model": "demo", "messages": SAID, "response_model": Person, "max_retries": 0}
    *_, last = client.create_partial(**asked)
    return {"found": repr(client.create(**asked)), "streamed": last.model_dump() == {"who": "Hugo"}}


def langchain(by: str = "") -> dict[str, object]:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    model, tools = ChatOpenAI(**ASKED, use_responses_api=by == "responses"), [tool(look_up)]
    whole = model.invoke(QUESTION)
    called = model.bind_tools(tools, **ONCE).invoke(QUESTION)
    (call,) = called.tool_calls
    model.bind_tools(tools).invoke([("user", QUESTION), called, tools[0].invoke(call)])
    return {
        "streamed": "".join(each.text for each in model.stream(QUESTION)) == whole.text != "",
        "usage": whole.usage_metadata["output_tokens"] > 0,
        "found": repr(model.with_structured_output(Person).invoke(QUESTION)),
        "called": [call["name"], call["args"]],
    }


def pydantic_ai(by: str = "Chat") -> dict[str, object]:
    from pydantic_ai import Agent, NativeOutput, RunContext, ToolDefinition
    from pydantic_ai.capabilities import PrepareOutputTools, PrepareTools
    from pydantic_ai.models import openai

    model, calls = getattr(openai, f"OpenAI{by.capitalize()}Model")("demo"), []

    def called(who: Literal["Hugo"]) -> str:
        calls.extend(["look_up", {"who": who}])
        return look_up(who)

    async def offered(_: RunContext, tools: list[ToolDefinition]) -> list[ToolDefinition]:
        return [tool for tool in tools if (tool.name == "called") is not bool(calls)]

    async def run() -> dict[str, object]:
        more: Any = {"capabilities": [PrepareTools(offered), PrepareOutputTools(offered)]}
        agent = Agent(model, output_type=Person, tools=[called], **more)
        once: Any = {"parallel_tool_calls": False}
        async with agent.run_stream(QUESTION, model_settings=once) as stream:
            found = repr(await stream.get_output())
        native = await Agent(model, output_type=NativeOutput(Person)).run(QUESTION)
        streamed, usage = found == repr(native.output), native.usage.output_tokens > 0
        return {"streamed": streamed, "usage": usage, "found": found, "called": calls}

    return asyncio.run(run())


print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
