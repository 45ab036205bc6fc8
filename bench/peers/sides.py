"""The two sides of the comparison. Both answer run(tokens, new_tokens) greedily with a Sample."""

import dataclasses
import json
import subprocess

import processes
from processes import DemoError


@dataclasses.dataclass
class Sample:
    first_ms: float  # from the request to the first token
    rest_ms: float  # from there to the last token
    tokens: list
    engine_ms: float | None = None  # of first_ms, what the engine computed; the rest is gRPC, queue and client


class Ours:
    """carryover-server over gRPC: times are the client's, so they hold everything that a user waits for."""

    name = "carryover"

    def __init__(self, client, model):
        self.client = client
        self.model = model
        self.calls = 0

    def run(self, tokens, new_tokens):
        self.calls += 1
        response = self.client.call(
            "complete", "--model", self.model, "--tokens", ",".join(map(str, tokens)), "--max-tokens", str(new_tokens),
            "--temperature", "0", "--ignore-eos", "--stream", "--reuse", "native", "--store=false",
            "--salt", f"cold-{self.calls}")
        usage, answer = response["usage"], response["choices"][0]["token_ids"]
        if usage["computed_tokens"] != len(tokens) or len(answer) != new_tokens:
            raise DemoError(f"the server computed {usage['computed_tokens']} of {len(tokens)} tokens and gave {len(answer)} of "
                            f"{new_tokens}")
        first = response["client"]["ttft_ms"]
        return Sample(first, response["client"]["e2e_ms"] - first, answer, 1000 * response["timing"]["prefill"])


@dataclasses.dataclass(frozen=True)
class Setting:
    precision: str
    flash: bool
    ubatch: int

    def __str__(self):
        return f"{self.precision}, flash {'on' if self.flash else 'off'}, ubatch {self.ubatch}"


class Worker:
    """The process that llama_worker.py runs in."""

    def __init__(self, python, script, log, files, context, threads):
        self.files = files
        self.fixed = {"context": context, "threads": threads}
        self.log = log
        with open(log, "wb") as errors:
            self.process = subprocess.Popen([str(python), str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                            stderr=errors, text=True, start_new_session=True,
                                            preexec_fn=processes.die_with_parent)

    def ask(self, request):
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            raise DemoError(f"llama.cpp's process ended with status {self.process.wait()}:\n{tail}")
        answer = json.loads(line)
        if "error" in answer:
            raise DemoError(answer["error"])
        return answer

    def run(self, setting, tokens, new_tokens):
        answer = self.ask({"op": "run", "gguf": str(self.files[setting.precision]), "flash": setting.flash,
                           "ubatch": setting.ubatch, "tokens": tokens, "new_tokens": new_tokens, **self.fixed})
        return Sample(1000 * answer["first_s"], 1000 * answer["rest_s"], answer["tokens"])

    def stop(self):
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Llama:
    """llama.cpp in one setting: times are taken around its C functions, without any server."""

    def __init__(self, worker, setting):
        self.worker = worker
        self.setting = setting
        self.name = str(setting)

    def run(self, tokens, new_tokens):
        return self.worker.run(self.setting, tokens, new_tokens)
