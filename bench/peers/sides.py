"""The sides of the comparison. Each answers run(prompts, new_tokens) greedily with a Sample."""

import dataclasses
import json
import os
import subprocess
import time

import processes
from ours import COLD, WARM
from processes import DemoError


@dataclasses.dataclass
class Sample:
    first_ms: float  # from the request to the first token of everyone
    rest_ms: float  # from there to everyone's last
    tokens: list  # of each prompt


class Ours:
    """carryover-server over gRPC. One prompt's first token is timed by the client, with all that a user waits for; the
    tokens after it by the server, from the first one of anybody to the last of everybody."""

    name = "carryover"
    setting = "as it comes"

    def __init__(self, server, version):
        self.server = server
        self.version = version
        self.calls = 0

    def run(self, prompts, new_tokens):
        if new_tokens == 1:
            return self.first_token(*prompts)
        # The prompts' blocks are stored first, so that no prefill runs among the steps that are timed.
        for prompt in prompts:
            self.server.complete(self.version, prompt, 1, WARM, store=True).result()
        calls = [(time.perf_counter(), self.server.complete(self.version, prompt, new_tokens, WARM)) for prompt in prompts]
        answers = [(sent, call.result()) for sent, call in calls]
        for prompt, (_, answer) in zip(prompts, answers):
            if answer.usage.cached_tokens < len(prompt) - 16 or answer.usage.completion_tokens != new_tokens:
                raise DemoError(f"the server had {answer.usage.cached_tokens} of {len(prompt)} tokens cached and gave "
                                f"{answer.usage.completion_tokens} of {new_tokens}")
        first = min(sent + answer.timing.first_token for sent, answer in answers)
        last = max(sent + answer.timing.total for sent, answer in answers)
        return Sample(0, 1000 * (last - first), [list(answer.choices[0].token_ids) for _, answer in answers])

    def first_token(self, prompt):
        self.calls += 1
        begin = time.perf_counter()
        answer = self.server.complete(self.version, prompt, 1, f"{COLD}-{self.calls}").result()
        seconds = time.perf_counter() - begin
        if answer.usage.computed_tokens != len(prompt):
            raise DemoError(f"the server computed {answer.usage.computed_tokens} of {len(prompt)} tokens")
        return Sample(1000 * seconds, 0, [list(answer.choices[0].token_ids)])


class Worker:
    """A process that one of the *_worker.py runs in."""

    def __init__(self, python, script, log, environment=()):
        self.log = log
        with open(log, "wb") as errors:
            self.process = subprocess.Popen([str(python), str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                            stderr=errors, text=True, start_new_session=True,
                                            env={**os.environ, **dict(environment)}, preexec_fn=processes.die_with_parent)

    def ask(self, request):
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            raise DemoError(f"a peer's process ended with status {self.process.wait()}:\n{tail}")
        answer = json.loads(line)
        if "error" in answer:
            raise DemoError(answer["error"])
        return answer

    def stop(self):
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Peer:
    """A peer in one setting: times are taken around its library's calls, without any server."""

    def __init__(self, name, setting, worker, fixed):
        self.name = name
        self.setting = setting
        self.worker = worker
        self.fixed = fixed

    def run(self, prompts, new_tokens):
        answer = self.worker.ask({"op": "run", "prompts": prompts, "new_tokens": new_tokens, **self.fixed})
        return Sample(1000 * answer["first_s"], 1000 * answer["rest_s"], answer["tokens"])
