"""Exported drafters on the target's states in vLLM itself, where it is installed: the same text, and every draft as
often accepted, position by position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from paradraft.bench.baselines.vllm import VllmProcess
from paradraft.engine.loader import load
from paradraft.engine.speculation import Speculation
from paradraft.export.vllm import speculative_config
from paradraft.formats.folder import save_model
from paradraft.sampling_params import GREEDY
from tests.conftest import VOCAB, tiny_tokenizer
from tests.e2e.conftest import Paradraft
from tests.support.drafts import PROMPTS, train_head
from tests.support.installed_vllm import PYTHON, needs_vllm

K, TOKENS = 4, 48
KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}  # fmt: skip


def target_of(folder: Path, kind: str) -> Path:
    """A small target that vLLM has kernels for, whose heads are of 32 numbers; every row of it is a token."""
    config, model = KINDS[kind]
    torch.manual_seed(1)
    made = model(config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, head_dim=32,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=None, initializer_range=0.2,
    )) if kind != "qwen2" else model(config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=None, initializer_range=0.2,
    ))  # fmt: skip
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    save_model(folder / "target", made.float().eval(), tiny_tokenizer())
    return folder / "target"


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize(
    ("drafter", "settings", "kind"),
    [
        ("medusa", {}, "qwen3"),
        ("medusa", {"own_heads": True, "layers": 2}, "llama"),
        ("eagle", {"for_vllm": True}, "qwen3"),
        ("eagle", {"for_vllm": True, "layers": 2}, "llama"),
        ("eagle", {"for_vllm": True}, "qwen2"),
    ],
)
def test_vllm_drafts_what_we_draft(
    paradraft: Paradraft, tmp_path: Path, drafter: str, settings: dict[str, Any], kind: str
) -> None:
    """Guards states, embeddings and positions that vLLM pairs in another way: its drafts would then be accepted less
    often than ours, and nothing else would tell."""
    target, out = target_of(tmp_path, kind), tmp_path / "out"
    train_head(tmp_path, drafter, tmp_path / "trained", tmp_path / "said.jsonl", k=K, **settings)
    exported = paradraft(
        "export", tmp_path / "trained", out, "--target", target, "--to", "vllm", "-k", K, "--no-measure"
    )
    assert exported.code == 0, exported.err
    ours = load(str(target), drafter=drafter, draft=str(out), k=K, dtype="float32", lengths="fixed")
    given = {"model": str(target), "dtype": "float32", "capacity": 128, "batch": 1, "compiled": False, "threads": 1}
    given["speculative"] = speculative_config(
        Speculation(drafter=drafter, draft=str(out), k=K, lengths="fixed"), str(target)
    )
    total = [0] * K
    with VllmProcess(f"vllm-{drafter}", PYTHON.absolute(), given, ours.target) as vllm:
        for prompt in PROMPTS:
            theirs = vllm([prompt], TOKENS, GREEDY)
            assert theirs.counts is not None
            # There nothing is drafted before the prompt's own pass has given a token.
            first = ours.target.tokenizer.decode(theirs.tokens[0][:1])
            answer = ours.generate(prompt + first, max_new_tokens=TOKENS + K)
            assert theirs.tokens[0][1:] == answer.tokens[: TOKENS - 1]
            rounds, accepted, tokens = 0, [0] * K, 1
            while tokens < TOKENS:
                kept = answer.accepted[rounds]
                accepted = [number + (place < kept) for place, number in enumerate(accepted)]
                rounds, tokens = rounds + 1, tokens + kept + 1
            assert (theirs.counts.rounds - 1, list(theirs.counts.accepted)) == (rounds, accepted)
            total = [sum(pair) for pair in zip(total, accepted, strict=True)]
    assert total[0] and total[1], "else nothing is shown"
