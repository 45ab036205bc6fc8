"""llama-server for the side-by-side of whole servers: its process, and a streamed completion over HTTP."""

import http.client
import json

import processes


def pieces(lines):
    """Lists of token ids. Tokens that end within a character are held back by the server and never named: None each, at the
    end, where it tells how many there were."""
    seen = 0
    for line in lines:
        if not line.startswith(b"data: "):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise processes.DemoError(f"llama-server: {event['error']}")
        if event.get("stop"):
            yield [None] * (event["tokens_predicted"] - seen)
        elif event.get("tokens"):
            seen += len(event["tokens"])
            yield event["tokens"]


class LlamaServer:
    name = "llama-server"

    def __init__(self, places, gguf, folder, slots, slot_tokens, threads):
        self.port = processes.free_port()
        # A slot keeps its last prompt and goes to the request that shares most with it; what a slot loses is kept in memory
        # (--cache-ram's default). Both are the server's own defaults, named so that they stay on.
        command = [places.llama / "llama-server", "--model", gguf, "--host", "127.0.0.1", "--port", self.port,
                   "--threads", threads, "--threads-batch", threads, "--parallel", slots, "--ctx-size", slots * slot_tokens,
                   "--no-kv-unified", "--flash-attn", "on", "--cont-batching", "--cache-prompt", "--no-ui", "--no-warmup"]
        self.process = processes.Background(self.name, list(map(str, command)), folder)
        processes.wait_for_http(self.process, f"http://127.0.0.1:{self.port}/health", 120)

    def stream(self, tokens, new_tokens):
        """Yields lists of token ids as they come."""
        # One for each request: a connection that has carried a stream may be closed when the next one comes.
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        body = {"prompt": tokens, "n_predict": new_tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": True,
                "stream": True, "return_tokens": True, "samplers": ["temperature"]}
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise processes.DemoError(f"llama-server answered {response.status}: {response.read()[:300]!r}")
        yield from pieces(response)

    def stop(self):
        self.process.stop()
