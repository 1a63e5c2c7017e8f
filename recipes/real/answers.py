"""Lets a real model answer the questions that its drafters learn from, and packs the answers into one Parquet file.

python recipes/real/answers.py smollm2-135m --code code_alpaca_2k.json --gsm8k gsm8k_train.jsonl \
    --apart humaneval.jsonl gsm8k_test.jsonl

The questions are those of CodeAlpaca, the first 1,000 of GSM8K's training questions in a fixed random order, and the
500 of `questions/general.jsonl`, which were written for this. Those that share eight words in a row with a file of
`--apart`, on which drafters are measured, are left out. Each is answered greedily and at temperature 0.8. The same
command goes on where it was stopped. Nothing of `questions/chat-test.jsonl` is answered: drafters are measured on it.

`answers` has the results of three models. The answers of the 0.5B and SmolLM2's at temperature 0.8 are of the files'
weights as bfloat16 numbers on a GPU, which differ in some tokens from what the passes on CPUs decode. Of the 1.5B there
are 832 greedy answers, to a random part of the questions: 35 minutes of two AVX-512 cores that had other work too.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

HERE = Path(__file__).parent
REAL, WORK = Path("build/real"), Path("build/answers")
MATHS = 1000
RUN = 8
"""Words in a row that a question shares with a test at most, less one."""
LONGEST = 256
"""Tokens of an answer."""
SAMPLINGS = {"0": (), "0.8": ("--temperature", "0.8", "--seed", "1")}


def runs_of(text: str) -> set[tuple[str, ...]]:
    """All runs of `RUN` words."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    return {tuple(words[start : start + RUN]) for start in range(len(words) - RUN + 1)}


def question(kind: str, number: int, text: str) -> dict[str, Any]:
    """A conversation with one turn."""
    return {"id": f"{kind}-{number}", "messages": [{"role": "user", "content": text}]}


def lines_of(file: Path) -> Iterator[dict[str, Any]]:
    """The records of a JSONL file."""
    return map(json.loads, file.read_text(encoding="utf-8").splitlines())


def code_of(file: Path, apart: set[tuple[str, ...]]) -> Iterator[dict[str, Any]]:
    """CodeAlpaca's instructions, each with its input."""
    for number, record in enumerate(json.loads(file.read_text(encoding="utf-8"))):
        parts = [record[key].strip() for key in ("instruction", "input")]
        text = "\n\n".join(part for part in parts if part)
        if not runs_of(f"{text} {record['output']}") & apart:
            yield question("code", number, text)


def maths_of(file: Path, apart: set[tuple[str, ...]]) -> list[dict[str, Any]]:
    """Questions of GSM8K."""
    records = enumerate(lines_of(file))
    all_of_them = [
        question("gsm8k", number, record["question"])
        for number, record in records
        if not runs_of(record["question"]) & apart
    ]
    random.Random(0).shuffle(all_of_them)
    return all_of_them[:MATHS]


def write(file: Path, records: Iterable[dict[str, Any]]) -> None:
    """Writes records as JSONL."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")


def answer(name: str, questions: Path, temperature: str) -> Path:
    """Runs `paradraft regenerate` with the model in `REAL` whose name begins so, and returns its file."""
    (target,) = REAL.glob(f"{name}*.gguf")
    out = WORK / f"{name}-{questions.stem}-{temperature}.jsonl"
    command = [
        "regenerate", "--prompts", questions, "--out", out, "--target", target, "--drafter", "none", "--batch-size", 16,
        "--max-new-tokens", LONGEST, *SAMPLINGS[temperature],
    ]  # fmt: skip
    subprocess.run([sys.executable, "-m", "paradraft", *map(str, command)], check=True)
    return out


def pack(files: dict[str, list[Path]], out: Path) -> None:
    """Writes the answers of each temperature into a Parquet file."""
    rows = [
        {"id": record["id"], "temperature": float(temperature), "messages": record["messages"]}
        for temperature, answers in files.items()
        for file in answers
        for record in sorted(lines_of(file), key=lambda record: record["id"])
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(
        pyarrow.Table.from_pylist(rows), out, compression="brotli", compression_level=11, use_dictionary=False,
        data_page_size=2**26,
    )  # fmt: skip
    print(f"{out}: {len(rows):,} answers, {out.stat().st_size:,} bytes")


def main() -> None:
    """Answers all questions, and packs the answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="how the name of a file in build/real begins")
    parser.add_argument("--code", type=Path, required=True)
    parser.add_argument("--gsm8k", type=Path, required=True)
    parser.add_argument("--apart", type=Path, nargs="+", required=True)
    args = parser.parse_args()
    tested = (" ".join(map(str, record.values())) for file in args.apart for record in lines_of(file))
    apart = set().union(*map(runs_of, tested))
    questions = {
        "code": list(code_of(args.code, apart)),
        "gsm8k": maths_of(args.gsm8k, apart),
        "general": list(lines_of(HERE / "questions" / "general.jsonl")),
    }
    for kind, records in questions.items():
        write(WORK / f"{kind}.jsonl", records)
    files = {
        temperature: [answer(args.target, WORK / f"{kind}.jsonl", temperature) for kind in questions]
        for temperature in SAMPLINGS
    }
    pack(files, HERE / "answers" / f"{args.target}.parquet")


if __name__ == "__main__":
    main()
