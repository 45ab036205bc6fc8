"""deploy/compose.yaml: what it mounts is there, ports and paths agree with the configurations, Prometheus and the server
accept theirs, and its keys are ones that Compose knows.

    compose_test.py FOLDER-WITH-THE-PROGRAMS
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import dockerfile
from missing import require_program, skip

try:
    import yaml
except ImportError:
    skip("PyYAML")

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
# Of the Compose specification, what a reader of ours has to know.
SERVICE_KEYS = {"build", "image", "volumes", "ports", "read_only", "tmpfs", "cap_drop", "security_opt", "stop_grace_period",
                "restart", "command", "environment", "deploy"}

failures = []


def check(condition, what):
    if not condition:
        failures.append(what)


def load(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def run(*command):
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return result.returncode, result.stdout + result.stderr


def mounts(service):
    """(source, target, read-only) of each volume; a variable stands for its default."""
    for volume in service.get("volumes", []):
        match = re.fullmatch(r"(?:\$\{\w+:-([^}]+)\}|([^:$]+)):([^:]+)(:ro)?", volume)
        check(match is not None, f"volume '{volume}' is not SOURCE:TARGET[:ro]")
        if match:
            yield match[1] or match[2], match[3], match[4] is not None


def check_files(compose, services):
    for name, service in services.items():
        check(set(service) <= SERVICE_KEYS, f"{name} has {set(service) - SERVICE_KEYS}")
        for source, target, read_only in mounts(service):
            if source.startswith("."):
                path = (DEPLOY / source).resolve()
                # Models are fetched, not kept.
                check(path.exists() or target == "/models", f"{name} mounts {source}, which is not there")
                check(read_only, f"{name} could write to {source}")
            else:
                check(source in compose["volumes"], f"{name}: volume {source} is not declared")
        for port in service.get("ports", []):
            check(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port), f"{name} publishes {port} beyond the loopback")


def check_server(programs, name, service):
    """The configuration that a service mounts, and its ports."""
    config = next(DEPLOY / source for source, target, _ in mounts(service) if target == "/etc/carryover/server.txtpb")
    text = config.read_text(encoding="utf-8")
    addresses = dict(re.findall(r'(completions|admin|http): "([^"]+)"', text))
    check(addresses.get("admin", "").startswith("127."), f"{config.name} opens the admin services")
    inside = {port.rsplit(":", 1)[1] for port in service.get("ports", [])}
    served = {addresses[key].rsplit(":", 1)[1] for key in ("completions", "http")}
    check(not inside or inside == served, f"{name} publishes {inside}, and {config.name} serves {served}")
    check("/var/lib/carryover/" in text, f"{config.name} keeps the gate's state elsewhere than in the volume")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="carryover-compose-"))
    try:
        here = folder / "server.txtpb"
        here.write_text(text.replace("/var/lib/carryover/", f"{folder}/"), encoding="utf-8")
        status, said = run(programs / "carryover-server", "--config", here, "--check")
        if "built without CUDA" in said:  # all but this was accepted before
            status = 0
        check(status == 0, f"the server does not accept {config.name}: {said}")
        drain = re.search(r"drain_timeout_seconds: ([\d.]+)", said)
        return float(drain[1]) if drain else 0, addresses
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main():
    programs = pathlib.Path(sys.argv[1]).resolve()
    compose, gpu = load(DEPLOY / "compose.yaml"), load(DEPLOY / "compose.gpu.yaml")
    services = compose["services"]
    check(set(compose) == {"name", "services", "volumes"}, f"compose.yaml has {set(compose)}")
    check(set(services) == {"server", "prometheus", "grafana"}, f"compose.yaml has services {set(services)}")
    check_files(compose, services)
    check(set(gpu) == {"services"} and set(gpu["services"]) == {"server"}, "compose.gpu.yaml is about more than the server")
    check_files(compose, gpu["services"])

    server = services["server"]
    drain, addresses = check_server(programs, "server", server)
    grace = float(server["stop_grace_period"].rstrip("s"))
    check(drain + 5 <= grace, f"Compose kills after {grace} s, and draining may take {drain} s")
    check_server(programs, "server with a GPU", gpu["services"]["server"])
    configs = [(DEPLOY / "compose" / name).read_text(encoding="utf-8") for name in ("server.txtpb", "server-gpu.txtpb")]
    differ = [line for line in zip(*(c.splitlines()[1:] for c in configs)) if line[0] != line[1]]
    check(len(differ) <= 2 and "backend: CUDA" in configs[1], f"server-gpu.txtpb differs in more than the engine: {differ}")

    stages = dockerfile.read(ROOT / "Dockerfile")
    for service in (server, gpu["services"]["server"]):
        check(service["build"]["target"] in stages, f"the Dockerfile has no stage {service['build']['target']}")
    check((DEPLOY / server["build"]["context"]).resolve() == ROOT, "the server is built from another folder")
    for port in server["ports"]:
        check(port.rsplit(":", 1)[1] in stages["cpu"].last("EXPOSE").words(), f"the image does not expose {port}")

    # Prometheus: as the one of deploy/prometheus, but for the target.
    scraped = load(DEPLOY / "compose/prometheus.yml")
    target = scraped["scrape_configs"][0]["static_configs"][0]["targets"]
    check(target == [f"server:{addresses['http'].rsplit(':', 1)[1]}"], f"Prometheus scrapes {target}")
    original = load(DEPLOY / "prometheus/prometheus.yml")
    original["scrape_configs"][0]["static_configs"][0]["targets"] = target
    check(scraped == original, "compose/prometheus.yml differs from prometheus/prometheus.yml in more than the target")
    if not shutil.which("promtool"):
        require_program("promtool")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="carryover-compose-"))
    try:  # laid out as in the container
        for source, inside, _ in mounts(services["prometheus"]):
            if source.startswith(".") and inside.startswith("/etc/prometheus/"):
                to = folder / inside.removeprefix("/etc/prometheus/")
                (shutil.copytree if (DEPLOY / source).is_dir() else shutil.copy)(DEPLOY / source, to)
        status, said = run("promtool", "check", "config", folder / "prometheus.yml")
        check(status == 0, f"promtool: {said}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)

    # Grafana: its source is the Prometheus beside it, its dashboards lie where the provider looks.
    grafana = {target: source for source, target, _ in mounts(services["grafana"])}
    datasource = load(DEPLOY / grafana["/etc/grafana/provisioning/datasources/carryover.yml"])["datasources"][0]
    inside = {port.rsplit(":", 1)[1] for port in services["prometheus"]["ports"]}
    check(datasource["url"] in {f"http://prometheus:{port}" for port in inside}, f"Grafana asks {datasource['url']}")
    check(datasource["jsonData"]["timeInterval"] == scraped["global"]["scrape_interval"], "two scrape intervals")
    provider = load(DEPLOY / grafana["/etc/grafana/provisioning/dashboards/carryover.yml"])["providers"][0]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    check(home in grafana and str(pathlib.Path(home).parent) == provider["options"]["path"], f"no dashboard at {home}")
    check("panels" in json.loads((DEPLOY / grafana[home]).read_text(encoding="utf-8")), f"{grafana[home]} is no dashboard")

    if shutil.which("docker") and run("docker", "compose", "version")[0] == 0:
        for files in (["compose.yaml"], ["compose.yaml", "compose.gpu.yaml"]):
            arguments = [word for file in files for word in ("-f", str(DEPLOY / file))]
            status, said = run("docker", "compose", *arguments, "config", "--quiet")
            check(status == 0, f"docker compose config: {said}")
    else:
        print("docker compose is not installed: the files were read, not run")
    for failure in failures:
        print(f"compose_test: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
