"""Seeded random JSON schemas, answered at temperature 1: every answer must be valid.

usage: structured_client.py BASE_URL [SCHEMAS]
"""

import asyncio
import json
import sys

import jsonschema
import openai
from schemas import numbered

SCHEMAS = int(sys.argv[2]) if len(sys.argv) > 2 else 200
AT_ONCE = 8

client = openai.AsyncOpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)


def body(number, given):
    """The schema under each of its names, half of them with a pattern for blanks."""
    blanks = " ?"
    forms = [
        {"structured_outputs": {"json": given, "whitespace_pattern": blanks}},
        {"guided_json": given, "guided_whitespace_pattern": blanks},
        {"guided_json": json.dumps(given)},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": given}}},
    ]
    return forms[number % len(forms)]


async def check(model, number, turns):
    given = numbered(number)
    async with turns:
        answer = await client.completions.create(
            model=model,
            prompt=[1 + number % 100, 7, 9],
            temperature=1,
            seed=number,
            max_tokens=500,
            extra_body=body(number, given),
        )
    choice = answer.choices[0]
    where = f"schema {number}: {json.dumps(given)}: {choice.text!r}"
    assert choice.finish_reason == "stop", f"{where} ended by {choice.finish_reason}"
    try:
        value = json.loads(choice.text)
        checker = jsonschema.FormatChecker()
        jsonschema.Draft202012Validator(given, format_checker=checker).validate(value)
    except (ValueError, jsonschema.ValidationError) as error:
        raise AssertionError(f"{where}: {error}") from error
    return answer.usage.completion_tokens


async def main():
    model = (await client.models.list()).data[0].id
    turns = asyncio.Semaphore(AT_ONCE)
    counts = await asyncio.gather(*(check(model, number, turns) for number in range(SCHEMAS)))
    print(f"structured client: {len(counts)} answers valid, {sum(counts)} tokens")


asyncio.run(main())
