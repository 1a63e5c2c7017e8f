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


def test_states_are_returned_of_the_layers_that_are_asked_for() -> None:
    """Guards drafters that read the target: those of the prompt, of the root and of each node; nothing by default, and
    nothing of the prompt where only rounds are asked about."""
    target = Target(CausalLM(tiny_model(1), vocab_size=VOCAB, compiled=False), tiny_tokenizer())
    prompt = Prompt(tokens=torch.tensor([[5, 6, 7]]), sampling=(GREEDY,))
    draft = Draft(tokens=torch.tensor([[1, 2]]), parents=torch.tensor([[-1, -1]]))
    assert target.prefill(prompt) == {} and target.forward(draft).hidden == {}
    target.hidden_layers = (1, -1)
    assert target.prefill(prompt) == {} and tuple(target.forward(draft).hidden) == (1, -1)
    target.prompt_hidden_layers = (1,)
    read, hidden = target.prefill(prompt)[1], target.forward(draft).hidden[1]
    for node in (1, 2):
        text = torch.tensor([[5, 6, 7, node]])
        whole = target.lm.model(text, output_hidden_states=True).hidden_states[1]
        found = torch.cat([read, hidden[:, [0, node]]], dim=1)
        torch.testing.assert_close(found, whole, rtol=1e-10, atol=1e-10)


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
