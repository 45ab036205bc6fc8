"""deploy/systemd: systemd accepts the unit (where systemd-analyze is installed), the server accepts its configuration,
and the two agree.

    unit_file_test.py FOLDER-WITH-THE-PROGRAMS
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy/systemd"

failures = []


def check(condition, what):
    if not condition:
        failures.append(what)


def run(*command):
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return result.returncode, result.stdout + result.stderr


def main():
    programs = pathlib.Path(sys.argv[1]).resolve()
    unit = (FOLDER / "carryover-server.service").read_text(encoding="utf-8")
    config = (FOLDER / "server.txtpb").read_text(encoding="utf-8")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="carryover-unit-"))
    try:
        # The state folder that systemd would have made.
        check("/var/lib/carryover/" in config and "StateDirectory=carryover" in unit, "the gate's state has no folder")
        here = folder / "server.txtpb"
        here.write_text(config.replace("/var/lib/carryover/", f"{folder}/"), encoding="utf-8")
        status, said = run(programs / "carryover-server", "--config", here, "--check")
        check(status == 0, f"the server does not accept server.txtpb: {said}")
        drain = float(re.search(r"drain_timeout_seconds: ([\d.]+)", said)[1]) if status == 0 else 0
        stop = float(re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[1])
        check(drain + 5 <= stop, f"systemd kills after {stop} s, and draining may take {drain} s")

        path = "/usr/local/bin/carryover-server"
        commands = re.findall(r"^Exec\w+=(\S+) (.*)$", unit, re.MULTILINE)
        check(len(commands) == 2 and all(program == path for program, _ in commands), f"{commands} run something else")
        _, options = run(programs / "carryover-server", "--help")
        for option in {word for _, arguments in commands for word in arguments.split() if word.startswith("--")}:
            check(f"  {option} " in options, f"the server has no {option}")
        if shutil.which("systemd-analyze"):
            installed = folder / "carryover-server.service"
            installed.write_text(unit.replace(path, str(programs / "carryover-server")), encoding="utf-8")
            status, said = run("systemd-analyze", "verify", "--man=no", installed)
            check(status == 0 and not said, f"systemd-analyze verify: {said}")
            status, said = run("systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager", installed)
            check(status == 0, f"the unit is less hardened than it was: {said[-200:]}")
        else:
            print("systemd-analyze is not installed: the unit was read, not verified")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for failure in failures:
        print(f"unit_file_test: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
