"""A real server with the demo pair, an update half way, and traffic that makes every part of its page say something."""

import array
import json
import math
import pathlib
import random
import re
import shutil
import struct
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


def perturbed(version, into, tensors, step):
    """A copy of a demo model, in the new folder `into`: tensors whose names begin with `tensors` get
    noise, normally distributed, of step times their root mean square; the same at every call."""
    into = pathlib.Path(into)
    shutil.copytree(ROOT / "models/demo" / version, into)
    file = into / "model.safetensors"
    data = bytearray(file.read_bytes())
    begin = 8 + struct.unpack_from("<Q", data)[0]
    noise = random.Random(20261201)
    changed = 0
    for name, tensor in json.loads(data[8:begin]).items():
        if not name.startswith(tensors):
            continue
        assert tensor["dtype"] == "BF16", name
        here = slice(*(begin + offset for offset in tensor["data_offsets"]))
        halves = array.array("H", data[here])
        wide = array.array("f")  # a bf16 is the upper half of a float
        wide.frombytes(array.array("I", (half << 16 for half in halves)).tobytes())
        scale = step * math.sqrt(sum(value * value for value in wide) / len(wide))
        moved = array.array("f", (value + scale * noise.gauss(0, 1) for value in wide))
        words = array.array("I")
        words.frombytes(moved.tobytes())
        data[here] = array.array("H", (word >> 16 for word in words)).tobytes()  # towards 0: it is noise
        changed += 1
    assert changed > 0, f"no tensor is called {tensors}"
    file.write_bytes(data)
    return into


def quantile(buckets, q):
    """histogram_quantile of PromQL over [(bound, cumulative count)]."""
    total = buckets[-1][1]
    rank, low, before = q * total, 0.0, 0.0
    for bound, upto in buckets:
        if upto >= rank:
            return low if math.isinf(bound) else low + (bound - low) * (rank - before) / (upto - before)
        low, before = bound, upto


def samples(text, name, **labels):
    """[(labels, value)] of /metrics."""
    found = []
    for line in text.splitlines():
        match = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
        if not match:
            continue
        has = dict(re.findall(r'(\w+)="([^"]*)"', match[1] or ""))
        if all(has.get(key) == value for key, value in labels.items()):
            found.append((has, float(match[2])))
    return found


def buckets(text, name, **labels):
    """A histogram of /metrics, its other labels summed over: [(bound, cumulative count)]."""
    merged = {}
    for has, value in samples(text, f"{name}_bucket", **labels):
        merged[float(has["le"])] = merged.get(float(has["le"]), 0) + value
    return sorted(merged.items())


class LiveServer:
    def __init__(self, programs, folder, fidelity, cache=""):
        """fidelity: fields of FidelityConfig beside the rates, which compare everything; cache: of CacheConfig."""
        self.programs, self.folder = pathlib.Path(programs), pathlib.Path(folder)
        self.tasks, self.lengths = TASKS, LENGTHS
        completions, admin, self.http = (f"127.0.0.1:{processes.free_port()}" for _ in range(3))
        self.config = self.folder / "server.txtpb"
        tasks = " ".join(f'tasks: "{task}"' for task in TASKS)
        self.config.write_text(f"""\
listen {{ completions: "{completions}" admin: "{admin}" http: "{self.http}" }}
engine {{ kv_cache_bytes: {256 << 20} }}
cache {{ {cache} }}
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

    def load(self, version, *more, path=None):
        """path: a folder, the version's own by default."""
        path = path or ROOT / "models/demo" / version
        self.client.call("load", "--model", "demo", "--version", version, "--path", str(path), *more)

    def update(self, share):
        """Both versions are there, the target gets so many per cent."""
        self.load_source()
        self.load(TARGET, "--carry-from", SOURCE)
        self.client.call("promote", "--model", "demo", "--version", TARGET, "--share", str(share))

    def load_source(self):
        """And reads what is asked about."""
        self.load(SOURCE)
        self.documents = [self.client.tokenize("demo", SOURCE, text) for text in self.texts]

    def ask(self, requests, max_tokens=12, version=TARGET, reuse="auto"):
        """Each asks about a prefix of its own, which the source has computed before."""
        answers = []
        for _ in range(requests):
            n = self.asked
            self.asked += 1
            document = self.documents[n % len(self.documents)]
            length = self.lengths[n % len(self.lengths)]
            begin = n // len(self.documents) * 16
            prefix = document[begin:begin + length]
            suffix = self.documents[(n * 7 + 3) % len(self.documents)][:SUFFIX_TOKENS]
            self.client.call("warm", "--model", "demo", "--version", SOURCE, "--salt", SALT,
                             "--tokens", ",".join(map(str, prefix)))
            answers.append(self.client.call(
                "complete", "--model", "demo", "--version", version, "--tokens", ",".join(map(str, prefix + suffix)),
                "--max-tokens", str(max_tokens), "--temperature", "0", "--salt", SALT, "--reuse", reuse,
                "--task", self.tasks[n % len(self.tasks)]))
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
