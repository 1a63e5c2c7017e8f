"""Checkpoints of PARD-2: AMD's keys and file, and what is refused."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from paradraft.formats.pard import declare_masks, forget_states
from paradraft.formats.pard2 import PROJECTION, StateProjection, projection_file, read_projection

D, S = 6, 4


def config_of(folder: Path, **settings: Any) -> PretrainedConfig:
    config = PretrainedConfig(hidden_size=D, **settings)
    config.name_or_path = str(folder)
    return config


def projection(*, bias: bool = False) -> StateProjection:
    weight = torch.arange(D * 2 * S, dtype=torch.float32).view(D, 2 * S)
    return StateProjection(layers=(-1, -8), scale=0.5, weight=weight, bias=torch.ones(D) if bias else None)


@pytest.mark.parametrize("bias", [False, True])
def test_a_projection_is_read_as_it_was_written(tmp_path: Path, bias: bool) -> None:
    """Guards a drafter's weights, scale and layers on their way through its files."""
    written, config = projection(bias=bias), config_of(tmp_path)
    declare_masks(config, 3)
    written.declare(config)
    (tmp_path / PROJECTION).write_bytes(written.file())
    assert config.spd_type == "pard2" and config.pard2 and config.pard2_target_dim == 2 * S
    read = read_projection(config, width=S)
    assert (read.layers, read.scale) == ((-1, -8), 0.5) and torch.equal(read.weight, written.weight)
    assert (read.bias is not None) == bias == config.pard2_proj_bias
    assert written.file() == projection(bias=bias).file(), "equal weights give equal bytes"
    assert projection_file(config) == {PROJECTION: written.file()}
    forget_states(config)
    assert (config.spd_type, config.pard_token, projection_file(config)) == ("pard", 3, {})


def test_amds_files_are_read(tmp_path: Path) -> None:
    """Guards published drafters: torch.save of a state dict in bfloat16, and keys as AMD's code writes them."""
    weight = torch.randn(D, S).bfloat16()
    torch.save({"target_proj.weight": weight}, tmp_path / "warp_model.bin")
    config = config_of(
        tmp_path, pard_token=5, spd_type="pard2", pard2=True, pard2_scale=0.02, pard2_proj_bias=False,
        pard2_target_dim=S, pard2_target_layers=[-1],
    )  # fmt: skip
    read = read_projection(config, width=S)
    assert read.layers == (-1,) and read.scale == 0.02 and torch.equal(read.weight, weight.float())


class Planted:
    """What a hostile file would run."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return print, ("run by a file",)


def saved(contents: object) -> bytes:
    buffer = BytesIO()
    torch.save(contents, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("settings", "contents", "message"),
    [
        ({}, None, r"reads no states \(pard2_target_layers in config.json\): use it with drafter pard"),
        ({"pard2_target_layers": [-1.5]}, None, r"pard2_target_layers in its config.json is \[-1.5\]: train it again"),
        ({"pard2_target_layers": []}, None, r"is \[\]: train it again"),
        ({"pard2_target_layers": [-1], "pard2_scale": "x"}, None, "pard2_scale in its config.json is 'x'"),
        ({"pard2_target_layers": [-1]}, None, r"its warp_model.bin cannot be read \(.*: train it again"),
        ({"pard2_target_layers": [-1]}, b"", "its warp_model.bin cannot be read"),
        ({"pard2_target_layers": [-1]}, b"not torch's", "its warp_model.bin cannot be read"),
        ({"pard2_target_layers": [-1]}, saved({})[:-9], "its warp_model.bin cannot be read"),
        ({"pard2_target_layers": [-1]}, saved({"other": torch.ones(1)}), "its warp_model.bin cannot be read"),
        ({"pard2_target_layers": [-1]}, saved([1]), "its warp_model.bin cannot be read"),
        ({"pard2_target_layers": [-1]}, saved({"target_proj.weight": Planted()}), "its warp_model.bin cannot be read"),
        ({"pard2_target_layers": [-1]}, saved({"target_proj.weight": torch.full((D, S), torch.nan)}), "does not fit"),
        ({"pard2_target_layers": [-1]}, saved({"target_proj.weight": torch.ones(D + 1, S)}), "does not fit"),
        (
            {"pard2_target_layers": [-1]},
            saved({"target_proj.weight": torch.ones(D, S), "target_proj.bias": torch.ones(D + 1)}),
            "does not fit",
        ),
        (
            {"pard2_target_layers": [-1, 2]},
            saved({"target_proj.weight": torch.ones(D, S)}),
            "another target: it reads states of 2 numbers, and this one has 4",
        ),
    ],
)
def test_damaged_and_other_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any], contents: bytes | None, message: str
) -> None:
    """Guards one clear line for each, and that a file's code is never run."""
    if contents is not None:
        (tmp_path / PROJECTION).write_bytes(contents)
    with pytest.raises(ValueError, match=message):
        read_projection(config_of(tmp_path, **settings), width=S)
    assert not capsys.readouterr().out
