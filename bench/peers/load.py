"""Clients in a closed loop against one server: each sends its next request when the last one has ended."""

import dataclasses
import queue
import threading
import time

import measure
from processes import DemoError


@dataclasses.dataclass
class Taken:
    """What a run of all requests gave."""
    output_tokens_per_s: float
    ttft_ms: list
    answers: list  # of each request, in the order in which they were given

    def ttft(self, share):
        return measure.quantile(self.ttft_ms, share)


def run(server, prompts, clients, new_tokens):
    """Taken. server: name, and stream(prompt, new_tokens), which yields lists of tokens as they come."""
    waiting = queue.SimpleQueue()
    for item in enumerate(prompts):
        waiting.put(item)
    answers, ttft, failed = [None] * len(prompts), [0.0] * len(prompts), []

    def client():
        while not failed:
            try:
                index, prompt = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                tokens, first, sent = [], None, time.perf_counter()
                for piece in server.stream(prompt, new_tokens):
                    first = first or time.perf_counter()
                    tokens += piece
                if len(tokens) != new_tokens:
                    raise DemoError(f"{server.name} gave {len(tokens)} of {new_tokens} tokens")
                answers[index], ttft[index] = tokens, 1000 * (first - sent)
            except Exception as error:  # told by the caller's thread
                failed.append(error)

    threads = [threading.Thread(target=client, daemon=True) for _ in range(clients)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
    if failed:
        raise failed[0] if isinstance(failed[0], DemoError) else DemoError(f"{server.name}: {failed[0]!r}")
    return Taken(len(prompts) * new_tokens / seconds, ttft, answers)
