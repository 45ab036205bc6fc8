"""The servers that are compared, and the load on them."""

import dataclasses
import json
import os
import pathlib
import re
import statistics
import subprocess
import time

import processes

ROOT = pathlib.Path(__file__).resolve().parents[2]
CHUNK = 128  # tokens of a background pass, the server's FidelityOptions::chunk_tokens
SATURATING = 32  # streams of the closed loop


@dataclasses.dataclass
class Workload:
    folder: pathlib.Path
    prefixes: int  # different ones: too few for a gate to open on
    prefix_tokens: int
    suffix_tokens: int
    output_tokens: int
    kv_cache_bytes: int
    rounds: int
    seconds: float

    def describe(self):
        return {"prefixes": self.prefixes, "prefix_tokens": self.prefix_tokens, "suffix_tokens": self.suffix_tokens,
                "output_tokens": self.output_tokens}


WORKLOADS = {
    "demo": Workload(ROOT / "models/demo/2026-10", 24, 512, 32, 16, 512 << 20, 5, 12),
    "smollm2": Workload(ROOT / "models/smollm2/2026-10", 12, 256, 32, 16, 1 << 30, 3, 40),
}


SUMS = {"carryover_shadow_tokens_total": "tokens", "carryover_shadow_delay_seconds_count": "delays",
        "carryover_shadow_delay_seconds_sum": "delay_s"}


def machine(root):
    cpu = "unknown CPU"
    with open("/proc/cpuinfo", encoding="utf-8") as info:
        for line in info:
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    commit = subprocess.run(["git", "-C", str(root), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "load_average": round(os.getloadavg()[0], 2),
            "commit": commit.stdout.strip() or None, "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}


class Server:
    """One carryover-server with a source S and a target T of equal weights."""

    def __init__(self, work, name, rate, options, folder, background):
        self.work = work
        self.folder = pathlib.Path(folder)
        self.name = name
        self.client_program = str(options.programs / "carryover")
        completions, admin, http = (f"127.0.0.1:{processes.free_port()}" for _ in range(3))
        version = f'model: "m" path: "{work.folder.resolve()}" '
        config = self.folder / f"{name}.txtpb"
        config.write_text(f"""\
listen {{ completions: "{completions}" admin: "{admin}" http: "{http}" }}
log_level: "warning"
load {{ {version} version: "S" }}
load {{ {version} version: "T" carry_from: "S" distinct: "control" promote: 100 }}
# The queue is short, so that an overload is steady: what does not fit is refused.
engine {{ kv_cache_bytes: {work.kv_cache_bytes} max_waiting_requests: {2 * SATURATING} }}
# Nobody is held out, so that both servers answer the same requests in the same way.
fidelity {{ sample_rate: {rate} learning_sample_rate: {rate} hold_out_rate: 0 {options.fidelity if rate > 0 else ""} }}
""")
        self.process = processes.Background(f"server-{name}",
                                            [str(options.programs / "carryover-server"), "--config", str(config)], folder)
        background.append(self.process)
        self.metrics_url = f"http://{http}/metrics"
        processes.wait_for_http(self.process, f"http://{http}/healthz", 120)
        self.client = processes.Client(self.client_program, completions, admin, self.process)

    def bench(self, seed, version, requests, *more, records=None):
        """`carryover bench` with this workload's prompts. Failed requests are counted, no error."""
        report = self.folder / f"{self.name}.report.json"
        wanted = [] if records is None else ["--records", str(records)]
        command = [self.client_program, "bench", "--json", "--out", str(report), "--model", "m", "--version", version,
                   "--seed", str(seed), "--requests", str(requests), "--prefixes", str(self.work.prefixes),
                   "--prefix-tokens", str(self.work.prefix_tokens), *wanted, *more]
        done = subprocess.run(command, env=self.client.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True)
        self.process.check()
        if done.returncode not in (0, 1) or not report.exists():
            raise processes.DemoError(f"carryover bench failed with status {done.returncode}: {done.stderr.strip()}")
        return json.loads(report.read_text())

    def warm(self, seed):
        """Puts this seed's prefixes into the source's cache."""
        self.bench(seed, "S", self.work.prefixes, "--suffix-tokens", "1", "--output-tokens", "1")
        self.wait_for_shadows()

    def load(self, seed, requests, *how, records=None):
        return self.bench(seed, "T", requests, "--suffix-tokens", str(self.work.suffix_tokens), "--output-tokens",
                          str(self.work.output_tokens), "--store=false", *how, records=records)

    def turn(self, direction):
        state = "open" if direction == "carried" else "evidence"
        self.client.call("fidelity", "set", "--source", "S", "--state", state, "--who", "bench")

    def capacity(self, seconds):
        """Requests a second that a closed loop gets, after one that does not count."""
        self.warm(7)
        best = 0
        for _ in range(3):
            report = self.load(7, 1000000, "--concurrency", str(SATURATING), "--seconds", str(min(seconds, 15)))
            # The end, when streams run out, is no part of it: it is short beside the run.
            best = max(best, report["request_throughput"])
        return best

    def background_layer_ms(self):
        """About what one layer of a background pass takes: a prefill of as many tokens, by the layers."""
        layers = json.loads((self.work.folder / "config.json").read_text())["num_hidden_layers"]
        report = self.bench(3, "S", 15, "--concurrency", "1", "--warmup", "5", "--prefix-tokens", "0",
                            "--suffix-tokens", str(CHUNK), "--output-tokens", "1", "--store=false")
        return report["median_ttft_ms"] / layers

    def open_loop(self, seed, rate, requests):
        """Times of one run, and what became of its shadows."""
        records = self.folder / f"{self.name}.jsonl"
        before = self.shadows()
        report = self.load(seed, requests, "--rate", str(rate), records=records)
        after = self.shadows()
        self.wait_for_shadows()
        drained = self.shadows()
        lines = [json.loads(line) for line in records.read_text().splitlines()]
        lines.sort(key=lambda line: line["index"])
        good = [line for line in lines if line["completed"]]
        return {
            "server": self.name, "seed": seed, "completed": report["completed"], "failed": report["failed"],
            "errors": report["errors"], "duration": report["duration"],
            "most_at_once": report["max_concurrent_requests"], "carried_tokens": report["carried_tokens"],
            "ttft_ms": [line["ttft_ms"] for line in good],
            # As the server timed it: without the load generator, which wants the processor, too.
            "server_ttft_ms": [line["server_ttft_ms"] for line in good],
            "itl_ms": [gap for line in good for gap in line["itl_ms"]],
            # Until the last user's request ended; then nobody was in the way of those that still waited.
            "shadows": {key: after[key] - before.get(key, 0) for key in after},
            "shadows_drained": {key: drained[key] - before.get(key, 0) for key in drained},
        }

    def shadows(self):
        """Of the served requests' own other arm, by how it ended; how many wait; and how long users waited for them."""
        counts = {"waiting": 0, "tokens": 0, "delays": 0, "delay_s": 0}
        for line in processes.http_get(self.metrics_url).splitlines():
            name, _, value = line.rpartition(" ")
            found = re.fullmatch(r'carryover_shadow_total\{arm="(native|carried)",outcome="(\w+)"\}', name)
            if found and float(value) > 0:
                counts[found[2]] = counts.get(found[2], 0) + float(value)
            elif name == "carryover_shadows_waiting":
                counts["waiting"] = float(value)
            elif name in SUMS:
                counts[SUMS[name]] = float(value)
        return counts

    def wait_for_shadows(self):
        deadline = time.monotonic() + 120
        while self.shadows()["waiting"] > 0:
            if time.monotonic() > deadline:
                raise processes.DemoError("shadows do not end")
            time.sleep(0.05)
