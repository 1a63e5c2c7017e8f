from __future__ import annotations

import torch

from paradraft.core import Draft, Prompt
from paradraft.models.causal_lm import CausalLM
from paradraft.models.target import Target
from paradraft.sampling_params import GREEDY
from tests.conftest import VOCAB, tiny_model, tiny_tokenizer


def test_every_prompt_begins_another_request() -> None:
    """Guards two streams on one cache: the older one is told that it has ended, also after many requests."""
    target = Target(CausalLM(tiny_model(1), vocab_size=VOCAB, compiled=False), tiny_tokenizer())
    prompt = Prompt(tokens=torch.tensor([[5, 6]]), sampling=(GREEDY,))
    seen = [target.request]
    for _ in range(3):
        target.prefill(prompt)
        seen.append(target.request)
    assert len(set(seen)) == 4


def test_a_pass_reads_the_last_committed_token_and_the_draft() -> None:
    """Guards the first round, whose root is the prompt's last token, and drafters that look for hidden states: a pass
    returns those of the layers that were asked for, which are none."""
    model = tiny_model(1)
    target = Target(CausalLM(model, vocab_size=VOCAB, compiled=False), tiny_tokenizer())
    target.prefill(Prompt(tokens=torch.tensor([[5, 6, 7]]), sampling=(GREEDY,)))
    out = target.forward(Draft.chain(torch.tensor([[3, 2]])))
    with torch.inference_mode():
        expected = model(torch.tensor([[5, 6, 7, 3, 2]])).logits[:, 2:, :VOCAB]
    torch.testing.assert_close(out.logits, expected, rtol=1e-10, atol=1e-10)
    assert out.hidden == {}


def test_end_tokens_are_found_wherever_a_model_names_them() -> None:
    """Guards answers that never end: one id, several, or none; 0 is an id. As for `generate`, the generation config
    alone says so: a model's config counts where it was made into a generation config, when the model was loaded."""
    model = tiny_model(1)
    target = Target(CausalLM(model, vocab_size=VOCAB, compiled=False), tiny_tokenizer())
    for generation, config, found in [
        (7, 3, {7}), ([7, 0], 3, {7, 0}), (None, 3, set()), (None, [3, 4], set()), (0, 3, {0}), (None, None, set()),
    ]:  # fmt: skip
        model.generation_config.eos_token_id, model.config.eos_token_id = generation, config
        assert target.eos_ids == found
