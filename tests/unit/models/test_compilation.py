"""Compiled passes: the same results at every width, and eager where there is no compiler."""

from __future__ import annotations

import pytest
import torch

from paradraft.core import GREEDY, Prompt
from paradraft.models.causal_lm import CausalLM
from paradraft.models.compilation import compiled
from tests.conftest import tiny_model


@pytest.mark.slow
def test_compiled_passes_equal_eager_ones() -> None:
    """Guards against a graph that is wrong for some width or loses what it wrote into the cache. `transformers`
    computes norms and rotations in float32 whatever the dtype, and compiling reorders them, hence the tolerance."""
    plain, fast = (CausalLM(tiny_model(3), vocab_size=64, compiled=flag) for flag in (False, True))
    prompt = Prompt(tokens=torch.tensor([[5, 6, 7, 8]]), sampling=(GREEDY,))
    for lm in (plain, fast):
        lm.start(prompt)
    for tokens in ([8], [9, 10, 11], [12], [13, 14, 15, 16, 17, 18, 19, 20, 21]):
        found = [lm.forward(torch.tensor([tokens])) for lm in (plain, fast)]
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
        for lm in (plain, fast):
            lm.keep(torch.tensor([max(len(tokens) - 1, 1)]))


def test_without_a_compiler_it_warns_once_and_decodes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a crash, or a silent slowdown, on machines that cannot compile."""

    def broken(*args: object, **kwargs: object) -> object:
        def run(*tensors: torch.Tensor) -> torch.Tensor:
            raise torch._dynamo.exc.TorchDynamoException("no C++ compiler")

        return run

    monkeypatch.setattr(torch, "compile", broken)
    run = compiled(lambda x: x + 1, torch.device("cpu"))
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler"):
        assert run(torch.tensor(1)).item() == 2
    assert run(torch.tensor(2)).item() == 3
