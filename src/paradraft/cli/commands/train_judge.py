"""`paradraft train-judge`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shlex
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
from paradraft.models.names import POCKET, is_shape
from paradraft.models.runtime import Runtime
from paradraft.wording import number_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from paradraft.bench.tasks import TaskQuestion
    from paradraft.data.answer_file import AnswerFile
    from paradraft.judge.labels import Labeller, MarkedQuestion
    from paradraft.models.target import Target

TASK, QUESTIONS = "gsm8k", "openai/gsm8k/main:train"


@dataclass(frozen=True, kw_only=True)
class JudgeArgs:
    """Options of `paradraft train-judge`."""

    target: options.Target
    draft: Annotated[str | None, option("Draft model; the pocket target brings its own.")] = None
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
        if ":" in str(self.out):
            raise ValueError(f"--out {self.out}: the settings of a rule are separated by ':', so choose a path without")
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
        from paradraft.data.local import digest_of, dtype_of
        from paradraft.engine.loader import load_engine
        from paradraft.judge.fit import head_of, states_of
        from paradraft.judge.labels import LabelledText, Labeller
        from paradraft.sources.loading import locate
        from paradraft.sources.target_loading import load_target

    use_threads(args.threads)
    labels = args.out.with_name(f"{args.out.name}.labels.jsonl")
    check_outputs(args.out, labels)
    asked = _asked(args.questions)
    engine = load_engine(
        args.target, Speculation(drafter="autoregressive", draft=args.draft), runtime=args.runtime, kept_rows=16
    )
    target, questions = engine.target, _fitting(args, engine.target, asked)
    draft = load_target(locate(args.draft or POCKET, "draft"), args.runtime)
    settings = {
        "target": args.target, "draft": args.draft, "max_new_tokens": args.max_new_tokens, "dtype": dtype_of(target),
        "digest of the target": digest_of(target), "digest of the draft": digest_of(draft),
    }  # fmt: skip
    with news(console(stderr=True), "labelling") as report:
        with AnswerFile(labels, settings, set(asked)) as file:
            labeller = Labeller(engine, draft, max_new_tokens=args.max_new_tokens)
            left = [question for question in questions if question.id not in file.done]
            asyncio.run(_label(labeller, left, file, report, len(questions)))
        texts = [LabelledText.of_json(json.loads(line)) for line in labels.read_text().splitlines()]
        names = {"target": Path(args.target).name, "draft": Path(args.draft or POCKET).name}
        facts = names | {"questions": str(len(texts))}
        texts = [text for text in texts if text.labels]
        states = []
        for number, text in enumerate(texts, start=1):
            report(f"reading {number}/{len(texts)} answers")
            with engine.in_round():
                states.append(states_of(target, text))
        head = head_of(states, texts, facts)
    head.write(args.out)
    facts = head.facts
    print(
        f"{facts['labels']} drafted tokens of {len(texts)} answers, {float(facts['harmless']):.0%} harmless. On other "
        f"answers the head accepts {float(facts['accepted of harmless']):.0%} of these and rejects "
        f"{float(facts['rejected of harmful']):.0%} of the others"
    )
    print(f"decode with it by --verify {shlex.quote(f'judge:head={args.out}')}: not lossless")


async def _label(
    labeller: Labeller, questions: list[MarkedQuestion], file: AnswerFile, report: Callable[[str], None], of: int
) -> None:
    """Writes each text when it is labelled."""
    done, counted = of - len(questions), 0
    async for text in labeller.label(questions):
        file.append(text.as_json())
        done, counted = done + 1, counted + len(text.labels)
        report(f"{done}/{of} questions, {counted} labels in this run")


def _asked(source: Path) -> dict[str, TaskQuestion]:
    """The questions of a source by a digest of each."""
    from paradraft.bench.tasks import TASKS, read_questions

    asked: dict[str, TaskQuestion] = {}
    for number, question in enumerate(read_questions(TASKS[TASK], source), start=1):
        if question.right is None:
            raise ValueError(f"{str(source)!r}, question {number}: its answer has no number, remove it")
        content = json.dumps([question.turns, str(question.right)])
        asked[hashlib.sha256(content.encode()).hexdigest()[:16]] = question
    return asked


def _fitting(args: JudgeArgs, target: Target, asked: dict[str, TaskQuestion]) -> list[MarkedQuestion]:
    """The first questions that fit into the target, with their prompts."""
    from paradraft.bench.tasks import TASKS, prompt_of
    from paradraft.judge.labels import MarkedQuestion
    from paradraft.text.tokenization import encode_prompt

    questions: list[MarkedQuestion] = []
    left_out, tokenizer, room = 0, target.tokenizer, target.capacity - args.max_new_tokens
    for name, question in asked.items():
        assert question.right is not None
        prompt = encode_prompt(prompt_of(TASKS[TASK], question.turns, (), tokenizer, None), tokenizer)
        if len(prompt) <= room:
            questions.append(MarkedQuestion(id=name, prompt=prompt, right=question.right))
        else:
            left_out += 1
        if len(questions) == args.num_questions:
            break
    if not questions:
        raise ValueError(
            f"no question fits into {target.capacity} tokens, with {args.max_new_tokens} new tokens: lower "
            "--max-new-tokens, or raise --capacity"
        )
    if left_out:
        console(stderr=True).print(f"left out {number_of(left_out, 'question')}, too long for the target")
    return questions
