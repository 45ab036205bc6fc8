"""The demo as a test: the small pair, few prefixes, and what it writes. Says nothing about times.

    demo_test.py FOLDER-WITH-THE-PROGRAMS
"""

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
PREFIXES = [64, 256]


def check(condition, what):
    if not condition:
        sys.exit(f"demo_test: {what}")


def main():
    folder = pathlib.Path(tempfile.mkdtemp(prefix="carryover-demo-test-"))
    try:
        numbers, page = folder / "demo.json", folder / "demo.html"
        command = [sys.executable, ROOT / "bench/demo/run.py", "--programs", sys.argv[1], "--repeats", "10",
                   "--prefixes", ",".join(map(str, PREFIXES)), "--json", numbers, "--html", page]
        check(subprocess.run(command, timeout=280).returncode == 0, "the demo failed")
        result = json.loads(numbers.read_text(encoding="utf-8"))
        for key, value in [("model", "demo"), ("source_version", "2026-10"), ("target_version", "2026-11")]:
            check(result[key] == value, f"{key} is {result[key]}")
        check([row["prefix_tokens"] for row in result["ttft"]] == PREFIXES, "ttft lacks a prefix length")
        for row in result["ttft"]:
            for key in ("suffix_tokens", "native_ms", "hit_ms", "carried_ms", "speedup"):
                check(row[key] > 0, f"{key} is {row[key]}")
        check(result["median_speedup"] > 0, f"median_speedup is {result['median_speedup']}")
        # Prometheus counted it too, so that it was really carried.
        check(result["prometheus"]["carried prompt tokens"] > 0, "nothing was carried")
        text = page.read_text(encoding="utf-8")
        check("<svg" in text and "2026-11" in text, "demo.html has no chart")
        check("http://" not in text.replace("http://www.w3.org/", "") and "https://" not in text,
              "demo.html is not self-contained")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
