"""The processes of the demo: the server, Prometheus, and calls of the carryover client.

Everything listens on loopback, writes into one temporary folder and ends with the demo, however that ends.
"""

import ctypes
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request


class DemoError(Exception):
    """Something that the user should read, without a traceback."""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def die_with_parent():
    """In a child before it runs: the kernel ends it when the demo is gone, even if that was killed."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


class Background:
    """A process that runs until stop(). Its output goes to a file in the demo's folder."""

    def __init__(self, name, command, folder):
        self.name = name
        self.log = pathlib.Path(folder) / f"{name}.log"
        # A session of its own, so that Ctrl-C reaches the demo alone, which then stops it in order.
        with open(self.log, "wb") as output:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                            start_new_session=True, preexec_fn=die_with_parent)

    def check(self):
        if self.process.poll() is not None:
            raise DemoError(f"{self.name} ended with status {self.process.returncode}:\n{self.last_lines()}")

    def last_lines(self, count=15):
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join("    " + line for line in lines[-count:])

    def stop(self, patience=20):
        if self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start_server(program, folder, kv_cache_bytes, threads=0):
    """Starts carryover-server without any version. Returns (Background, completions, admin, http).

    threads: for the maths; 0 is the server's default.
    """
    completions, admin, http = (f"127.0.0.1:{free_port()}" for _ in range(3))
    config = pathlib.Path(folder) / "server.txtpb"
    config.write_text(f"""\
listen {{
  completions: "{completions}"
  admin: "{admin}"
  http: "{http}"
}}
engine {{ kv_cache_bytes: {kv_cache_bytes} threads: {threads} }}
cache {{ when_learning: CARRY }}
# Nothing in the background, and nobody held out: what is measured here is time.
fidelity {{ sample_rate: 0 learning_sample_rate: 0 hold_out_rate: 0 }}
""")
    return Background("carryover-server", [program, "--config", str(config)], folder), completions, admin, http


def start_prometheus(folder, target):
    """Starts a Prometheus that scrapes `target` every second. Returns (Background, its URL)."""
    program = shutil.which("prometheus")
    if program is None:
        raise DemoError("prometheus is not installed; scripts/setup installs it")
    address = f"127.0.0.1:{free_port()}"
    config = pathlib.Path(folder) / "prometheus.yml"
    config.write_text(f"""\
global:
  scrape_interval: 1s
scrape_configs:
  - job_name: carryover
    static_configs:
      - targets: ["{target}"]
""")
    command = [program, f"--config.file={config}", f"--storage.tsdb.path={pathlib.Path(folder) / 'prometheus'}",
               f"--web.listen-address={address}", "--log.level=warn"]
    return Background("prometheus", command, folder), f"http://{address}"


def http_get(url, seconds=5):
    with urllib.request.urlopen(url, timeout=seconds) as answer:
        return answer.read().decode()


def wait_for_http(background, url, seconds=30):
    deadline = time.monotonic() + seconds
    while True:
        background.check()
        try:
            return http_get(url)
        except (urllib.error.URLError, OSError) as error:
            if time.monotonic() > deadline:
                raise DemoError(f"{background.name} does not answer at {url}: {error}\n{background.last_lines()}")
        time.sleep(0.2)


def prometheus_query(url, expression):
    """[(labels, value)] of an instant query."""
    answer = json.loads(http_get(f"{url}/api/v1/query?" + urllib.parse.urlencode({"query": expression})))
    return [(sample["metric"], float(sample["value"][1])) for sample in answer["data"]["result"]]


class Client:
    """Calls build/bin/carryover with --json and gives back what it printed."""

    def __init__(self, program, completions, admin, server):
        self.program = program
        self.server = server
        self.environment = {**os.environ, "CARRYOVER_ADDRESS": completions, "CARRYOVER_ADMIN": admin}

    def call(self, *arguments, show_progress=False, text=None):
        """show_progress: what the client says on standard error reaches the user as it comes."""
        result = subprocess.run([self.program, *arguments, "--json"], env=self.environment, input=text or "",
                                stdout=subprocess.PIPE, stderr=None if show_progress else subprocess.PIPE, text=True)
        if result.returncode != 0:
            self.server.check()
            reason = (result.stderr or "").strip() or result.stdout.strip()
            raise DemoError(f"carryover {arguments[0]} failed with status {result.returncode}: {reason}\n"
                            f"the server's last lines:\n{self.server.last_lines()}")
        try:
            return json.loads(result.stdout)
        except ValueError:
            raise DemoError(f"carryover {arguments[0]} --json printed no JSON: {result.stdout[:200]!r}")

    def tokenize(self, model, version, text):
        return self.call("tokenize", "--file", "-", "--model", model, "--version", version,
                         "--add-special-tokens=false", text=text)["tokens"]

    def complete(self, model, tokens, max_tokens, salt, reuse, version=None):
        """A greedy completion that leaves the cache as it is."""
        chosen = ["--version", version] if version else []
        return self.call("complete", "--model", model, *chosen, "--tokens", ",".join(map(str, tokens)),
                         "--max-tokens", str(max_tokens), "--temperature", "0", "--salt", salt, "--reuse", reuse,
                         "--store=false")
