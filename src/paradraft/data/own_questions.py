"""Questions that a chat model asks itself: prompts like those that its training had, without any data.

Xu et al. 2024, "Magpie: Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with Nothing", 2406.08464.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path

from paradraft.data.answer_file import only_writer
from paradraft.engine.engine import Engine
from paradraft.files import write_output
from paradraft.sampling_params import Sampling
from paradraft.text.chat_template import template_of

LONGEST = 80
"""Most tokens of a question."""
MARK = "\u2063paradraft\u2063"
"""A message that no template knows."""


def own_questions(engine: Engine, first: int = 0, *, batch_size: int = 1) -> Iterator[str]:
    """What the model writes where its chat template has a user's message: number `first`, `first` + 1, …

    A number is always the same question, whatever the batch size.

    Raises:
        ValueError: the model has no chat template, or one that changes messages.
    """
    tokenizer = engine.target.tokenizer
    if not tokenizer.chat_template:
        raise ValueError("the model has no chat template, so it cannot ask itself: name --prompts")
    before, mark, _ = template_of(tokenizer).text([{"role": "user", "content": MARK}], ask=False).partition(MARK)
    if not mark:
        raise ValueError("the model's chat template changes messages, so it cannot ask itself: name --prompts")
    beginning = list(tokenizer(before, add_special_tokens=False)["input_ids"])
    for start in count(first, batch_size):
        samplings = [Sampling(temperature=1.0, top_p=0.95, seed=start + row) for row in range(batch_size)]
        answers = engine.generate(
            [beginning] * batch_size, max_new_tokens=LONGEST, sampling=samplings, batch_size=batch_size
        )
        for answer in answers:
            yield answer.text.strip() or "Hello."


def write_own_questions(
    engine: Engine, file: Path, wanted: int, *, of: str, batch_size: int, report: Callable[[str], None]
) -> None:
    """Writes questions as messages, one per line, after those that an earlier call has written.

    Args:
        wanted: questions in the file, if there are not more of them already.
        of: digest of the model, which each line has.

    Raises:
        ValueError: as `own_questions`, or the file is not one of these, or of another model, or another run writes it.
    """
    with only_writer(file):
        known = _known(file, f'{{"asked by": {json.dumps(of)}, '.encode())
        questions = islice(own_questions(engine, known, batch_size=batch_size), max(wanted - known, 0))
        for number, question in enumerate(questions, start=known):
            record = {"asked by": of, "number": number, "messages": [{"role": "user", "content": question}]}
            with file.open("ab") as out:
                out.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
            report(f"{number + 1}/{wanted} questions")


def _known(file: Path, beginning: bytes) -> int:
    """The number of lines of a file, none without one, after a last line that a crash has torn is cut off.

    Raises:
        ValueError: its first line, or what is left of that, begins otherwise; then it is unchanged.
    """
    content = file.read_bytes() if file.exists() else b""
    size = min(len(beginning), len(content))
    if content[:size] != beginning[:size]:
        begins = beginning.decode().removesuffix(", ")
        raise ValueError(f"{file} holds other questions, not this model's ({begins}, …): name another --out")
    *lines, torn = content.split(b"\n")
    if torn:
        write_output(file, b"".join(line + b"\n" for line in lines))
    return len(lines)
