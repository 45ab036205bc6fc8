#!/usr/bin/env bash
# tests/gpu/pack and tests/gpu/run as on another machine: packed, unpacked elsewhere, run without
# anything of this environment, on the emulated device.
#   rehearsal_test.sh BUILD
set -euo pipefail
cd "$(dirname "$0")/../.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tests/gpu/pack "$1" "$work/gpu.tar.gz"
mkdir "$work/tree"
tar -C "$work/tree" -xzf "$work/gpu.tar.gz"
env -i PATH=/usr/bin:/bin HOME="$work" "$work/tree/tests/gpu/run" --rehearse "$work/out" | tee "$work/said"

for part in 'ops: ok' 'golden: ok' 'bench: ok' 'prefill tiny 40' 'decode tiny 3 x 50' 'divergence 64 x 320' \
  'block upload tiny' 'carried / hit'; do
  grep -qF "$part" "$work/said" || { echo "rehearsal: no \"$part\"" >&2; exit 1; }
done
python3 - "$work/out/results.json" << 'PY'
import json, sys
results = json.load(open(sys.argv[1]))
assert results["device"]["error"] == "", results["device"]["error"]
assert {s["step"] for s in results["steps"]} == {"ops", "golden", "torch", "bench"}, results["steps"]
assert results["first_tokens"][0]["prefix"] == 64, results["first_tokens"]
PY
