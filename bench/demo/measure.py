"""Runs every case in every way and sums up what came back.

  old      the source version with its own cache: what the answers were before the update
  native   the target computes prefix and suffix; nothing is cached
  hit      the target reads the prefix from its own cache
  carried  the target reads the prefix from the cache that the source left
"""

import itertools
import statistics

from cases import SUFFIX_TOKENS
from processes import DemoError

ARMS = ("native", "hit", "carried")
# All orders in turn, so that no arm always runs right after the same other one.
ORDERS = list(itertools.permutations(ARMS))
ANSWER_TOKENS = 16
# Requests share cached prefixes only within a salt: one holds the source's caches, one the target's own.
SOURCE_SALT = "source"
TARGET_SALT = "target"


def answer_of(response):
    return response["choices"][0]["token_ids"]


def expect(what, found, wanted):
    if found != wanted:
        raise DemoError(f"{what}: expected {wanted}, found {found}")


def check_usage(arm, response, length, source, target):
    """The response must say that it came the way that was asked for."""
    usage = response["usage"]
    label = f"{arm} at {length} tokens"
    expect(f"{label}: version", response["version"], source if arm == "old" else target)
    expect(f"{label}: prompt_tokens", usage["prompt_tokens"], length + SUFFIX_TOKENS)
    expect(f"{label}: cached_tokens", usage["cached_tokens"], length if arm in ("hit", "old") else 0)
    expect(f"{label}: carried_tokens", usage["carried_tokens"], length if arm == "carried" else 0)
    if arm == "carried":
        first = response["cache"]["segments"][0]
        expect(f"{label}: first segment", (first["source"], first["plan"]), (source, "direct"))


class Runner:
    def __init__(self, client, model, source, target):
        self.client = client
        self.model = model
        self.source = source
        self.target = target
        self.calls = 0
        self.carried_tokens = 0  # over all requests, to compare with what Prometheus scraped
        self.requests = 0

    def ask(self, arm, case, check=True):
        self.calls += 1
        # What no request stored is in no cache: a salt of its own keeps the native arm cold.
        salt = {"old": SOURCE_SALT, "hit": TARGET_SALT, "carried": SOURCE_SALT}.get(arm, f"cold-{self.calls}")
        response = self.client.complete(
            self.model, case.prefix + case.suffix, ANSWER_TOKENS, salt,
            reuse="native" if arm in ("native", "old") else "auto",
            version=self.source if arm == "old" else None)
        self.requests += 1
        self.carried_tokens += response["usage"]["carried_tokens"]
        if check:
            check_usage(arm, response, len(case.prefix), self.source, self.target)
        return response

    def old_answers(self, cases):
        return [answer_of(self.ask("old", case)) for case in cases]

    def length(self, cases, say):
        """{arm: [response]}, the arms interleaved, their order changing from case to case."""
        for arm in ARMS:
            self.ask(arm, cases[0])  # not counted: first use of this length
        responses = {arm: [] for arm in ARMS}
        for i, case in enumerate(cases):
            for arm in ORDERS[i % len(ORDERS)]:
                responses[arm].append(self.ask(arm, case))
            if (i + 1) % len(ORDERS) == 0 or i + 1 == len(cases):
                say(f"prefix {len(case.prefix)}: {i + 1} of {len(cases)}")
        return responses


def quantile(values, share):
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def ttft_of(response):
    ttft = response.get("client", {}).get("ttft_ms")
    if ttft is None:
        raise DemoError("a response has no time to first token")
    return ttft


def agreement(answers, reference):
    """How often two arms say the same: the whole answer, its first token, and tokens until they part."""
    def shared(a, b):
        count = 0
        while count < min(len(a), len(b)) and a[count] == b[count]:
            count += 1
        return count

    pairs = list(zip(answers, reference))
    return {"whole": round(sum(a == b for a, b in pairs) / len(pairs), 4),
            "first_token": round(sum(a[:1] == b[:1] for a, b in pairs) / len(pairs), 4),
            "tokens_until_parted": round(statistics.mean(shared(a, b) for a, b in pairs), 2)}


def sum_up(length, responses, old):
    """One row of demo.json's ttft."""
    times = {arm: [ttft_of(response) for response in responses[arm]] for arm in ARMS}
    medians = {arm: statistics.median(times[arm]) for arm in ARMS}
    native = [answer_of(response) for response in responses["native"]]
    row = {"prefix_tokens": length, "suffix_tokens": SUFFIX_TOKENS}
    row |= {f"{arm}_ms": round(medians[arm], 3) for arm in ARMS}
    row["speedup"] = round(medians["native"] / medians["carried"], 3)
    row["carried_over_hit"] = round(medians["carried"] / medians["hit"], 4)
    row["samples"] = len(native)
    row["quartiles_ms"] = {arm: [round(quantile(times[arm], q), 3) for q in (0.25, 0.75)] for arm in ARMS}
    row["server_first_token_ms"] = {
        arm: round(1000 * statistics.median(r["timing"]["first_token"] for r in responses[arm]), 3) for arm in ARMS}
    row["answers_like_native"] = {
        "carried": agreement([answer_of(response) for response in responses["carried"]], native),
        "hit": agreement([answer_of(response) for response in responses["hit"]], native),
        "old_version": agreement(old, native)}
    return row
