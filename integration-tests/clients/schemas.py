"""Seeded random JSON schemas, whose answers fit into a few hundred tokens."""

import random


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


def numbered(number):
    """The schema of this number, always the same."""
    rng = random.Random(number)
    return with_references(rng) if number % 10 == 9 else schema(rng, rng.randint(0, 2))
