"""A stand-in for llama-cpp-python and for the Python of its environment: what the worker imports, and how it is run.

Its models add 7 to the last token. The draft model, whose file is called after it, is often wrong.
It looks at what its cache is told, as llama.cpp does: texts have no gaps, and of sequences, logits and tokens there are
no more than there is room for.
"""

from __future__ import annotations

import inspect
from pathlib import Path

from tests.support.fake_vllm import executable

TOKENS, ROWS = 64, 72
"""Ids that are tokens, and rows of the embedding: the last ones have the highest logits."""


def next_token(token: int) -> int:
    """What the target says after a token."""
    return (token + 7) % TOKENS


def drafted_token(token: int) -> int:
    """What the draft model says after it."""
    return (next_token(token) + (token % 9 in (0, 3, 7))) % TOKENS


MODULE = """
import ctypes, os, types
__version__ = "0.0.fake"
GGML_TYPE_F32, LLAMA_FLASH_ATTN_TYPE_DISABLED = 0, 0
LLAMA_FTYPE_MOSTLY_Q8_0, LLAMA_FTYPE_MOSTLY_Q4_0 = 7, 2
print("a line of log, where replies would stand")

def llama_log_callback(hear): return hear
def llama_log_set(hear, _): global log; log = hear
def llama_backend_init(): pass
def llama_version(): return b"0.fake"
def llama_print_system_info(): return b"CPU : FAKE = 1 | "

def llama_model_default_params(): return types.SimpleNamespace()

def llama_model_load_from_file(file, _):
    if not os.path.isfile(file) or os.path.getsize(file) == 0:
        log(4, b"no weights in it\\n", None)
        return None
    return types.SimpleNamespace(file=os.path.basename(file).decode(), is_draft=b"draft" in os.path.basename(file))

def llama_model_get_vocab(model): return model
def llama_vocab_n_tokens(_): return ROWS
def llama_model_size(model): return 1000 + model.is_draft
def llama_model_ftype(model): return model.file.rpartition("-")[2].removesuffix(".gguf")
def llama_ftype_name(kind): return (kind + " - of few bits").encode()

class Rounding(ctypes.Structure):
    _fields_ = [("nthread", ctypes.c_int), ("ftype", ctypes.c_int)]

def llama_model_quantize_default_params(): return Rounding()

def llama_model_quantize(source, file, chosen):
    if not os.path.isfile(source):
        return 1
    with open(file, "wb") as stream:
        stream.write(b"rounded to %d of %d bytes" % (chosen._obj.ftype, os.path.getsize(source)))
    return 0

def llama_context_default_params(): return types.SimpleNamespace(type_k=1, flash_attn_type=-1)

def llama_init_from_model(model, chosen):
    if chosen.n_ctx > 99999:
        log(4, b"out of memory", None)
        return None
    return types.SimpleNamespace(model=model, chosen=chosen, texts=[[] for _ in range(chosen.n_seq_max)])

def llama_free(context): del context.texts
def llama_get_memory(context): return context
def llama_memory_clear(memory, _): memory.texts = [[] for _ in memory.texts]

def llama_memory_seq_rm(memory, number, start, end):
    assert end == -1 and start <= len(memory.texts[number])
    del memory.texts[number][start:]
    return True

def llama_batch_init(size, _, __):
    batch = types.SimpleNamespace(n_tokens=0)
    for name in ("token", "pos", "n_seq_id", "logits"):
        setattr(batch, name, [None] * size)
    batch.seq_id = [[None] for _ in range(size)]
    return batch

def llama_decode(context, batch):
    rows = []
    assert 0 < batch.n_tokens <= context.chosen.n_batch
    for i in range(batch.n_tokens):
        text = context.texts[batch.seq_id[i][0]]
        if batch.pos[i] != len(text) or batch.n_seq_id[i] != 1:
            log(4, b"a gap in a text", None)
            return -1
        text.append(batch.token[i])
        if batch.pos[i] == 0 and batch.token[i] == 13:
            os._exit(7)
        if batch.logits[i]:
            after = drafted_token if context.model.is_draft else next_token
            best = after(batch.token[i])
            # The second best is one further.
            row = [0.0] * ROWS
            row[best], row[(best + 1) % TOKENS], row[ROWS - 1] = 2.0, 1.0, 3.0
            rows.append(row)
    room = context.chosen.n_ctx // len(context.texts)
    assert all(len(text) <= room for text in context.texts)
    assert len(rows) <= context.chosen.n_outputs_max
    context.logits = (ctypes.c_float * (len(rows) * ROWS))(*sum(rows, []))
    return 0

def llama_get_logits(context): return ctypes.cast(context.logits, ctypes.POINTER(ctypes.c_float))
"""


def module() -> str:
    """The source of the module."""
    rules = "\n".join(inspect.getsource(rule) for rule in (next_token, drafted_token))
    return f"from __future__ import annotations\n{MODULE}\nTOKENS, ROWS = {TOKENS}, {ROWS}\n{rules}"


def python(folder: Path) -> Path:
    """An executable that runs a script as the Python of an environment would in which this llama.cpp is installed."""
    modules = folder / "lib" / "python3" / "site-packages"
    modules.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "pyvenv.cfg").touch()
    (modules / "llama_cpp.py").write_text(module(), encoding="utf-8")
    code = f"""import runpy, sys
assert sys.argv[1] == "-I"
del sys.argv[1]
sys.path.insert(0, {str(modules)!r})
runpy.run_path(sys.argv[1], run_name="__main__")
"""
    return executable(folder / "bin" / "python", code)
