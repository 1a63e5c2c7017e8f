"""Makes an ordinary model folder in bfloat16 of a GGUF file, for training and for everything that reads folders.

`transformers` unpacks the weights, by code that shares nothing with this package's reading of such files. Config,
tokenizer, chat template and ends of texts are those that this package reads: the tokenizer that `transformers` makes of
a GGUF file neither composes characters (NFC) nor takes each digit for itself, so that the folder would read another
prompt than the file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from fetch import CODER_05B, REAL, SMOLLM2
from paradraft.formats.folder import save_model
from paradraft.formats.gguf import SUFFIX
from paradraft.sources import gguf_config
from paradraft.sources.loading import load_tokenizer


def folder_of(file: Path) -> Path:
    """Where the folder of a file goes: beside it, under its name without the type of weights.

    >>> folder_of(Path("build/real/smollm2-135m-instruct.Q4_1.gguf")).as_posix()
    'build/real/smollm2-135m-instruct'
    """
    return file.with_name(file.name.removesuffix(SUFFIX).rpartition(".")[0])


def make_folder(file: Path, folder: Path) -> None:
    """Writes the folder, which appears only when it is whole; one that is there is left alone.

    Args:
        file: a GGUF file.
        folder: where the folder goes.

    Raises:
        ValueError: the file is not one of a supported model.
    """
    if (folder / "config.json").is_file():
        return
    tokenizer, config = load_tokenizer(str(file)), gguf_config.config_of(str(file))
    logging.set_verbosity_error()  # it would advise another dtype
    read = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16, trust_remote_code=False
    )
    # The model that was read counts as quantised, and `save_pretrained` refuses it.
    config.dtype, config.name_or_path = torch.bfloat16, ""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = gguf_config.generation_config_of(str(file))
    save_model(folder, model, tokenizer)


def main() -> None:
    """Makes the folders of the two small files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REAL, help="where the files are, and the folders go")
    args = parser.parse_args()
    for file in (SMOLLM2, CODER_05B):
        path = args.out / file.name
        try:
            make_folder(path, folder_of(path))
        except (ValueError, OSError) as error:
            raise SystemExit(f"real models: {error}") from None
        except KeyboardInterrupt:
            raise SystemExit("real models: interrupted; the same command goes on") from None


if __name__ == "__main__":
    main()
