"""Rows of the token cache, one per tokenized record; the file is memory-mapped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import pyarrow as pa

from paradraft.data.samples import Sample
from paradraft.data.tokens.tokenized import Tokenized

ARRAYS = ("tokens", "is_label", "rounds")
TYPES = dict.fromkeys(ARRAYS, "large_binary") | {"record": "large_string"}
"""Columns: the concatenated tokens, labels and rounds of a record's samples; lengths, group and counts as JSON."""


def row_of(record: Tokenized) -> dict[str, Any]:
    """Makes the row of a record."""
    samples = record.samples
    facts = {
        **vars(record),
        "samples": [len(sample.tokens) for sample in samples],
        "has_rounds": any(sample.rounds for sample in samples),
        "group": samples[0].group if samples else 0,
    }
    arrays = {name: b"".join(bytes(memoryview(getattr(sample, name))) for sample in samples) for name in ARRAYS}
    return arrays | {"record": json.dumps(facts)}


def _memory(column: pa.LargeBinaryArray) -> Any:
    """View of the concatenated bytes, without a copy."""
    return memoryview(column.buffers()[2] or b"").cast("b")


def records_of(table: pa.Table) -> Iterator[Tokenized]:
    """Yields the records of a table; their tokens are views of the table."""
    for batch in table.to_batches():
        tokens, labels, rounds = (_memory(batch.column(name)) for name in ARRAYS)
        tokens = tokens.cast("i")
        stop, read = 0, 0
        for text in batch.column("record"):
            facts = json.loads(text.as_py())
            group, stops = facts.pop("group"), list(accumulate(facts["samples"], initial=stop))
            own = rounds[read:][: (stops[-1] - stop) * facts.pop("has_rounds")]
            facts["samples"] = [
                Sample(
                    tokens=tokens[start:end],
                    is_label=labels[start:end],
                    group=group,
                    rounds=own[start - stop : end - stop],
                )
                for start, end in pairwise(stops)
            ]
            stop, read = stops[-1], read + len(own)
            yield Tokenized(**facts)
