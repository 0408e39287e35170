"""What documents and published schemas say."""

import json
import re
from typing import Any

import jsonschema
from fresh_process import ROOT

PRIVATE_TRAINING = "how-to/private-training.md"
TRAINERS = "how-to/trainers.md"
CORRELATED = "how-to/correlated-noise.md"
FULL_SPEED = "how-to/full-speed.md"


def find_all_code(page: str) -> list[str]:
    """Return the Python code in a page of ``docs``, block by block."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def find_code(page: str, word: str) -> str:
    """Return the first Python code in a page of ``docs`` that has a word."""
    return next(block for block in find_all_code(page) if word in block)


def validate(document: Any, name: str) -> None:
    """Refuse a document that does not fit the published schema of its name."""
    path = ROOT / "workflow" / "schemas" / f"{name}.schema.json"
    jsonschema.validate(document, json.loads(path.read_text()))
