"""A real server with the demo pair, an update half way, and traffic that makes every part of its page say something."""

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench/demo"))

import processes  # noqa: E402

SOURCE, TARGET = "2026-10", "2026-11"
TASKS = ["qa", "chat"]
LENGTHS = [320, 640]  # of prefixes: two buckets
SUFFIX_TOKENS = 24
SALT = "page-test-salt"  # must never be seen on the page


class LiveServer:
    def __init__(self, programs, folder, fidelity):
        """fidelity: fields of FidelityConfig beside the rates, which compare everything."""
        self.programs, self.folder = pathlib.Path(programs), pathlib.Path(folder)
        completions, admin, self.http = (f"127.0.0.1:{processes.free_port()}" for _ in range(3))
        self.config = self.folder / "server.txtpb"
        tasks = " ".join(f'tasks: "{task}"' for task in TASKS)
        self.config.write_text(f"""\
listen {{ completions: "{completions}" admin: "{admin}" http: "{self.http}" }}
engine {{ kv_cache_bytes: {256 << 20} }}
fidelity {{
  sample_rate: 1 learning_sample_rate: 1 control_rate: 1 old_rate: 1 {tasks} {fidelity}
}}
drain_timeout_seconds: 20
""")
        self.url = f"http://{self.http}"
        self.start()
        self.client = processes.Client(self.programs / "carryover", completions, admin, self.process)
        rows = (json.loads(line) for line in (ROOT / "models/demo/prompts.jsonl").read_text().splitlines())
        self.texts = [row["text"] for row in rows if row["kind"] == "text" and row["tokens"] > LENGTHS[-1] + SUFFIX_TOKENS]
        self.asked = 0

    def start(self):
        """Also again, on the same addresses, after its end."""
        self.process = processes.Background(
            "server", [self.programs / "carryover-server", "--config", str(self.config)], self.folder)
        processes.wait_for_http(self.process, f"{self.url}/healthz")

    def stop(self):
        self.process.stop()

    def load(self, version, *more):
        self.client.call("load", "--model", "demo", "--version", version, "--path", str(ROOT / "models/demo" / version), *more)

    def update(self, share):
        """Both versions are there, the target gets so many per cent."""
        self.load(SOURCE)
        self.load(TARGET, "--carry-from", SOURCE)
        self.client.call("promote", "--model", "demo", "--version", TARGET, "--share", str(share))
        self.documents = [self.client.tokenize("demo", SOURCE, text) for text in self.texts]

    def ask(self, requests, max_tokens=12, version=TARGET, reuse="auto"):
        """Each asks about a prefix of its own, which the source has computed before."""
        answers = []
        for _ in range(requests):
            n = self.asked
            self.asked += 1
            document = self.documents[n % len(self.documents)]
            length = LENGTHS[n % len(LENGTHS)]
            begin = n // len(self.documents) * 16
            prefix = document[begin:begin + length]
            suffix = self.documents[(n * 7 + 3) % len(self.documents)][:SUFFIX_TOKENS]
            self.client.call("warm", "--model", "demo", "--version", SOURCE, "--salt", SALT,
                             "--tokens", ",".join(map(str, prefix)))
            answers.append(self.client.call(
                "complete", "--model", "demo", "--version", version, "--tokens", ",".join(map(str, prefix + suffix)),
                "--max-tokens", str(max_tokens), "--temperature", "0", "--salt", SALT, "--reuse", reuse,
                "--task", TASKS[n % len(TASKS)]))
        return answers

    def begin_long_answer(self):
        """Of seconds; its caller is gone when the server is."""
        command = [self.client.program, "complete", "--model", "demo", "--prompt", "Once", "--max-tokens", "3800", "--ignore-eos",
                   "--n", "16"]
        return subprocess.Popen(command, env=self.client.environment, stdin=subprocess.DEVNULL,
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                preexec_fn=processes.die_with_parent)

    def metrics(self):
        return processes.http_get(f"{self.url}/metrics")

    def status(self):
        return json.loads(processes.http_get(f"{self.url}/status.json"))

    def force(self, state, **pattern):
        options = [part for name, value in pattern.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        return self.client.call("fidelity", "set", "--state", state, "--who", "page test", *options)
