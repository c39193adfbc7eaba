"""Seeded random JSON schemas, answered at temperature 1: every answer must be valid.

usage: structured_client.py BASE_URL [SCHEMAS]
"""

import asyncio
import json
import random
import sys

import jsonschema
import openai

SCHEMAS = int(sys.argv[2]) if len(sys.argv) > 2 else 200
AT_ONCE = 8

client = openai.AsyncOpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)


def scalar(rng):
    """A schema of a bounded scalar."""
    low = rng.randint(-50, 50)
    return rng.choice(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)},
            {"type": "integer", "exclusiveMinimum": low, "maximum": low + 7},
            {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": rng.randint(2, 9)},
            {"type": "number", "minimum": low, "maximum": low + 2.5},
            {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 8)},
            {"type": "string", "pattern": rng.choice(["^[a-c]{2,4}$", r"^\d{3}-\d{2}$", "^(ab|cd)?x$"])},
            {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])},
            {"enum": rng.sample([1, 2.5, None, True, "é", "a b", "\n", [1], {"k": "v"}], 3)},
            {"const": rng.choice(["fixed", 7, [1, 2]])},
            {"type": ["integer", "null"], "minimum": 1, "maximum": 9},
        ]
    )


def schema(rng, depth):
    """A schema whose answers fit into a few hundred tokens."""
    kinds = ["scalar"] if depth == 0 else ["object", "object", "array", "anyOf", "oneOf", "allOf", "tuple"]
    kind = rng.choice(kinds)
    if kind == "scalar":
        return scalar(rng)
    if kind == "object":
        names = rng.sample(["id", "name", "tags", "größe", "a b", "x\"y"], rng.randint(1, 3))
        return {
            "type": "object",
            "properties": {name: schema(rng, depth - 1) for name in names},
            "required": rng.sample(names, rng.randint(0, len(names))),
            "additionalProperties": False,
        }
    if kind == "array":
        least = rng.randint(0, 2)
        return {"type": "array", "items": schema(rng, depth - 1), "minItems": least, "maxItems": least + 1}
    if kind == "tuple":
        parts = [schema(rng, depth - 1) for _ in range(2)]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": 2, "maxItems": 2}
    if kind == "anyOf":
        return {"anyOf": [schema(rng, depth - 1) for _ in range(2)]}
    if kind == "oneOf":
        def tagged(tag):
            properties = {"kind": {"const": tag}, "value": scalar(rng)}
            return {
                "type": "object",
                "properties": properties,
                "required": ["kind", "value"],
                "additionalProperties": False,
            }

        return {"oneOf": [tagged("one"), tagged("two")]}
    return {"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": rng.randint(3, 40)}]}


def with_references(rng):
    """A list linked through $ref."""
    node = {
        "type": "object",
        "properties": {
            "value": scalar(rng),
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
        },
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def body(number, given):
    """The schema under each of its names; blanks between parts are few, to save tokens."""
    blanks = " ?"
    forms = [
        {"structured_outputs": {"json": given, "whitespace_pattern": blanks}},
        {"guided_json": given, "guided_whitespace_pattern": blanks},
        {"guided_json": json.dumps(given), "guided_whitespace_pattern": blanks},
        {
            "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": given}},
            "guided_whitespace_pattern": blanks,
        },
    ]
    return forms[number % len(forms)]


async def check(model, number, turns):
    rng = random.Random(number)
    given = with_references(rng) if number % 10 == 9 else schema(rng, rng.randint(0, 2))
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
