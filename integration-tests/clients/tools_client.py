"""The `openai` package with tools and pydantic models: sync, async, streamed.

usage: tools_client.py BASE_URL
"""

import asyncio
import enum
import json
import sys
import typing

import openai
import pydantic

URL = sys.argv[1]
client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
model = client.models.list().data[0].id
question = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]
tools = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 20},
                    "unit": {"enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "parameters": {
                "type": "object",
                "properties": {"zone": {"type": "string", "maxLength": 12}},
                "required": ["zone"],
                "additionalProperties": False,
            },
        },
    },
]
named = {"type": "function", "function": {"name": "get_weather"}}


def check_weather(call):
    assert call.type == "function" and call.id, call
    assert call.function.name == "get_weather", call
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"city", "unit"}, arguments
    assert arguments["unit"] in ("celsius", "fahrenheit"), arguments


# A call that has to come, of one function and of any.
for choice in (named, "required"):
    answer = client.chat.completions.create(
        model=model, messages=question, tools=tools, tool_choice=choice, temperature=0, max_tokens=200,
        parallel_tool_calls=False,
    ).choices[0]
    assert answer.finish_reason == "tool_calls", answer
    assert answer.message.content is None and len(answer.message.tool_calls) == 1, answer
    if choice == named:
        check_weather(answer.message.tool_calls[0])
        weather = answer.message

# The call and its result go back through the template.
messages = question + [
    weather.model_dump(exclude_none=True),
    {"role": "tool", "tool_call_id": weather.tool_calls[0].id, "content": "17 degrees, sunny"},
]
told = client.chat.completions.create(
    model=model, messages=messages, tools=tools, tool_choice="none", temperature=0, max_tokens=30
).choices[0]
assert told.message.tool_calls is None and told.message.content, told

# Nothing has to be called.
free = client.chat.completions.create(
    model=model, messages=question, tools=tools, temperature=0, max_tokens=30
).choices[0]
assert free.finish_reason in ("stop", "length", "tool_calls"), free

# The same call in pieces; the package's own helper puts them together.
with client.chat.completions.stream(
    model=model, messages=question, tools=tools, tool_choice=named, temperature=0, max_tokens=200
) as stream:
    kinds = {event.type for event in stream}
    whole = stream.get_final_completion().choices[0]
assert "tool_calls.function.arguments.delta" in kinds, kinds
assert whole.finish_reason == "tool_calls", whole
check_weather(whole.message.tool_calls[0])
assert whole.message.tool_calls[0].function.arguments == weather.tool_calls[0].function.arguments


class Size(enum.Enum):
    small = "small"
    large = "large"


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    size: Size
    population_millions: int = pydantic.Field(ge=0, le=50)
    sights: list[typing.Annotated[str, pydantic.Field(max_length=20)]] = pydantic.Field(max_length=2)


# A small model left to itself fills the room between the parts with blanks.
tight = {"guided_whitespace_pattern": " ?"}
describe = [{"role": "user", "content": "Describe Paris."}]
parsed = client.chat.completions.parse(
    model=model, messages=describe, response_format=City, temperature=0, max_tokens=400,
    extra_body=tight,
).choices[0].message.parsed
assert isinstance(parsed, City), parsed

with client.chat.completions.stream(
    model=model, messages=describe, response_format=City, temperature=0, max_tokens=400,
    extra_body=tight,
) as stream:
    for _ in stream:
        pass
    again = stream.get_final_completion().choices[0].message.parsed
assert again == parsed, (again, parsed)


async def at_once():
    many = openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)

    async def one(seed):
        answer = await many.chat.completions.create(
            model=model, messages=question, tools=tools, tool_choice=named, temperature=1, seed=seed,
            max_tokens=300,
        )
        check_weather(answer.choices[0].message.tool_calls[0])
        city = await many.chat.completions.parse(
            model=model, messages=describe, response_format=City, temperature=1, seed=seed, max_tokens=400,
            extra_body=tight,
        )
        assert isinstance(city.choices[0].message.parsed, City)

    await asyncio.gather(*(one(seed) for seed in range(6)))


asyncio.run(at_once())

try:
    client.chat.completions.create(model=model, messages=question, tool_choice="required")
except openai.BadRequestError as error:
    assert "tool_choice" in str(error), error
else:
    raise AssertionError("tool_choice without tools was taken")

print("tools client: all good")
