"""The comparison of scripts/check --perf: what fails, what only says so, and what reaches the user."""

import contextlib
import io
import json
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import perf_check  # noqa: E402


def counts(target="AVX2", **works):
    return {"target": target, "compiler": "12", "instructions": {
        name: {"unit": "block", "count": count} for name, count in works.items()}}


class PerfCheckTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.file = pathlib.Path(self.folder.name) / "baseline.json"

    def run_check(self, baseline, found, *arguments):
        """(exit status, everything printed)"""
        if baseline is not None:
            self.file.write_text(json.dumps(baseline))
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            status = perf_check.main(["--baseline", str(self.file), *arguments], counter=lambda *_: found)
        return status, said.getvalue()

    def test_equal_counts_pass(self):
        status, said = self.run_check(counts(find=1000), counts(find=1000))
        self.assertEqual(status, 0)
        self.assertNotIn("--write", said)

    def test_a_raised_count_fails_and_is_named(self):
        status, said = self.run_check(counts(find=1000, insert=1000), counts(find=1031, insert=1000))
        self.assertEqual(status, 1)
        self.assertRegex(said, r"find +block +1,000 +1,031 +\+3\.1 % +MORE")
        self.assertEqual(said.count("MORE"), 1)
        self.assertIn("callgrind_annotate", said)

    def test_a_little_more_passes_and_the_share_can_be_chosen(self):
        self.assertEqual(self.run_check(counts(find=1000), counts(find=1029))[0], 0)
        self.assertEqual(self.run_check(counts(find=1000), counts(find=1029), "--percent=2")[0], 1)

    def test_a_fallen_count_passes_and_says_to_refresh(self):
        status, said = self.run_check(counts(find=1000), counts(find=900))
        self.assertEqual(status, 0)
        self.assertRegex(said, r"-10\.0 % +fewer")
        self.assertIn("scripts/check --perf --write", said)

    def test_a_fall_does_not_make_up_for_a_rise(self):
        self.assertEqual(self.run_check(counts(a=1000, b=1000), counts(a=500, b=1200))[0], 1)

    def test_work_without_a_baseline_and_a_baseline_without_work_fail(self):
        for baseline, found, verdict in ((counts(a=1), counts(a=1, b=2), "no baseline"),
                                         (counts(a=1, b=2), counts(a=1), "gone")):
            status, said = self.run_check(baseline, found)
            self.assertEqual(status, 1)
            self.assertRegex(said, rf"b +block .*{verdict}")

    def test_another_instruction_set_is_not_compared(self):
        status, said = self.run_check(counts(find=1000), counts(find=1000, target="SSE4"))
        self.assertEqual(status, 2)
        self.assertIn("target", said)

    def test_write_makes_what_passes_next(self):
        self.assertEqual(self.run_check(counts(find=1000), counts(find=2000), "--write")[0], 0)
        self.assertEqual(self.run_check(None, counts(find=2000))[0], 0)
        self.assertEqual(self.run_check(None, counts(find=2100))[0], 1)

    def test_a_missing_baseline_is_an_error_that_names_the_file(self):
        status, said = self.run_check(None, counts(find=1))
        self.assertEqual(status, 2)
        self.assertIn("baseline.json", said)

    def test_setup_is_taken_off(self):
        runs = {0: 5_000, 4: 13_000}
        original = perf_check.instructions
        self.addCleanup(setattr, perf_check, "instructions", original)
        perf_check.instructions = lambda program, name, repeats, profile: (runs[repeats], {"target": "AVX2"})
        work = {"name": "a/b=1", "unit": "block", "units": 10, "repeats": 4}
        self.assertEqual(perf_check.count("program", work, pathlib.Path("folder"))[0], 200)


if __name__ == "__main__":
    unittest.main()
