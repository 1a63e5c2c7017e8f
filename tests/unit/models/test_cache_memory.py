"""How much memory a cache takes and how much there is."""

from __future__ import annotations

import re

import psutil
import pytest
import torch
from transformers import LlamaConfig

from paradraft.models.kv_cache import allocate

CPU = torch.device("cpu")


def config(layers: int) -> LlamaConfig:
    return LlamaConfig(hidden_size=1024, num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=layers)


def test_free_memory_is_what_the_system_says() -> None:
    """Guards the refusal of caches that do not fit against a wrong unit, which would refuse all of them or none."""
    with pytest.raises(ValueError, match="use a smaller batch or capacity") as error:
        allocate(config(1000), batch_size=1000, capacity=100_000, dtype=torch.float64, device=CPU)
    said = re.search(r"needs (\S+) GiB and (\S+) GiB are free", str(error.value))
    assert said is not None
    assert float(said[1]) == pytest.approx(2 * 1000 * 1000 * 100_000 * 512 * 8 / 2**30, rel=1e-3)
    assert float(said[2]) == pytest.approx(psutil.virtual_memory().available / 2**30, rel=0.3, abs=0.3)


@pytest.mark.parametrize("head_dim", [None, 16])
def test_a_cache_is_as_large_as_it_says(head_dim: int | None) -> None:
    """Guards the estimate against the memory that is really taken, with a head size of the config and without."""
    made = config(3)
    made.head_dim = head_dim
    layers = allocate(made, batch_size=2, capacity=5, dtype=torch.float32, device=CPU)
    assert [[tuple(tensor.shape) for tensor in layer] for layer in layers] == [[(2, 5, 4, head_dim or 128)] * 2] * 3
