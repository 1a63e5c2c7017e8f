"""Arrow table of tokenized records, one row per record; its files are memory-mapped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import pyarrow as pa

from paradraft.data.samples import Sample
from paradraft.data.tokens.tokenized import Tokenized

FLAGS = ("is_talk", "is_unlabelled")
COUNTS = ("wholes", "labels", "truncated", "lost", "empty", "headless")
SCHEMA = pa.schema(
    [
        ("place", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("is_label", pa.list_(pa.int8())),
        ("lengths", pa.list_(pa.int32())),
        ("group", pa.int64()),
        *((name, pa.bool_()) for name in FLAGS),
        *((name, pa.int64()) for name in COUNTS),
        ("error", pa.string()),
    ]
)
"""A row holds the concatenated tokens of a record's samples, and the length of each sample; or, instead, the error
message of a broken record."""


def table_of(records: list[Tokenized], error: str | None = None) -> pa.Table:
    """Makes the table of some records, with the error of the next record as the last row."""
    tokens = [b"".join(bytes(memoryview(s.tokens)) for s in record.samples) for record in records]  # type: ignore[arg-type]
    labels = [b"".join(bytes(memoryview(s.is_label)) for s in record.samples) for record in records]  # type: ignore[arg-type]
    columns = {
        "place": [record.place for record in records],
        "tokens": _lists(tokens, pa.int32()),
        "is_label": _lists(labels, pa.int8()),
        "lengths": [[len(sample.tokens) for sample in record.samples] for record in records],
        "group": [record.samples[0].group if record.samples else 0 for record in records],
        **{name: [getattr(record, name) for record in records] for name in (*FLAGS, *COUNTS)},
        "error": [None] * len(records),
    }
    table = pa.table(columns, schema=SCHEMA)
    if error is None:
        return table
    return pa.concat_tables([table, pa.Table.from_pylist([{"error": error}], schema=SCHEMA)])


def _lists(parts: list[bytes], kind: pa.DataType) -> pa.Array:
    size = kind.bit_width // 8
    offsets = pa.array(accumulate((len(part) // size for part in parts), initial=0), pa.int32())
    joined = b"".join(parts)
    numbers = pa.Array.from_buffers(kind, len(joined) // size, [None, pa.py_buffer(joined)])
    return pa.ListArray.from_arrays(offsets, numbers)


def read_table(files: Iterable[Path]) -> pa.Table:
    """Concatenates the tables of some files, memory-mapped.

    Raises:
        ValueError: a file has other columns.
    """
    tables = [pa.ipc.open_stream(pa.memory_map(str(file))).read_all() for file in files]
    if any(not table.schema.equals(SCHEMA) for table in tables):
        raise ValueError("other columns")
    return pa.concat_tables([SCHEMA.empty_table(), *(table.replace_schema_metadata() for table in tables)])


def _memory(lists: pa.ListArray) -> Any:
    """View of the concatenated lists, without a copy."""
    return memoryview(lists.flatten().to_numpy())


def records_of(table: pa.Table) -> Iterator[Tokenized]:
    """Yields the records of a table; their tokens are views of the table."""
    for batch in table.to_batches():
        columns = {name: batch.column(name) for name in SCHEMA.names}
        tokens, labels = (_memory(columns[name]) for name in ("tokens", "is_label"))
        values = {name: column.to_pylist() for name, column in columns.items() if name not in ("tokens", "is_label")}
        stops = accumulate(chain.from_iterable(lengths or () for lengths in values["lengths"]))
        start = 0
        for row, error in enumerate(values["error"]):
            if error is not None:
                raise ValueError(error)
            samples = []
            for _ in values["lengths"][row]:
                stop = next(stops)
                samples.append(
                    Sample(tokens=tokens[start:stop], is_label=labels[start:stop], group=values["group"][row])
                )
                start = stop
            yield Tokenized(
                place=values["place"][row], samples=samples, **{name: values[name][row] for name in (*FLAGS, *COUNTS)}
            )
