"""What the side-by-side needs before it can start: llama.cpp in a virtual environment, and its weights as GGUF files."""

import hashlib
import os
import shutil
import subprocess
import sys

from processes import DemoError

# No wheel on the package index uses AVX-512, so llama.cpp is built here, for this CPU and with its own choice of flags.
BUILD_OPTIONS = "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"


def sha256_of(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def environment(root, say):
    """The Python of build/peers-venv, made anew when requirements.txt changed."""
    requirements = root / "bench/peers/requirements.txt"
    venv = root / "build/peers-venv"
    stamp, want = venv / "made-from.sha256", sha256_of(requirements)
    python = venv / "bin/python"
    if stamp.is_file() and stamp.read_text() == want:
        return python
    for tool in ("cmake", "g++"):
        if shutil.which(tool) is None:
            raise DemoError(f"{tool} is missing; scripts/setup installs it")
    log = root / "build/peers-venv.log"
    say(f"building llama.cpp for this CPU in {venv}, once; 10 minutes or more ({log} shows how far)")
    venv.parent.mkdir(exist_ok=True)
    # No cache: pip keeps wheels that it built, and one may come from another CPU.
    with open(log, "wb") as output:
        for command in ([sys.executable, "-m", "venv", "--clear", str(venv)],
                        [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-cache-dir", "-v",
                         "-r", str(requirements)]):
            if subprocess.run(command, stdout=output, stderr=output,
                              env={**os.environ, "CMAKE_ARGS": BUILD_OPTIONS}).returncode != 0:
                raise DemoError(f"llama.cpp could not be built; {log} says why")
    stamp.write_text(want)
    return python


def gguf_files(root, python, folder, precisions, say):
    """{precision: GGUF file with the weights of `folder`}, converted where they are not there yet."""
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise DemoError(f"{weights} is missing; models/fetch_smollm2 fetches it")
    name = sha256_of(weights)[:16]
    store = root / "build/peers-models"
    store.mkdir(parents=True, exist_ok=True)
    files = {}
    for precision in precisions:
        files[precision] = store / f"{name}-{precision}.gguf"
        if files[precision].is_file():
            continue
        say(f"converting {folder} to {files[precision].name}")
        unfinished = files[precision].with_suffix(".part")
        result = subprocess.run([str(python), str(root / "bench/peers/to_gguf.py"), str(folder), str(unfinished), precision],
                                capture_output=True, text=True)
        if result.returncode != 0:
            raise DemoError(f"the conversion failed: {result.stderr.strip().splitlines()[-1:]}")
        unfinished.rename(files[precision])
    return files


def cpu():
    """Its name and the features that Linux lists."""
    with open("/proc/cpuinfo", encoding="utf-8") as info:
        lines = [line.split(":", 1) for line in info if ":" in line]
    found = {key.strip(): value.strip() for key, value in reversed(lines)}
    return found.get("model name", "unknown CPU"), set(found.get("flags", "").split())


def check_build(system_info):
    """A peer that was built for a lesser CPU than this one would flatter us."""
    flags = cpu()[1]
    wanted = [name for flag, name in (("avx512f", "AVX512"), ("avx512_bf16", "AVX512_BF16")) if flag in flags]
    lacking = [name for name in wanted if f"{name} = 1" not in system_info]
    if lacking:
        raise DemoError(f"llama.cpp was built without {', '.join(lacking)}, which this CPU has: {system_info}")
