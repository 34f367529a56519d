"""JSON schemas that take any time, memory or depth, and large ones that do not."""


def _chain(length, link):
    """Definitions that refer to one another."""
    defs = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return {"$defs": defs | {f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def _array(items):
    return {"type": "array", "items": items}


def _nested(levels):
    schema = {"type": "string"}
    for _ in range(levels):
        schema = {"anyOf": [schema]}
    return schema


def _backwards(schema):
    """The last definition first: what it refers to has been seen when it comes."""
    return schema | {"$defs": dict(reversed(schema["$defs"].items()))}


# 1.4 KB: an automaton for all of these patterns at once
PATTERNS = {"allOf": [{"type": "string", "pattern": f".*[ab].{{{i}}}"} for i in range(30)]}
# too many expressions, once a text begins
LATER = {
    "type": "array",
    "prefixItems": [
        {"anyOf": [{"type": "string", "pattern": f"^[a-z]{{3,{i + 5}}}.*[xyz]{{2,9}}.*k{i}"} for i in range(800)]}
    ],
    "minItems": 1,
}
REFUSED = {
    "a chain of 3,000 references": (_chain(3_000, lambda ref: ref), "more than 1,000 definitions"),
    "a chain of 900 references": (_chain(900, lambda ref: ref), "more than 500 levels, references included"),
    "the same backwards": (_backwards(_chain(900, lambda ref: ref)), "more than 500 levels|does not exist"),
    "900 nested arrays": (_chain(900, _array), "more than 500 levels, references included"),
    "itself": ({"$ref": "#"}, "refers to itself, and says nothing else"),
    "300 nested alternatives": (_nested(300), "more than 500 levels"),
    "100 nested alternatives": (_nested(100), "recursion limit exceeded"),
    "a long text": ({"const": "a" * 600_000}, "more than 262,144 characters"),
    "many values": ({"enum": list(range(60_000))}, "more than (50,000 values|262,144 characters)"),
    "many patterns at once": (PATTERNS, "took more than 2 s or 256 MiB"),
    "many objects at once": (
        {"allOf": [{"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(3)]} for i in range(12)]},
        "too large|took more than",
    ),
    "a reference to another machine": ({"$ref": "http://127.0.0.1:9/x"}, "does not fetch"),
    "a type that is none": ({"type": "robot"}, "robot"),
}
TAKEN = {
    "a tree": {
        "type": "object",
        "properties": {"children": {"type": "array", "items": {"$ref": "#"}}},
        "additionalProperties": False,
    },
    "a chain of 200 references": _chain(200, lambda ref: ref),
    "100 nested arrays": _chain(100, _array),
    "60 nested alternatives": _nested(60),
    "many values": {"enum": [f"value {i}" for i in range(5_000)]},
    "many properties": {
        "type": "object",
        "properties": {f"p{i}": {"type": "string"} for i in range(400)},
        "required": [f"p{i}" for i in range(400)],
    },
}
