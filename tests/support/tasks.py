"""The first lines of the tasks' data, with their real fields, written small."""

from __future__ import annotations

from pathlib import Path

from tests.support.jsonl import write_lines

RECORDS: dict[str, list[dict[str, object]]] = {
    "humaneval": [
        {
            "task_id": f"HumanEval/{number}", "prompt": f"def f{number}(x):\n", "entry_point": f"f{number}",
            "canonical_solution": "    return x\n", "test": "def check(candidate):\n    assert candidate(1) == 1\n",
        }
        for number in range(6)
    ],
    "gsm8k": [{"question": f"what is {number}", "answer": f"It is <<{number}>>\n#### {number}"} for number in range(6)],
    "math500": [
        {
            "problem": f"compute {number}", "solution": f"boxed {number}", "answer": f"{number}", "subject": "Algebra",
            "level": 2, "unique_id": f"test/algebra/{number}.json",
        }
        for number in range(6)
    ],
    "mtbench": [
        {"category": "writing", "prompt": [f"ask {number}", "and then"], "reference": [], "prompt_id": 80 + number}
        for number in range(2)
    ],
    "specbench": [
        {"question_id": 81, "category": "writing", "turns": ["ask", "and then"]},
        {"question_id": 265, "category": "summarization", "turns": ["Summarize it"], "reference": ["It."]},
    ],
}  # fmt: skip


def write_task(folder: Path, name: str) -> Path:
    """A local copy of a task's data."""
    file = folder / f"{name}.jsonl"
    write_lines(file, RECORDS[name])
    return file
