"""The Dockerfile without Docker: its steps are executed in folders that debootstrap makes (image.py), and the image is
run as deploy/compose.yaml has it, with its own configuration, user, health check and stop signal.

    image_test.py FOLDER-WITH-THE-PROGRAMS        the stage cpu, with programs that were built here
    image_test.py --all                           the stages build and server too: a whole build, so by hand
      --ccache FOLDER   a compiler cache for it
      --keep            leave the folders for a look

Wants root, for it changes roots; skipped elsewhere.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

import dockerfile
import image
import missing

PROGRAMS = ("carryover-server", "carryover", "carryover_sentencepiece.so")
MODELS = image.ROOT / "models/demo"  # versions of the names that the configuration has

failures = []


def check(condition, what):
    if not condition:
        failures.append(what)


def skip(why):
    """What the machine cannot do, and no package changes."""
    print(f"{why}: skipped", file=sys.stderr)
    sys.exit(77)


def find_toolkit():
    nvcc = shutil.which("nvcc", path=os.environ["PATH"] + ":/usr/local/cuda/bin")
    return pathlib.Path(nvcc).resolve().parents[1] if nvcc else None


def check_libraries(built, stage):
    """All that the programs load is there, and nothing is installed that they do not load."""
    owners = set()
    for program in PROGRAMS:
        status, said = image.run(built, ["ldd", f"/usr/local/bin/{program}"])
        check(status == 0 and "not found" not in said, f"{program} lacks libraries:\n{said}")
        for path in re.findall(r"=> (/\S+)", said):
            _, owner = image.run(built, ["dpkg", "-S", "*" + path.removeprefix("/usr")])
            owners.update(re.findall(r"^([^:,\s]+)", owner, re.MULTILINE))
    install = next(step.text for step in stage.steps if step.name == "RUN" and "apt-get" in step.text)
    named = re.findall(r"\slib\S+", install)
    check(named, "the Dockerfile installs no library")
    for package in map(str.strip, named):
        check(package in owners, f"{package} is installed, and no program loads it")


def check_serving(built, folder):
    entry, arguments = built.commands["ENTRYPOINT"], built.commands["CMD"]
    status, said = image.run(built, [*entry, "--check", *arguments])
    check(status == 0 and "drain_timeout_seconds" in said, f"--check ended with {status}: {said[-2000:]}")
    status, said = image.run(built, ["carryover", "--help"])
    check(status == 0 and "Usage: carryover" in said, f"carryover --help ended with {status}: {said[-2000:]}")

    log = folder / "server.log"
    container = image.Container(built, [*entry, *arguments], log, mounts=[(MODELS, "/models")])
    try:
        deadline = time.monotonic() + 60
        status, said = None, "nothing"
        while status != 0 and time.monotonic() < deadline and container.process.poll() is None:
            time.sleep(0.3)
            if container.pid():
                status, said = container.execute(built.commands["HEALTHCHECK"])
        check(status == 0, f"the health check ended with {status}: {said}\n{log.read_text(errors='replace')[-3000:]}")
        if status != 0:
            return
        status, said = container.execute(["carryover", "versions"])
        check(status == 0 and "2026-10" in said and "2026-11" in said, f"versions: {said}")
        status, said = container.execute(["carryover", "complete", "--prompt", "The", "--max-tokens", "4"])
        check(status == 0, f"complete ended with {status}: {said}")
        _, said = container.execute(["id", "-u"])
        check(said.strip() == "10001", f"it runs as user {said}")
        check(container.execute(["test", "-w", "/var/lib/carryover"])[0] == 0, "the state cannot be written")
        check(container.execute(["test", "-w", "/etc/carryover"])[0] != 0, "the configuration can be written")
        status = container.stop(built.commands["STOPSIGNAL"][0], 40)
        check(status == 0, f"stopped, it ended with {status}:\n{log.read_text(errors='replace')[-3000:]}")
    finally:
        container.kill()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("programs", nargs="?", type=pathlib.Path)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--ccache", type=pathlib.Path)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    if (options.programs is None) != options.all:
        parser.error("either FOLDER-WITH-THE-PROGRAMS or --all")
    if os.geteuid() != 0:
        skip("not root, and a root folder cannot be made or entered")
    if 'VERSION_ID="12"' not in pathlib.Path("/etc/os-release").read_text(encoding="utf-8"):
        skip("not Debian 12, whose programs the image holds")
    for program in ("debootstrap", "ip", "unshare", "nsenter"):
        missing.require_program(program)
    if subprocess.run(["unshare", "--mount", "--pid", "--net", "--fork", "true"], capture_output=True).returncode:
        skip("no right to make namespaces")

    stages = dockerfile.read(image.ROOT / "Dockerfile")
    out = {name for step in stages["build"].steps for name in re.findall(r"build/bin/(\S+)", step.text)}
    check(out == set(PROGRAMS), f"the stage build hands on {out}")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="carryover-image-"))
    try:
        start = time.monotonic()
        if options.all:
            caches = [(options.ccache.resolve(), "/root/.cache/ccache")] if options.ccache else []
            builder = image.Builder(folder, stages, toolkit=find_toolkit(), caches=caches)
        else:
            made = folder / "programs"
            made.mkdir()
            for program in PROGRAMS:
                shutil.copy(options.programs / program, made)
            builder = image.Builder(folder, stages, outputs={"build": made})
        for name in ("cpu", "server") if options.all else ("cpu",):
            built = builder.build(name)
            image.log(f"{name} is built after {time.monotonic() - start:.0f} s")
            check_libraries(built, stages["cpu"])
            check_serving(built, folder)
            image.log(f"{name} is checked after {time.monotonic() - start:.0f} s")
        if options.all and builder.toolkit:
            _, said = image.run(built, ["ldconfig", "-p"])
            check("libcublasLt.so.13" in said, "cuBLASLt is not found in the stage server")
    except image.NoBase as error:
        skip(str(error))
    except (RuntimeError, ValueError) as error:
        failures.append(str(error))
    finally:
        if options.keep:
            print(f"left in {folder}")
        else:
            shutil.rmtree(folder)
    for failure in failures:
        print(f"image_test: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
