"""Conversations against chat templates as models ship them: each turn as the target reads and writes it."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from paradraft.data.chat import conversation_samples
from paradraft.data.samples import Sample
from paradraft.text.chat_template import ChatTemplate
from paradraft.text.tokenization import encode_continuation
from tests.conftest import tiny_tokenizer

QWEN3 = """
{%- set ns = namespace(searching=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == 'user' %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content, thought = message.content, '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- content + '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""
"""Thoughts stand after the last question only, and there an empty one where there is none."""
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Qwen's words, with marks that leave out the end of a turn."""
QWEN3_SWITCH = (
    f"{QWEN3}{{% if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}}"
    "{{- '<think>\n\n</think>\n\n' }}{% endif %}"
)
"""With the template's switch, which says in the prompt that nothing was thought."""

R1 = (
    "{{bos_token}}{% for message in messages %}{% if message['role'] == 'user' %}{{'<U>' + message['content']}}"
    "{% else %}{% set content = message['content'] %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}{{'<A>' + content + '<|eos|>'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{'<A>'}}{% endif %}"
)
"""DeepSeek-R1-Distill's, first version: thoughts are always left out."""
R1_THINKS = R1.replace("{{'<A>'}}", "{{'<A><think>\\n'}}")
"""Its second: they begin in the generation prompt."""


def tokenizer_of(template: str) -> PreTrainedTokenizerBase:
    tokenizer = tiny_tokenizer()
    special = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<U>", "<A>", "<bos>"]
    tokenizer.add_tokens([*special, "\n", "\n\n"])
    tokenizer.bos_token = "<bos>"
    tokenizer.chat_template = template
    return tokenizer


def samples_of(
    messages: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    is_cut: bool,
    ends: tuple[str, ...] = ("<|eos|>",),
    **variables: object,
) -> list[Sample]:
    end_ids = frozenset(tokenizer.convert_tokens_to_ids(end) for end in ends)
    template = ChatTemplate(tokenizer=tokenizer, variables=variables, end_ids=end_ids)
    return conversation_samples(messages, template, is_cut=is_cut)


def talk(*contents: str, roles: tuple[str, ...] = ("user", "assistant")) -> list[dict[str, str]]:
    return [{"role": roles[place % len(roles)], "content": content} for place, content in enumerate(contents)]


def learnt(tokenizer: PreTrainedTokenizerBase, *parts: str) -> Sample:
    """A sample of prompts and answers in turn; the answers are learnt."""
    pairs = [(token, n % 2 == 1) for n, part in enumerate(parts) for token in encode_continuation(part, tokenizer)]
    return Sample(tokens=[token for token, _ in pairs], is_label=[is_label for _, is_label in pairs])


def asks(*contents: str) -> str:
    """A conversation in Qwen3's words, up to the generation prompt."""
    turns = (f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in talk(*contents))
    return "".join(turns) + "<|im_start|>assistant\n"


@pytest.mark.parametrize("thoughts", [("x", "yz"), ("", "")])
def test_each_turn_is_learnt_as_it_was_written(thoughts: tuple[str, str]) -> None:
    """Guards conversations with models that think: in the whole conversation the template has dropped what the first
    turn thought, or the empty thought before its answer, which the target wrote all the same."""
    tokenizer = tokenizer_of(QWEN3)
    written = [f"<think>\n{thought}\n</think>\n\n" for thought in thoughts]
    said = [thought and whole for thought, whole in zip(thoughts, written, strict=True)]
    found = samples_of(talk("a", said[0] + "b", "c", said[1] + "d", "e"), tokenizer, is_cut=False)
    assert found == [
        learnt(tokenizer, asks("a"), f"{written[0]}b<|im_end|>\n"),
        learnt(tokenizer, asks("a", "b", "c"), f"{written[1]}d<|im_end|>\n"),
    ]


@pytest.mark.parametrize("is_cut", [False, True])
def test_what_the_template_is_told_stands_in_the_prompt(is_cut: bool) -> None:
    """Guards drafters of a target that is served without thinking: the empty thought is part of the question then, and
    no token of it is the target's."""
    tokenizer = tokenizer_of(QWEN3_SWITCH)
    nothing, end = "<think>\n\n</think>\n\n", "" if is_cut else "<|im_end|>\n"
    (silent,) = samples_of(talk("a", "b"), tokenizer, is_cut=is_cut, enable_thinking=False)
    assert silent == learnt(tokenizer, asks("a") + nothing, f"b{end}")
    for variables in ({"enable_thinking": True}, {}):
        (thinking,) = samples_of(talk("a", "b"), tokenizer, is_cut=is_cut, **variables)
        assert thinking == learnt(tokenizer, asks("a"), f"{'' if is_cut else nothing}b{end}")


def test_a_thought_where_the_template_says_there_is_none() -> None:
    """Guards against answers that were given with thinking, in a run that is told there is none."""
    with pytest.raises(ValueError, match="message 2: the chat template does not write it after the prompt"):
        samples_of(
            talk("a", "<think>\nx\n</think>\n\nb"), tokenizer_of(QWEN3_SWITCH), is_cut=False, enable_thinking=False
        )


def test_a_template_that_is_told_to_keep_thoughts() -> None:
    """Guards against refusing turns that the template leaves whole, because it is asked for their text otherwise."""
    tokenizer = tokenizer_of(R1.replace("in content %}", "in content and not keep %}"))
    said = "<think>\nx\n</think>\n\nb"
    assert samples_of(talk("a", said), tokenizer, is_cut=False, keep=True) == [
        learnt(tokenizer, "<bos><U>a<A>", f"{said}<|eos|>")
    ]


def test_marks_follow_what_the_template_is_told() -> None:
    """Guards templates with marks, which are rendered by another call."""
    template = (
        "{% if loud %}!{% endif %}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    tokenizer = tokenizer_of(template)
    (sample,) = samples_of(talk("ab"), tokenizer, is_cut=False, loud=True)
    assert sample == learnt(tokenizer, "!", "ab")


def test_turns_that_the_template_keeps_stay_together() -> None:
    """Guards against learning the same text once for every turn: between the steps of one answer Qwen3 goes on
    thinking where it was, and a question after them begins anew."""
    tokenizer = tokenizer_of(QWEN3)
    steps = ("a", "<think>\nx\n</think>\n\nb", "c", "<think>\ny\n</think>\n\nd")
    messages = talk(*steps, roles=("user", "assistant", "tool", "assistant")) + talk("e", "f")
    tool = "<|im_start|>user\n<tool_response>\nc\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    history = f"{asks('a')}b<|im_end|>\n{tool}d<|im_end|>\n{asks('e')}"
    assert samples_of(messages, tokenizer, is_cut=False) == [
        learnt(tokenizer, asks("a"), f"{steps[1]}<|im_end|>\n", tool, f"{steps[3]}<|im_end|>\n"),
        learnt(tokenizer, history, "<think>\n\n</think>\n\nf<|im_end|>\n"),
    ]


def test_a_cut_turn_begins_its_own_sample_too() -> None:
    """Guards against an end after a thought that the limit cut, and against forgetting the turn before it."""
    tokenizer = tokenizer_of(QWEN3)
    found = samples_of(talk("a", "<think>\nx\n</think>\n\nb", "c", "<think>\ny"), tokenizer, is_cut=True)
    assert found == [
        learnt(tokenizer, asks("a"), "<think>\nx\n</think>\n\nb<|im_end|>\n"),
        learnt(tokenizer, asks("a", "b", "c"), "<think>\ny"),
    ]


def test_a_stable_template_gives_one_sample() -> None:
    """Guards plain templates: one sample for all turns, with one BOS."""
    tokenizer = tokenizer_of(R1)
    found = samples_of(talk("a", "b", "c", "d"), tokenizer, is_cut=False)
    assert found == [learnt(tokenizer, "<bos><U>a<A>", "b<|eos|>", "<U>c<A>", "d<|eos|>")]


@pytest.mark.parametrize(
    ("template", "said", "named"),
    [
        (R1, "<think>\nx\n</think>\n\nb", "message 4: the chat template leaves out a part of it, such as what the"),
        (
            R1_THINKS,
            "<think>\nx\n</think>\n\nb",
            "message 2: the chat template does not write it after the prompt",
        ),
        (R1_THINKS, "b", "message 2: the chat template does not write it after the prompt"),
        ("{{ messages[-1].content }}", "b", "message 2: the chat template does not write it after the prompt"),
    ],
)
def test_a_turn_that_the_template_changes_is_refused(template: str, said: str, named: str) -> None:
    """Guards against learning answers without the thoughts that the target always writes before them, answers inside a
    thought, and labels on the wrong tokens."""
    contents = ("a", "b", "c", said) if template == R1 else ("a", said, "c", "d")
    with pytest.raises(ValueError, match=named):
        samples_of(talk(*contents), tokenizer_of(template), is_cut=False)


def test_an_answer_whose_beginning_joins_the_prompt() -> None:
    """Guards code: an answer that begins with spaces or a line break shares a token with the line break before it, and
    the whole run was refused. It is learnt as the target writes it, after the tokens that it was asked with."""
    template = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    tokenizer = tokenizer_of(template)
    whole = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n\nb<|im_end|>\n"
    prompt = whole[: whole.index("\n\n") + 1]
    assert tokenizer(whole)["input_ids"][: len(tokenizer(prompt)["input_ids"])] != tokenizer(prompt)["input_ids"]
    expected = learnt(tokenizer, prompt, whole.removeprefix(prompt))
    assert samples_of(talk("a", "\nb"), tokenizer, is_cut=False, ends=("<|im_end|>",)) == [expected]


@pytest.mark.parametrize("ends", [("<|im_end|>",), ("<|eos|>", "<|im_end|>")])
def test_the_end_behind_a_mark_is_learnt(ends: tuple[str, ...]) -> None:
    """Guards against a drafter that never learns to end a turn, because the template's mark ends before the token with
    which the target does; the user's ends are not its own, nor is the newline after it."""
    tokenizer = tokenizer_of(MARKED)
    found = samples_of(talk("a", "b", "c", "d"), tokenizer, is_cut=False, ends=ends)
    second = "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    assert found == [learnt(tokenizer, asks("a"), "b<|im_end|>", second, "d<|im_end|>", "\n")]
    (control,) = samples_of(talk("a", "b"), tokenizer, is_cut=False)
    assert control == learnt(tokenizer, asks("a"), "b", "<|im_end|>\n"), "to this model it is no end"


def test_no_end_is_learnt_behind_a_marked_turn_that_was_cut() -> None:
    """Guards against a drafter that ends turns in the middle of a sentence; the turn before ended by itself."""
    tokenizer = tokenizer_of(MARKED)
    (sample,) = samples_of(talk("a", "b", "c", "d"), tokenizer, is_cut=True, ends=("<|im_end|>",))
    second = "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    assert sample == learnt(tokenizer, asks("a"), "b<|im_end|>", second, "d")


def test_one_end_of_a_turn_is_learnt() -> None:
    """Guards templates whose mark has the end in it: what stands after that is never written."""
    template = MARKED.replace("{% endgeneration %}", "<|im_end|>{% endgeneration %}")
    tokenizer = tokenizer_of(template)
    (sample,) = samples_of(talk("a", "b"), tokenizer, is_cut=False, ends=("<|im_end|>",))
    assert sample == learnt(tokenizer, asks("a"), "b<|im_end|>", "<|im_end|>\n")


@pytest.mark.parametrize("mark", ["{%generation%}", "{%-generation-%}", "{%+ generation %}", "{%\n  generation\n%}"])
def test_a_mark_in_any_spelling(mark: str) -> None:
    """Guards marks without spaces, which Jinja reads: the newline after a turn would be a label."""
    tokenizer = tokenizer_of(MARKED.replace("{% generation %}", mark))
    found = samples_of(talk("a", "b"), tokenizer, is_cut=False)
    assert found == samples_of(talk("a", "b"), tokenizer_of(MARKED), is_cut=False)
    assert list(found[0].is_label).count(True) == 1


def test_a_variable_is_no_mark() -> None:
    """Control: words that only begin like a mark."""
    tokenizer = tokenizer_of("{% set generation = 1 %}{% set generations = 1 %}{%- if generations %}{% endif %}" + R1)
    assert samples_of(talk("a", "b"), tokenizer, is_cut=False) == samples_of(
        talk("a", "b"), tokenizer_of(R1), is_cut=False
    )


def test_what_nobody_asked_is_not_learnt() -> None:
    """Guards against learning what the template puts before a conversation that begins with the assistant."""
    tokenizer = tokenizer_of(R1)
    found = samples_of(talk("a", "b", "c", roles=("assistant", "user")), tokenizer, is_cut=False)
    assert found == [learnt(tokenizer, "<bos><A>a<|eos|><U>b<A>", "c<|eos|>")]
    (alone,) = samples_of(talk("a", roles=("assistant",)), tokenizer, is_cut=False)
    assert not any(alone.is_label)


def test_a_thought_that_is_quoted_is_missed_too() -> None:
    """Guards against an answer without its thought, where the question has the same words."""
    said = "<think>\nx\n</think>\n\nb"
    with pytest.raises(ValueError, match="leaves out a part of it"):
        samples_of(talk(said, said), tokenizer_of(R1), is_cut=False)


def test_one_of_several_templates() -> None:
    """Guards tokenizers that have a template for tools beside the default."""
    tokenizer = tokenizer_of(R1)
    expected = samples_of(talk("a", "b"), tokenizer, is_cut=False)
    tokenizer.chat_template = {"default": R1, "tool_use": QWEN3}
    assert samples_of(talk("a", "b"), tokenizer, is_cut=False) == expected


def test_parts_of_text_are_a_text() -> None:
    """Guards the way in which many data sets write contents, and against the Python of a list in the training text."""
    tokenizer = tokenizer_of(R1)
    parts = [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]
    messages = [{"role": "user", "content": parts[:1]}, {"role": "assistant", "content": parts}]
    (sample,) = samples_of(messages, tokenizer, is_cut=False)
    assert sample == learnt(tokenizer, "<bos><U>c<A>", "c\nd<|eos|>")


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"content": "b"}, "message 2 has no role"),
        ({"role": "assistant"}, "message 2 has the content None: give a text, or parts of type text"),
        ({"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}, "message 2 has the content None"),
        ({"role": "assistant", "content": 3}, "message 2 has the content 3"),
        ({"role": "assistant", "content": []}, r"message 2 has the content \[\]"),
        ({"role": "assistant", "content": ["b"]}, r"message 2 has the content \['b'\]"),
        ({"role": "assistant", "content": {"type": "text", "text": "b"}}, "message 2 has the content {'text': 'b'"),
        ({"role": "assistant", "content": [{"type": "image"}]}, r"message 2 has the content \[{'type': 'image'}\]"),
        ({"role": "assistant", "content": [{"type": "text", "text": "b"}, {"type": "text"}]}, "message 2 has the"),
    ],
)
@pytest.mark.parametrize("template", [R1, QWEN3, "{% generation %}{% endgeneration %}"])
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_message_that_is_no_text_is_named(
    message: dict[str, object], named: str, template: str, is_cut: bool
) -> None:
    """Guards against "None" and lists in the training text, and against a traceback from inside a template."""
    with pytest.raises(ValueError, match=named):
        samples_of([*talk("a"), message, *talk("c")], tokenizer_of(template), is_cut=is_cut)
