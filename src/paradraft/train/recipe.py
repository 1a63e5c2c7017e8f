"""A recipe: everything that decides one training run, in one YAML file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paradraft.train.losses import Reduction


class PardRecipe(BaseModel):
    """Settings of `paradraft train pard`; the defaults of k, r and r_min are the paper's.

    Paths are relative to the folder the command runs in.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(description="the draft to adapt: a Hugging Face id, a folder, or pocket")
    data: list[Path] = Field(min_length=1, description="text or JSONL files")
    out: Path = Field(description="where the drafter goes")
    k: int = Field(
        default=8,
        ge=1,
        description="tokens that one draft pass learns to predict; 1 trains an ordinary draft, without a mask token",
    )
    r: float = Field(default=0.7, gt=0, le=1, description="COD: share of rows kept from depth to depth")
    r_min: float = Field(default=0.2, ge=0, le=1, description="COD: least share of rows at any depth")
    teacher: str | None = Field(
        default=None, description="learn this model's probabilities for each token instead of the token alone"
    )
    loss: Reduction = Field(default="per_depth", description="per_depth (Eq. 8) or token_mean")
    mask_token_id: int | None = Field(default=None, description="by default an unused row of the embedding")
    steps: int = Field(ge=1, description="optimizer steps")
    samples_per_step: int = Field(default=8, ge=1, description="samples of one step")
    max_length: int = Field(default=1024, ge=2, description="tokens of a sample; longer ones are split")
    optimizer: Literal["adamw", "muon"] = Field(
        default="adamw", description="muon: for the matrices; AdamW for the rest"
    )
    lr: float = Field(default=2e-5, gt=0, description="AdamW's highest learning rate")
    muon_lr: float = Field(default=1e-2, gt=0, description="Muon's highest learning rate")
    weight_decay: float = Field(default=0.0, ge=0, description="of the matrices")
    warmup_steps: int = Field(default=50, ge=0, description="linear warm-up; linear decay to 0 follows")
    bf16: bool | None = Field(
        default=None, description="compute in bf16 (weights stay in float32); by default where the device can"
    )
    device: str = Field(default="cpu", description="a torch device")
    seed: int = Field(default=0, ge=0, lt=2**31, description="of the order of samples and the dropped rows")
    log_every: int = Field(default=10, ge=1, description="steps between reports")
    save_every: int = Field(default=100, ge=1, description="steps between checkpoints")

    @property
    def fingerprint(self) -> str:
        """Tells runs apart whose checkpoints do not fit each other: by settings and by the bytes of the data."""
        ignored = {"log_every", "save_every", "out"}
        digest = hashlib.sha256(self.model_dump_json(exclude=ignored).encode())
        for file in self.data:
            if file.is_file():
                with file.open("rb") as stream:
                    digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()[:16]

    def write_record(self, file: Path) -> None:
        """Writes the recipe and its fingerprint as JSON."""
        record = {"fingerprint": self.fingerprint, "recipe": self.model_dump(mode="json")}
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read_fingerprint(file: Path) -> str | None:
    """The fingerprint in a record; None if there is no record."""
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def load_recipe(file: Path, overrides: list[str]) -> PardRecipe:
    """Reads a recipe and applies `key=value` overrides.

    Raises:
        ValueError: the file does not exist or is no mapping, a key is unknown, a value does not
            fit.
    """
    if not file.is_file():
        raise ValueError(f"recipe {str(file)!r} does not exist")
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"recipe {file} is not UTF-8 text ({error.reason})") from None
    except yaml.YAMLError as error:
        raise ValueError(f"recipe {file} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"recipe {file} must hold `key: value` lines")
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ValueError(f"{override!r}: write overrides as key=value")
        try:
            settings[key] = _yaml_value(value)
        except yaml.YAMLError:
            raise ValueError(f"{override!r}: {value!r} is not a YAML value") from None
    try:
        return PardRecipe.model_validate(settings)
    except ValidationError as error:
        raise ValueError("; ".join(_complaint(e["loc"], e["msg"], e["input"]) for e in error.errors())) from None


def _yaml_value(text: str) -> object:
    # YAML 1.1 reads 1e-3 as a string; people write learning rates like that.
    try:
        return float(text) if "e" in text.lower() else yaml.safe_load(text)
    except ValueError:
        return yaml.safe_load(text)


def _complaint(location: tuple[int | str, ...], message: str, given: object) -> str:
    key = ".".join(map(str, location))
    if "Extra inputs" in message:
        return f"unknown recipe key {key!r}; known are {', '.join(PardRecipe.model_fields)}"
    if message == "Field required":
        return f"recipe key {key!r} is missing"
    return f"recipe key {key!r}: {message[0].lower()}{message[1:]}, not {given!r}"
