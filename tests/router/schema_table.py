"""How many JSON schemas are served: those of the tests, and of files.

python -m tests.router.schema_table FILE.json ...
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jsonschema.validators import validator_for

from router.text.grammar import GrammarError
from tests.router.test_schemas import SERVED, matcher, said


def schemas(files: list[Path]) -> Iterator[tuple[str, Any]]:
    """Where each comes from, and itself."""
    yield from (("zod's and others' shapes", schema) for schema, _, _ in SERVED)
    yield from (("files", json.loads(file.read_text())) for file in files)


def outcome(schema: Any) -> str:
    try:
        answers = [said(matcher(schema), random.Random(seed)) for seed in range(3)]
    except GrammarError as error:
        why = re.sub(r"^#\S*: |(['\"/])\S*\1|\d+ ?", "", str(error))
        return f"refused: {why[:60].partition(';')[0]}"
    except AssertionError:
        return "refused at run time, or no end"
    valid = all(validator_for(schema)(schema).is_valid(json.loads(each)) for each in answers)
    return "served" if valid else "served, and an answer did not fit"


if __name__ == "__main__":
    counts: dict[str, Counter[str]] = {}
    for source, schema in schemas([Path(each) for each in sys.argv[1:]]):
        counts.setdefault(source, Counter())[outcome(schema)] += 1
    total = sum(counts.values(), Counter[str]())
    print(
        f"| {total.total()} schemas | {' | '.join(counts)} | all |\n{'| --- ' * (len(counts) + 2)}|"
    )
    for name, number in total.most_common():
        print(f"| {name} | {' | '.join(str(each[name]) for each in counts.values())} | {number} |")
