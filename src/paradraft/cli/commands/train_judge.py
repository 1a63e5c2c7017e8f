"""`paradraft train-judge`."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from paradraft.cli import options
from paradraft.cli.importing import importing
from paradraft.cli.options import option, with_options
from paradraft.cli.terminal import console, news
from paradraft.cli.values import use_threads
from paradraft.engine.speculation import Speculation
from paradraft.files import check_outputs
from paradraft.models.names import is_shape
from paradraft.models.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Callable
    from decimal import Decimal

    from paradraft.data.answer_file import AnswerFile
    from paradraft.judge.labels import Labeller, MarkedQuestion
    from paradraft.models.target import Target

QUESTIONS = "openai/gsm8k/main:train"


@dataclass(frozen=True, kw_only=True)
class JudgeArgs:
    """Options of `paradraft train-judge`."""

    target: options.Target
    draft: Annotated[str, option("Draft model; the pocket target brings its own.", "--draft")]
    questions: Annotated[
        Path,
        option(
            'JSONL, JSON or Parquet file, or Hugging Face dataset, of {"question": …, "answer": …}, where the last '
            "number of an answer is what counts.",
            "--questions",
        ),
    ] = Path(QUESTIONS)
    num_questions: Annotated[int, option("How many questions to ask, from the first.", least=1)] = 64
    max_new_tokens: options.NewTokens = 320
    runtime: Runtime
    threads: options.Threads = None
    out: Annotated[Path, option("The head's file; labels are kept beside it, in FILE.labels.jsonl.", "--out")]

    def __post_init__(self) -> None:
        if is_shape(self.target):
            raise ValueError(f"{self.target!r} has random weights, so no answer is right: name a model")


@with_options
def train_judge(*, args: JudgeArgs) -> None:
    """Train a head that accepts drafted tokens which change no answer. Not lossless. Run it again to go on.

    The target answers questions whose right answers are known. Where the draft model would have drafted another token,
    that token takes the place of the target's, and the target goes on: if the answer stays right, the token is
    harmless. The rule --verify judge:head=FILE accepts tokens that the head takes for harmless, so answers may differ
    from the target's. paradraft bench --task gsm8k shows how many are right beside the speed.
    """
    with importing():
        from paradraft.data.answer_file import AnswerFile
        from paradraft.engine.loader import load_engine
        from paradraft.judge.fit import head_of, states_of
        from paradraft.judge.labels import LabelledText, Labeller
        from paradraft.sources.loading import locate
        from paradraft.sources.target_loading import load_target

    use_threads(args.threads)
    labels = args.out.with_name(f"{args.out.name}.labels.jsonl")
    check_outputs(args.out, labels)
    engine = load_engine(
        args.target, Speculation(drafter="autoregressive", draft=args.draft), runtime=args.runtime, kept_rows=16
    )
    rights = _rights(args.questions)
    questions = _questions(args, engine.target, rights)
    settings = {
        "target": args.target, "draft": args.draft, "questions": str(args.questions),
        "max_new_tokens": args.max_new_tokens,
    }  # fmt: skip
    with news(console(stderr=True), "labelling") as report:
        with AnswerFile(labels, settings, set(rights)) as file:
            draft = load_target(locate(args.draft, "draft"), args.runtime)
            labeller = Labeller(engine, draft, max_new_tokens=args.max_new_tokens)
            left = [question for question in questions if question.id not in file.done]
            asyncio.run(_label(labeller, left, file, report, len(questions)))
        texts = [LabelledText.of_json(json.loads(line)) for line in labels.read_text().splitlines()]
        facts = {"target": Path(args.target).name, "draft": Path(args.draft).name, "questions": str(len(texts))}
        texts = [text for text in texts if text.labels]
        states = []
        for number, text in enumerate(texts, start=1):
            report(f"reading {number}/{len(texts)} answers")
            with engine.in_round():
                states.append(states_of(engine.target, text))
        head = head_of(states, texts, facts)
    head.write(args.out)
    facts = head.facts
    print(
        f"{facts['labels']} drafted tokens of {len(texts)} answers, {float(facts['harmless']):.0%} harmless. On other "
        f"answers the head accepts {float(facts['accepted of harmless']):.0%} of these and rejects "
        f"{float(facts['rejected of harmful']):.0%} of the others"
    )
    print(f"decode with it by --verify judge:head={args.out}: not lossless")


async def _label(
    labeller: Labeller, questions: list[MarkedQuestion], file: AnswerFile, report: Callable[[str], None], of: int
) -> None:
    """Writes each text when it is labelled."""
    done, counted = of - len(questions), 0
    async for text in labeller.label(questions):
        file.append(text.as_json())
        done, counted = done + 1, counted + len(text.labels)
        report(f"{done}/{of} questions, {counted} labels in this run")


def _rights(source: Path) -> dict[str, tuple[str, Decimal]]:
    """All questions of a source by id, each with its right answer."""
    from paradraft.sources.records import records
    from paradraft.text.final_number import final_number

    rights: dict[str, tuple[str, Decimal]] = {}
    for where, record in records(source, "questions"):
        question, answer = record.get("question"), record.get("answer")
        if not (isinstance(question, str) and isinstance(answer, str)) or (right := final_number(answer)) is None:
            raise ValueError(f'{where}: expected {{"question": …, "answer": …}}, with a number in the answer')
        rights[str(len(rights))] = question, right
    if not rights:
        raise ValueError(f"{str(source)!r} has no questions")
    return rights


def _questions(args: JudgeArgs, target: Target, rights: dict[str, tuple[str, Decimal]]) -> list[MarkedQuestion]:
    """The first questions that fit into the target, with their prompts."""
    from itertools import islice

    from paradraft.bench.tasks import TASKS, prompt_of
    from paradraft.judge.labels import MarkedQuestion
    from paradraft.text.tokenization import encode_prompt

    task, tokenizer, room = TASKS["gsm8k"], target.tokenizer, target.capacity - args.max_new_tokens
    questions = (
        MarkedQuestion(
            id=name, prompt=encode_prompt(prompt_of(task, (text,), (), tokenizer, None), tokenizer), right=right
        )
        for name, (text, right) in rights.items()
    )
    return list(islice((question for question in questions if len(question.prompt) <= room), args.num_questions))
