"""What SARIF 2.1.0 and GitHub's code scanning ask of a log, as a JSON schema: the parts that the project writes."""

from __future__ import annotations

from typing import Any

import jsonschema

_TEXT: dict[str, Any] = {
    "type": "object",
    "required": ["text"],
    "properties": {"text": {"type": "string", "minLength": 1}},
}
_LEVEL = {"enum": ["none", "note", "warning", "error"]}


def _closed(required: str, **properties: object) -> dict[str, Any]:
    """An object with these properties and no others."""
    return {"type": "object", "required": required.split(), "additionalProperties": False, "properties": properties}


def _some(items: object, least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least}


_ARTIFACT = _closed(
    "uri",
    uri={"type": "string", "pattern": r"^(?!/)[^\s\\]+$"},
    uriBaseId={"const": "%SRCROOT%"},
)
_PHYSICAL = _closed(
    "artifactLocation region",
    artifactLocation=_ARTIFACT,
    region=_closed("startLine", startLine={"type": "integer", "minimum": 1}),
)
_LOGICAL = _closed("fullyQualifiedName", fullyQualifiedName={"type": "string"}, kind={"const": "function"})
_RESULT = _closed(
    "ruleId ruleIndex level message locations partialFingerprints",
    ruleId={"type": "string"},
    ruleIndex={"type": "integer", "minimum": 0},
    level=_LEVEL,
    message=_TEXT,
    locations=_some(_closed("physicalLocation", physicalLocation=_PHYSICAL, logicalLocations=_some(_LOGICAL)), 1),
    partialFingerprints={"type": "object", "additionalProperties": {"type": "string"}, "minProperties": 1},
    occurrenceCount={"type": "integer", "minimum": 1},
    suppressions=_some(_closed("kind", kind={"enum": ["inSource", "external"]}, justification={"type": "string"})),
)
_RULE = _closed(
    "id", id={"type": "string"}, shortDescription=_TEXT, defaultConfiguration=_closed("level", level=_LEVEL)
)
_DRIVER = _closed("name rules", name={"type": "string"}, semanticVersion={"type": "string"}, rules=_some(_RULE, 1))
_INVOCATION = _closed(
    "executionSuccessful",
    executionSuccessful={"type": "boolean"},
    startTimeUtc={"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"},
    toolExecutionNotifications=_some(_closed("message", level=_LEVEL, message=_TEXT), 1),
)
_RUN = _closed(
    "tool results",
    tool=_closed("driver", driver=_DRIVER),
    originalUriBaseIds={"type": "object", "additionalProperties": {"type": "object"}},
    invocations=_some(_INVOCATION, 1),
    columnKind={"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
    results=_some(_RESULT),
)
LOG = _closed(
    "version runs",
    version={"const": "2.1.0"},
    runs=_some(_RUN, 1),
    **{"$schema": {"type": "string", "pattern": "sarif-schema-2.1.0.json$"}},
)


def check(log: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of a log; an error where it is not as SARIF asks, or an index names another rule."""
    jsonschema.validate(log, LOG)
    (run,) = log["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert len(set(rules)) == len(rules)
    assert all(rules[result["ruleIndex"]] == result["ruleId"] for result in run["results"])
    return list(run["results"])
