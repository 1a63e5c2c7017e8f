"""Compiled passes: the same results at every width, and eager where there is no compiler."""

from __future__ import annotations

import pytest
import torch

from paradraft.core import GREEDY, Prompt
from paradraft.models.causal_lm import CausalLM
from paradraft.models.compilation import compiled
from tests.conftest import tiny_model


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_compiled_passes_equal_eager_ones(dtype: torch.dtype) -> None:
    """Guards against a graph that is wrong for some width, loses what it wrote into the cache, or reads another
    model's weights. `transformers` computes norms and rotations in float32 whatever the dtype, and compiling reorders
    them, hence the tolerance."""
    models = [tiny_model(seed).to(dtype) for seed in (3, 4)]
    pairs = [[CausalLM(model, vocab_size=64, compiled=flag) for flag in (False, True)] for model in models]
    prompt = Prompt(tokens=torch.tensor([[5, 6, 7, 8]]), sampling=(GREEDY,))
    for lm in (lm for pair in pairs for lm in pair):
        lm.start(prompt)
    for tokens in ([8], [9, 10, 11], [12], [13, 14, 15, 16, 17, 18, 19, 20, 21]):
        for pair in pairs:
            plain, fast = (lm.forward(torch.tensor([tokens])) for lm in pair)
            torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-5)
            for lm in pair:
                lm.keep(torch.tensor([max(len(tokens) - 1, 1)]))


def test_without_a_compiler_it_warns_once_and_decodes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a crash, or a silent slowdown, on machines that cannot compile."""

    def broken(*args: object, **kwargs: object) -> object:
        def run(*tensors: torch.Tensor) -> torch.Tensor:
            raise torch._dynamo.exc.TorchDynamoException("no C++ compiler")

        return run

    monkeypatch.setattr(torch, "compile", broken)
    run = compiled(lambda x: x + 1, torch.device("cpu"), torch.float32)
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler"):
        assert run(torch.tensor(1)).item() == 2
    assert run(torch.tensor(2)).item() == 3
