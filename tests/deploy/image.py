"""Images of the Dockerfile where no engine runs: a stage is a folder, made by debootstrap as the one that it starts
from, with the steps executed in it. Wants root, since it changes roots and makes namespaces.

    builder = image.Builder(folder, stages, toolkit)
    built = builder.build("cpu")
    process = image.Container(built, ["/usr/local/bin/carryover-server", ...])

Nothing is mounted but in namespaces, which end with their processes.
"""

import ctypes
import os
import pathlib
import re
import shutil
import signal
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
MINUTES = 60
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# debian:12-slim keeps these out, and a package may be upset by that.
LEFT_OUT = ("doc", "info", "locale", "man")


def log(text):
    print(f"image: {text}", flush=True)


def host_sources(suite):
    """The (URI, suite) from which this machine's apt takes Debian's packages: a mirror may be near, others out of reach."""
    said = subprocess.run(["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)",
                           "Created-By: Packages"], check=True, capture_output=True, text=True).stdout
    found = dict.fromkeys(tuple(line.split()) for line in said.splitlines())
    return [(uri, release) for uri, release, component in found
            if component == "main" and release in (suite, f"{suite}-updates", f"{suite}-security")]


class NoBase(Exception):
    """debootstrap made no system: a mirror out of reach, or a machine that allows no devices. Says nothing of the image."""


class Image:
    """A stage that was built: its folder, and what a container of it would run."""

    def __init__(self, root, environment=None):
        self.root = root
        self.environment = environment or {"PATH": PATH, "HOME": "/root"}
        self.user = "root"
        self.folder = "/"
        self.volumes = []
        self.commands = {}  # ENTRYPOINT, CMD and HEALTHCHECK, as words

    def path(self, inside):
        return self.root / str(pathlib.PurePosixPath(self.folder) / inside).lstrip("/")


class Builder:
    def __init__(self, folder, stages, suite="bookworm", toolkit=None, outputs=None, caches=()):
        """toolkit: CUDA's folder, in place of the image that brings it. outputs: {stage: folder}, files that were made
        elsewhere, for stages that are not built. caches: (folder here, folder inside) that RUN steps see."""
        self.folder = folder
        self.stages = stages
        self.suite = suite
        self.toolkit = toolkit
        self.outputs = outputs or {}
        self.caches = list(caches)
        self.built = {}

    def build(self, name):
        if name in self.built:
            return self.built[name]
        stage = self.stages[name]
        root = self.folder / name
        if stage.base in self.stages:
            base = self.build(stage.base)
            subprocess.run(["cp", "-a", base.root, root], check=True)
            image = Image(root, dict(base.environment))
            image.user, image.volumes, image.commands = base.user, list(base.volumes), dict(base.commands)
        else:
            if stage.base != "debian:12-slim":
                raise ValueError(f"stage {name} starts from {stage.base}, which debootstrap does not make")
            self.bootstrap(root)
            image = Image(root)
        for step in stage.steps:
            log(f"{name}: line {step.line}: {step.name} {' '.join(step.text.split())[:90]}")
            getattr(self, "step_" + step.name.lower(), self.step_command)(image, step)
        self.built[name] = image
        return image

    def bootstrap(self, root):
        plain = self.folder / "debian"
        if not plain.exists():
            log(f"debootstrap of {self.suite}")
            sources = host_sources(self.suite)
            mirror = next((uri for uri, release in sources if release == self.suite), "")
            result = subprocess.run(["debootstrap", "--variant=minbase", self.suite, plain, *([mirror] if mirror else [])],
                                    capture_output=True, text=True, timeout=10 * MINUTES)
            if result.returncode:
                raise NoBase(f"debootstrap: {(result.stdout + result.stderr)[-2000:]}")
            for part in LEFT_OUT:
                shutil.rmtree(plain / "usr/share" / part, ignore_errors=True)
            lines = "".join(f"path-exclude /usr/share/{part}/*\n" for part in LEFT_OUT)
            (plain / "etc/dpkg/dpkg.cfg.d/slim").write_text(lines, encoding="utf-8")
            # How this machine reaches Debian: sources, and settings such as a proxy.
            if sources:
                lines = "".join(f"deb {uri} {release} main\n" for uri, release in sources)
                (plain / "etc/apt/sources.list").write_text(lines, encoding="utf-8")
            settings = subprocess.run(["apt-config", "dump", "Acquire"], check=True, capture_output=True, text=True).stdout
            (plain / "etc/apt/apt.conf.d/00host").write_text(settings + 'Acquire::Retries "3";\n', encoding="utf-8")
            for file in ("resolv.conf", "hosts"):
                shutil.copy(f"/etc/{file}", plain / "etc" / file)
        subprocess.run(["cp", "-a", plain, root], check=True)

    def step_run(self, image, step):
        command = ["/bin/sh", "-c", step.text]
        result = subprocess.run(enter(image, command, "build", self.caches), stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        if result.returncode:
            raise RuntimeError(f"line {step.line}: {step.text}\nended with {result.returncode}: {result.stdout[-4000:]}")

    def step_copy(self, image, step):
        if set(step.options) - {"from"}:
            raise ValueError(f"line {step.line}: COPY with {step.options}")
        *sources, target = step.words()
        to = image.path(target)
        stage = step.options.get("from")
        if stage is None:
            for source in sources:
                copy_context(source, to, target.endswith("/"))
            return
        for source in sources:
            found = self.find(stage, source)
            if found is None:
                log(f"{source} is not there without CUDA's toolkit: left out")
            elif stage == "toolkit" and found.is_dir():
                to.mkdir(parents=True)  # gigabytes that are read alone
                self.caches.append((found, target))
            elif found.is_dir():
                shutil.copytree(found, to, symlinks=True, dirs_exist_ok=True)
            else:
                shutil.copy(found, to)  # a folder that is there, or the file's name

    def find(self, stage, source):
        if stage == "toolkit":
            inside = re.sub(r"^/usr/local/cuda[^/]*/?", "", source)
            return self.toolkit / inside if self.toolkit and (self.toolkit / inside).exists() else None
        if stage in self.outputs:
            return self.outputs[stage]
        return self.build(stage).path(source)

    def step_user(self, image, step):
        image.user = step.text

    def step_workdir(self, image, step):
        image.folder = step.text
        image.path(".").mkdir(parents=True, exist_ok=True)

    def step_env(self, image, step):
        image.environment.update(word.split("=", 1) for word in step.words())

    def step_volume(self, image, step):
        image.volumes += step.words()

    def step_healthcheck(self, image, step):
        image.commands["HEALTHCHECK"] = type(step)("CMD", step.text.removeprefix("CMD").strip(), {}, step.line).words()

    def step_command(self, image, step):
        image.commands[step.name] = step.words()


def ignored(path, rules):
    """What .dockerignore says; the last rule that fits decides."""
    result = False
    for rule in rules:
        wanted = not rule.startswith("!")
        rule = rule.removeprefix("!")
        parts = pathlib.PurePosixPath(path).parts
        heads = {"/".join(parts[:n]) for n in range(1, len(parts) + 1)}
        if rule == "*" or rule in heads or rule.startswith("**/") and rule[3:] in parts:
            result = wanted
    return result


def context_files():
    """What docker build would be sent of a fresh checkout with these changes."""
    rules = [line for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
             if line and not line.startswith("#")]
    said = subprocess.run(["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "-z"], check=True,
                          capture_output=True, text=True).stdout
    return [name for name in said.split("\0") if name and not ignored(name, rules) and (ROOT / name).exists()]


def copy_context(source, to, into_folder):
    files = [name for name in context_files() if source == "." or name == source or name.startswith(source + "/")]
    if not files:
        raise ValueError(f"COPY {source}: .dockerignore lets nothing of it through")
    for name in files:
        if name == source:
            at = to / pathlib.Path(name).name if into_folder else to
        else:
            at = to / (name if source == "." else name[len(source) + 1:])
        at.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, at, follow_symlinks=False)


# Run in new namespaces; what is mounted goes with them. $1 is the root, $2 "build" or "serve", then words SOURCE TARGET
# up to a --, then the command.
SETUP = """\
set -e
root=$1 purpose=$2
shift 2
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
while [ "$1" != -- ]; do
  [ -e "$root/$2" ] || mkdir -p "$root/$2"
  mount --bind "$1" "$root/$2"
  shift 2
done
shift
if [ "$purpose" = serve ]; then
  ip link set lo up
  mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
  mount -o remount,bind,ro "$root"
fi
exec chroot "$root" "$@"
"""


def enter(image, command, purpose, mounts):
    """The command line that runs `command` in the image: to build, with the network, or to serve, as deploy/compose.yaml
    has it: no capability, nothing to be written but /tmp and the volumes, a network of its own."""
    inside = ["/usr/bin/env", "-i", "-C", image.folder, *(f"{key}={value}" for key, value in image.environment.items())]
    spaces = ["--mount", "--pid", "--fork", "--kill-child"]
    if purpose == "serve":
        mounts = [*mounts, *((image.path(volume), volume) for volume in image.volumes)]
        inside = ["/usr/bin/setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", *inside]
        spaces += ["--net", "--ipc"]
    if image.user != "root":
        inside = ["/usr/bin/setpriv", f"--reuid={image.user}", f"--regid={image.user}", "--init-groups", *inside]
    return ["unshare", *spaces, "/bin/sh", "-c", SETUP, "sh", image.root, purpose,
            *(word for mount in mounts for word in mount), "--", *inside, *command]


def die_with_parent():
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def run(image, command, mounts=(), timeout=60):
    """(exit status, what it said) of a container that ends by itself."""
    result = subprocess.run(enter(image, command, "serve", mounts), stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout,
                            preexec_fn=die_with_parent)
    return result.returncode, result.stdout


class Container:
    """A process that runs on. It is process 1 of its namespace, as in Docker."""

    def __init__(self, image, command, log_file, mounts=()):
        self.image = image
        with open(log_file, "wb") as output:
            self.process = subprocess.Popen(enter(image, command, "serve", mounts), stdin=subprocess.DEVNULL,
                                            stdout=output, stderr=output, preexec_fn=die_with_parent)

    def pid(self):
        """Of its process 1, as seen from here; None before it is there."""
        children = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0]) if children else None

    def execute(self, command, timeout=60):
        """As docker exec does."""
        ids = pathlib.Path(f"/proc/{self.pid()}/status").read_text()
        user, group = (next(line.split()[1] for line in ids.splitlines() if line.startswith(name)) for name in ("Uid:", "Gid:"))
        spaces = ["--target", str(self.pid()), "--mount", "--pid", "--net", "--ipc", "--root", "--wd"]
        result = subprocess.run(["nsenter", *spaces, f"--setuid={user}", f"--setgid={group}", *command],
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                timeout=timeout, env=self.image.environment)
        return result.returncode, result.stdout

    def stop(self, signal_name, patience):
        """The exit status after that signal; None where it had to be killed."""
        os.kill(self.pid(), getattr(signal, signal_name))
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.kill()

    def kill(self):
        self.process.kill()
        self.process.wait()
