"""The prompt of a task's question: what the target reads before it answers."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from paradraft.bench.tasks import Task


def prompt_of(
    task: Task, turns: Sequence[str], answers: Sequence[str], tokenizer: PreTrainedTokenizerBase, system: str | None
) -> str:
    """The prompt of the first turn that has no answer yet.

    With a chat template the target is asked in it, up to the generation prompt, and without thinking where the
    template has a switch for that, as in the authors' code. Without one the question is written plainly. A BOS
    that the template writes stays the only one: see `paradraft.models.texts.opening`.

    Args:
        task: whose question it is.
        turns: what the user says; more than there are answers.
        answers: what the target has said to the first of them.
        tokenizer: the target's.
        system: the system message; None for none, which leaves the template's own if it has one.

    Raises:
        ValueError: the template refuses such a conversation.
    """
    asked = [turn for _, turn in zip(range(len(answers) + 1), turns, strict=False)]
    if not tokenizer.chat_template:
        # An answer follows its question as text would, and a blank line comes before the next.
        said = [f"{task.plain.format(turn)} {answer.strip()}\n\n" for turn, answer in zip(asked, answers, strict=False)]
        return "".join(said) + task.plain.format(asked[-1])
    messages = [] if system is None else [{"role": "system", "content": system}]
    for number, turn in enumerate(asked):
        messages.append({"role": "user", "content": task.asks.format(turn)})
        messages += [{"role": "assistant", "content": answer} for answer in answers[number : number + 1]]
    try:
        return str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)
        )
    except (TemplateError, ValueError) as error:
        raise ValueError(f"task {task.name}: the target's chat template refuses its questions: {error}") from None
