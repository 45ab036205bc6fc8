"""A run of a real server in which every metric moves: a canary with caches carried into it, a cell that closes,
cells that an operator opened, hold-outs, all arms of shadows, blocks that come back from host memory, refusals.

The prompts are random tokens: the answers mean nothing, and the update flips many of them.
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench/demo"))

import processes  # noqa: E402  (of the demo: servers, Prometheus, the client)

MODEL, SOURCE, TARGET = "demo", "2026-10", "2026-11"
# One is left to the gate, which closes it; the operator opens the other.
CLOSES, OPENED = "chat", "retrieval"

CONFIG = """\
listen {{ completions: "{completions}" admin: "{admin}" http: "{http}" }}
load {{ model: "{model}" version: "{source}" path: "{models}/{source}" }}
# Little memory, so that blocks move to the host's and come back; a short queue, so that it fills.
engine {{ kv_cache_bytes: 12582912 host_cache_bytes: 67108864 max_running: 4 max_waiting_requests: 4 }}
fidelity {{
  sample_rate: 1 learning_sample_rate: 1 hold_out_rate: 0.4 control_rate: 1 old_rate: 1
  time_share: 1 kv_share: 1
  tasks: "{closes}" tasks: "{opened}"
  gate {{ flip_limit: 0.01 tv_limit: 0.01 cooldown_seconds: 100000 }}
}}
"""


def start_server(program, folder):
    """Returns (Background, Client, address of /metrics)."""
    completions, admin, http = (f"127.0.0.1:{processes.free_port()}" for _ in range(3))
    config = pathlib.Path(folder) / "server.txtpb"
    config.write_text(CONFIG.format(completions=completions, admin=admin, http=http, model=MODEL, source=SOURCE,
                                    models=ROOT / "models/demo", closes=CLOSES, opened=OPENED))
    server = processes.Background("carryover-server", [program / "carryover-server", "--config", config], folder)
    client = processes.Client(program / "carryover", completions, admin, server)
    processes.wait_for_http(server, f"http://{http}/healthz")
    return server, client, http


class Traffic:
    def __init__(self, client):
        self.client = client

    def load(self, seed, requests, *more, prefixes=None, prefix_tokens=288, output_tokens=4, concurrency=2, task=OPENED):
        """Streams over `prefixes` shared prefixes (default: as many as requests), which the seed decides."""
        return self.client.call(
            "bench", "--concurrency", str(concurrency), "--requests", str(requests), "--seed", str(seed), "--prefixes",
            str(prefixes or requests), "--prefix-tokens", str(prefix_tokens), "--output-tokens", str(output_tokens),
            "--vocabulary", "4096", "--task", task, *more)

    def source_fills_its_cache(self):
        self.load(1, 24, "--version", SOURCE)
        self.load(2, 24, "--version", SOURCE)
        self.load(3, 8, "--version", SOURCE, prefix_tokens=560)

    def canary_starts(self):
        folder = str(ROOT / "models/demo" / TARGET)
        self.client.call("load", "--model", MODEL, "--version", TARGET, "--path", folder, "--carry-from", SOURCE,
                         "--promote", "60")

    def gate(self, state, task):
        self.client.call("fidelity", "set", "--state", state, "--task", task, "--who", "the dashboard's test")

    def gate_learns(self):
        """Served natively, with the carried arm, the control and the source's own answer as shadows."""
        self.load(1, 24, "--version", TARGET, task=CLOSES)

    def carried_traffic(self):
        """The operator's word: carried, with native shadows and hold-outs."""
        self.gate("open", OPENED)
        # Over several scrapes, or a counter that begins with this traffic shows no rise.
        self.load(2, 24, "--version", TARGET, "--rate", "6")
        self.load(3, 8, "--version", TARGET, prefix_tokens=560, output_tokens=12)

    def more_carried_traffic(self, seed):
        """The same with prefixes that are new to both versions."""
        self.load(seed, 16, "--version", SOURCE)
        self.load(seed, 16, "--version", TARGET, "--rate", "6")

    def caches_move(self):
        """Prefixes again whose blocks have gone to the host's memory."""
        self.load(1, 24, "--version", SOURCE)
        self.load(2, 24, "--version", TARGET)

    def queue_overflows(self):
        try:
            self.load(9, 24, "--version", TARGET, prefixes=24, output_tokens=200, concurrency=24)
        except processes.DemoError:
            return  # refused requests count as failed ones, which is what is wanted
        raise processes.DemoError("24 requests at once found room in a queue of 4")

    def operator_leaves(self):
        """The evidence speaks again, which changes states once more."""
        self.gate("closed", OPENED)
        self.gate("evidence", OPENED)
