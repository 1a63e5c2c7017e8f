"""Rows of the token cache, one per tokenized record; the file is memory-mapped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import pyarrow as pa

from paradraft.data.samples import Sample
from paradraft.data.tokens.tokenized import Tokenized

TYPES = {"tokens": "large_binary", "is_label": "large_binary", "record": "large_string"}
"""Columns: the concatenated tokens and labels of a record's samples; lengths, group and counts as JSON."""


def row_of(record: Tokenized) -> dict[str, Any]:
    """Makes the row of a record."""
    samples = record.samples
    facts = {
        **vars(record),
        "samples": [len(sample.tokens) for sample in samples],
        "group": samples[0].group if samples else 0,
    }
    return {
        "tokens": b"".join(bytes(memoryview(sample.tokens)) for sample in samples),  # type: ignore[arg-type]
        "is_label": b"".join(bytes(memoryview(sample.is_label)) for sample in samples),  # type: ignore[arg-type]
        "record": json.dumps(facts),
    }


def _memory(column: pa.LargeBinaryArray) -> Any:
    """View of the concatenated bytes, without a copy."""
    return memoryview(column.buffers()[2] or b"").cast("b")


def records_of(table: pa.Table) -> Iterator[Tokenized]:
    """Yields the records of a table; their tokens are views of the table."""
    for batch in table.to_batches():
        tokens, labels = _memory(batch.column("tokens")).cast("i"), _memory(batch.column("is_label"))
        stop = 0
        for text in batch.column("record"):
            facts = json.loads(text.as_py())
            group, stops = facts.pop("group"), list(accumulate(facts["samples"], initial=stop))
            stop = stops[-1]
            facts["samples"] = [
                Sample(tokens=tokens[start:end], is_label=labels[start:end], group=group)
                for start, end in pairwise(stops)
            ]
            yield Tokenized(**facts)
