"""JSON schemas against a running server: how many of its seeded texts are valid.

    gguf-fusion serve &
    python bench/json_schemas.py [--url http://127.0.0.1:8080/v1] [--trials 20] > bench/results/json_schemas.jsonl

One line per schema; texts that are not valid are told on stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import jsonschema
from openai import OpenAI
from origin import ORIGIN

_WORD = {"type": "string", "maxLength": 12}


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False
    }  # fmt: skip


SCHEMAS: dict[str, dict[str, Any]] = {
    "a person": _object(name=_WORD, age={"type": "integer", "minimum": 0, "maximum": 120}),
    "a colour": {"enum": ["red", "grün", "蓝", "🎉"]},
    "two numbers": {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 99},
        "minItems": 2,
        "maxItems": 2,
    },
    "a yes or no": _object(answer={"type": "boolean"}),
    "a part number": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    "a date": {"type": "string", "format": "date"},
    "a point": _object(x={"type": "number", "minimum": -9, "maximum": 9}, y={"type": ["integer", "null"]}),
    "a city with its country": _object(city=_WORD, country=_object(name=_WORD, code={"enum": ["DE", "FR", "CN"]})),
    "a word or a number": {"anyOf": [_WORD, {"type": "integer", "minimum": 1, "maximum": 9}]},
    "a list of tags": _object(tags={"type": "array", "items": _WORD, "minItems": 1, "maxItems": 3}),
}


def complaint(text: str, schema: dict[str, Any]) -> str | None:
    """What is wrong with a text; None where it is valid."""
    try:
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080/v1")
    parser.add_argument("--trials", type=int, default=20, help="seeds per schema")
    options = parser.parse_args()
    client = OpenAI(base_url=options.url, api_key="none", timeout=600)
    model = next(iter(client.models.list())).id
    for name, schema in SCHEMAS.items():
        began = time.monotonic()
        texts: list[str] = []
        n_valid = 0
        for seed in range(options.trials):
            answer = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": f"Give {name} as JSON."}],
                seed=seed,
                max_tokens=200,
                response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            )
            texts.append(answer.choices[0].message.content or "")
            wrong = complaint(texts[-1], schema)
            n_valid += wrong is None
            if wrong is not None:
                print(
                    f"seed {seed}, {name}: {texts[-1]!r} ({answer.choices[0].finish_reason}): {wrong}", file=sys.stderr
                )
        record = {
            "schema": name, "ensemble": model, "n": len(texts), "valid": n_valid, "different": len(set(texts)),
            "bytes": sum(len(text.encode()) for text in texts), "seconds": round(time.monotonic() - began, 1),
            **ORIGIN,
        }  # fmt: skip
        print(json.dumps(record, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
