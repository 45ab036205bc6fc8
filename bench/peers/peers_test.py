"""The side-by-sides without their peers: what is computed from answers, and our side against a real server.

Usage: peers_test.py FOLDER, where carryover-server is.
"""

import pathlib
import sys
import tempfile
import types
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench/peers"), str(ROOT / "bench/demo")]

import llama_server  # noqa: E402
import load  # noqa: E402
import ours  # noqa: E402
import run  # noqa: E402
import serve  # noqa: E402
import sides  # noqa: E402
import vllm_server  # noqa: E402
from processes import DemoError  # noqa: E402


run.REST_SECONDS = 0


class Fake:
    """Answers with the same first token as everyone, in a time of its own."""

    def __init__(self, name, setting, first_ms, rest_ms, token=7):
        self.name, self.setting, self.sample = name, setting, (first_ms, rest_ms, token)

    def run(self, prompts, new_tokens):
        first, rest, token = self.sample
        return sides.Sample(first, rest, [[token] * new_tokens for _ in prompts])


class RowTest(unittest.TestCase):
    def row(self, ours, peers, new_tokens, batch=1):
        return run.measure("work", "bf16", ours, peers, [[[1] * 100] * batch], new_tokens, 3)

    def test_prefill_counts_the_prompt_and_meets_the_best_setting_of_the_best_peer(self):
        row = self.row(Fake("carryover", "", 50, 0), [Fake("llama.cpp", "slow", 400, 0), Fake("llama.cpp", "fast", 200, 0),
                                                     Fake("OpenVINO", "one", 100, 0)], 1)
        self.assertEqual(row["sides"]["carryover"]["tokens_per_s"], 2000)
        self.assertEqual((row["sides"]["llama.cpp"]["setting"], row["sides"]["llama.cpp"]["tokens_per_s"]), ("fast", 500))
        self.assertEqual((row["best_peer"], row["ratio"]), ("OpenVINO", 2.0))
        self.assertEqual(row["screened"]["llama.cpp"], {"slow": 250.0, "fast": 500.0})
        line = run.table([row]).splitlines()[-1].split()
        self.assertEqual((line[-1], line[2:6]), ("2.00", ["2,000", "500", "1,000", "-"]))

    def test_decode_counts_the_tokens_after_the_first_of_all_prompts(self):
        row = self.row(Fake("carryover", "", 9, 1000), [Fake("llama.cpp", "one", 9, 500)], 65, batch=16)
        self.assertEqual(row["sides"]["carryover"]["tokens_per_s"], 1024)
        self.assertEqual(row["ratio"], 0.5)

    def test_other_first_tokens_end_the_run(self):
        with self.assertRaisesRegex(DemoError, "OpenVINO.*not the same weights"):
            self.row(Fake("carryover", "", 1, 1), [Fake("OpenVINO", "one", 1, 1, token=8)], 1)

    def test_prompts_are_different_windows(self):
        inputs = run.inputs_of(list(range(10_000)), 4, 100, 2)
        self.assertEqual([len(window) for windows in inputs for window in windows], [100] * 8)
        self.assertEqual(len({window[0] for windows in inputs for window in windows}), 8)
        with self.assertRaisesRegex(DemoError, "200 are needed"):
            run.inputs_of([1] * 150, 1, 100, 1)


class LlamaServerTest(unittest.TestCase):
    def test_tokens_that_are_held_back_count(self):
        lines = [b'data: {"tokens": [5], "stop": false}', b"", b'data: {"tokens": [8, 9], "stop": false}',
                 b'data: {"tokens": [], "stop": true, "tokens_predicted": 5}']
        self.assertEqual(list(llama_server.pieces(lines)), [[5], [8, 9], [None, None]])
        with self.assertRaisesRegex(DemoError, "no slot"):
            list(llama_server.pieces([b'data: {"error": "no slot"}']))


class VllmServerTest(unittest.TestCase):
    def test_token_ids_come_as_the_events_name_them(self):
        lines = [b'data: {"choices": [{"text": "a", "token_ids": [5]}]}', b"", b'data: {"choices": [{"text": "", "token_ids": []}]}',
                 b'data: {"choices": [{"text": "bc", "token_ids": [8, 9]}]}', b"data: [DONE]"]
        self.assertEqual(list(vllm_server.pieces(lines)), [[5], [8, 9]])
        with self.assertRaisesRegex(DemoError, "too long"):
            list(vllm_server.pieces([b'data: {"error": {"message": "too long"}}']))


class FakeServer:
    name = "fake"

    def __init__(self, pieces):
        self.pieces, self.asked = pieces, []

    def stream(self, prompt, new_tokens):
        self.asked.append(prompt)
        yield from self.pieces


class LoadTest(unittest.TestCase):
    def test_every_request_is_sent_once_and_answers_keep_their_order(self):
        server = FakeServer([[5], [6, 7]])
        taken = load.run(server, [[i] for i in range(20)], 4, 3)
        self.assertEqual(sorted(server.asked), [[i] for i in range(20)])
        self.assertEqual(taken.answers, [[5, 6, 7]] * 20)
        self.assertEqual(len(taken.ttft_ms), 20)
        self.assertGreater(taken.output_tokens_per_s, 0)

    def test_a_short_answer_ends_the_run(self):
        with self.assertRaisesRegex(DemoError, "fake gave 1 of 2 tokens"):
            load.run(FakeServer([[5]]), [[1]] * 3, 2, 2)

    def test_ratios_above_one_say_that_ours_is_better(self):
        fast, slow = ({"output_tokens_per_s": speed, "ttft_p50_ms": p50, "ttft_p99_ms": p99}
                      for speed, p50, p99 in ((100, 10, 20), (50, 40, 100)))
        self.assertEqual(serve.ratios(fast, slow), {"output_tokens_per_s": 2.0, "ttft_p50_ms": 4.0, "ttft_p99_ms": 5.0})

    def test_a_peer_with_other_first_tokens_ends_the_run(self):
        turn = lambda *firsts: types.SimpleNamespace(answers=[[first, 0] for first in firsts])  # noqa: E731
        turns = {"carryover": [turn(1, 2), turn(3, 4)], "llama-server": [turn(1, 2), turn(3, 9)], "vllm": [turn(1, 2), turn(9, 9)]}
        self.assertEqual(serve.same_first_tokens(turns, 4), {"llama-server": 3, "vllm": 2})
        with self.assertRaisesRegex(DemoError, "1 of 4 first tokens of vllm"):
            serve.same_first_tokens({**turns, "vllm": [turn(1, 9), turn(9, 9)]}, 4)

    def test_the_table_has_a_column_for_each_peer(self):
        side = {"output_tokens_per_s": 100, "ttft_p50_ms": 10, "ttft_p99_ms": 20}
        slow = {"output_tokens_per_s": 50, "ttft_p50_ms": 40, "ttft_p99_ms": 100}
        lines = serve.table({"carryover": side, "vllm": slow, "ratios": {"vllm": serve.ratios(side, slow)}}).splitlines()
        self.assertEqual(lines[0].split(), ["carryover", "vllm", "ours", "to", "vllm"])
        self.assertEqual([line.split()[-1] for line in lines[1:]], ["2.00×", "4.00×", "5.00×"])

    def test_prefixes_come_again_and_suffixes_do_not(self):
        options = types.SimpleNamespace(prefixes=3, prefix=50, suffix=8, requests=30, turns=2)
        prompts = serve.Prompts(list(range(1000)), options)
        found = [tuple(prompt) for _ in range(3) for prompt in prompts.turn()]
        self.assertEqual(len({prompt[:50] for prompt in found}), 3)
        self.assertEqual(len({prompt[50:] for prompt in found}), 90)
        with self.assertRaisesRegex(DemoError, "too few"):
            serve.Prompts(list(range(90)), options)


class OursTest(unittest.TestCase):
    """Against a server with the small model."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.server = ours.Server(PROGRAM, folder.name, 64 << 20, 1)
        self.addCleanup(self.server.stop)
        self.assertTrue({"BF16", "FP32"} <= self.server.precisions())
        self.server.load(ROOT / "models/demo/2026-10", "v", "FP32")

    def test_a_cold_prompt_a_batch_and_streams_agree(self):
        side = sides.Ours(self.server, "v")
        prompts = run.inputs_of(self.server.tokens_of("v", "The sea was calm. " * 60), 3, 40, 1)[0]
        cold = [side.run([prompt], 1) for prompt in prompts]
        batch = side.run(prompts, 9)
        self.assertEqual([sample.tokens[0][0] for sample in cold], [answer[0] for answer in batch.tokens])
        self.assertTrue(all(sample.first_ms > 0 for sample in cold))
        self.assertGreater(batch.rest_ms, 0)
        streamed = load.run(ours.Streams(self.server, "v"), prompts, 3, 9)
        self.assertEqual(streamed.answers, batch.tokens)

    def test_a_folder_that_is_no_model_is_told(self):
        with self.assertRaisesRegex(DemoError, "does not load"):
            self.server.load(ROOT / "docs", "w", "BF16")


if __name__ == "__main__":
    PROGRAM = pathlib.Path(sys.argv.pop(1)) / "carryover-server"
    unittest.main()
