"""Checks what nvcc made of the kernels, from the object files: no device is needed.

- Each kernel is there for each architecture, and PTX for newer ones.
- None keeps anything in local memory but what device_code.txt allows: that would be spilled
  registers, or an array that the compiler could not keep in them.
- Registers are those of device_code.txt, within a few: a kernel that needs many more fits fewer
  blocks on a multiprocessor, and nothing else would tell.
- Attention multiplies on tensor cores and loads K and V by asynchronous copies.

    device_code.py [--write] OBJECT...      --write makes device_code.txt anew

cuobjdump and nvdisasm are those of tests/requirements.txt, or CUDA's in the path.
"""
import collections
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig

ARCHITECTURES = ("sm_80", "sm_90")
TABLE = pathlib.Path(__file__).with_name("device_code.txt")
SLACK = 16  # registers: another release of nvcc must not fail the test
SKIPPED = 77


def find_tools():
    """A PATH with cuobjdump and nvdisasm in front, or None."""
    site = pathlib.Path(sysconfig.get_paths()["purelib"])
    folders = [str(p.parent) for p in site.glob("nvidia/*/bin/cuobjdump")]
    path = os.pathsep.join(folders + [os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    found = all(shutil.which(tool, path=path) for tool in ("cuobjdump", "nvdisasm"))
    return path if found else None


def dump(path, option, objects):
    """What cuobjdump, which takes one file at a time, says of all of them."""
    return "".join(
        subprocess.run(["cuobjdump", option, file], env={**os.environ, "PATH": path}, check=True,
                       text=True, stdout=subprocess.PIPE).stdout for file in objects)


def short_names(mangled):
    """`Wide<64>` for what the compiler calls _ZN9carryover4cuda...4WideILi64EEEvNS0_...E."""
    filtered = subprocess.run(["c++filt"], input="\n".join(mangled), check=True, text=True,
                              stdout=subprocess.PIPE).stdout.splitlines()
    names = {}
    for symbol, name in zip(mangled, filtered):
        name = name.replace("(anonymous namespace)::", "").replace("carryover::cuda::", "")
        name = name.replace("carryover::", "").removeprefix("void ")
        names[symbol] = name[:name.index("(")] if "(" in name else name
    return names


def read_resources(path, objects):
    """{(kernel, architecture): (registers, stack, local)}."""
    rows, arch, symbol = {}, None, None
    for line in dump(path, "-res-usage", objects).splitlines():
        if match := re.match(r"arch = (sm_\d+)", line):
            arch = match[1]
        elif match := re.match(r" Function (\S+):", line):
            symbol = match[1]
        elif match := re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", line):
            rows[symbol, arch] = tuple(int(n) for n in match.groups())
    names = short_names(sorted({symbol for symbol, _ in rows}))
    return {(names[symbol], arch): row for (symbol, arch), row in rows.items()}


def count_instructions(path, objects):
    """{(kernel, architecture): how often HMMA and LDGSTS stand in it}."""
    counts, arch, symbol = collections.Counter(), None, None
    for line in dump(path, "-sass", objects).splitlines():
        if match := re.match(r"arch = (sm_\d+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function : (\S+)", line):
            symbol = match[1]
        elif match := re.search(r"\b(HMMA|LDGSTS)\.", line):
            counts[symbol, arch, match[1]] += 1
    names = short_names(sorted({symbol for symbol, _, _ in counts}))
    return {(names[symbol], arch, what): n for (symbol, arch, what), n in counts.items()}


def read_table():
    rows = {}
    for line in TABLE.read_text().splitlines():
        if line and not line.startswith("#"):
            name, arch, registers, stack = re.split(r"\s{2,}|\t", line)
            rows[name, arch] = (int(registers), int(stack))
    return rows


def write_table(rows):
    with TABLE.open("w") as out:
        out.write("# Registers of a thread and bytes of its local memory, by nvcc 13.0;\n"
                  "# tests/gpu/device_code.py --write makes this file.\n")
        for (name, arch), (registers, stack, _) in sorted(rows.items()):
            out.write(f"{name:28}  {arch}  {registers:3}  {stack}\n")


def main():
    arguments = sys.argv[1:]
    write = "--write" in arguments
    objects = [a for a in arguments if a.endswith(".cu.o")]
    if not objects:
        sys.exit("device_code.py: no object file of a kernel among the arguments")
    path = find_tools()
    if path is None:
        print("device_code.py: cuobjdump and nvdisasm are missing (tests/requirements.txt)")
        sys.exit(1 if os.environ.get("CI") == "true" else SKIPPED)

    rows = read_resources(path, objects)
    if write:
        write_table(rows)
    wanted = read_table()
    problems = []
    for key in sorted(rows.keys() | wanted.keys()):
        label = f"{key[0]} for {key[1]}"
        if key not in rows:
            problems.append(f"{label}: is in device_code.txt, and not in the program")
        elif key not in wanted:
            problems.append(f"{label}: is not in device_code.txt (--write adds it)")
        else:
            registers, stack, local = rows[key]
            if local > 0 or stack > wanted[key][1]:
                problems.append(f"{label}: {stack} + {local} bytes of local memory, "
                                f"where {wanted[key][1]} are allowed")
            if registers > wanted[key][0] + SLACK:
                problems.append(f"{label}: {registers} registers, were {wanted[key][0]}")
    for name in {name for name, _ in rows}:
        for arch in ARCHITECTURES:
            if (name, arch) not in rows:
                problems.append(f"{name}: not compiled for {arch}")

    for kernel_object in objects:
        if "ptx" not in dump(path, "-lptx", [kernel_object]):
            problems.append(f"{kernel_object}: holds no PTX")

    attention = [o for o in objects if re.search(r"attention_(wide|narrow)\.cu\.o$", o)]
    counts = count_instructions(path, attention)
    kernels = {name for name, _ in rows if re.match(r"(Wide|Narrow)<", name)}
    if len(kernels) != 10:
        problems.append(f"attention on tensor cores has {len(kernels)} kernels, not 10")
    for name in sorted(kernels):
        for arch in ARCHITECTURES:
            for what in ("HMMA", "LDGSTS"):
                if counts.get((name, arch, what), 0) == 0:
                    problems.append(f"{name} for {arch}: has no {what} instruction")
    products = sum(n for (_, _, what), n in counts.items() if what == "HMMA")
    print(f"{len(rows)} kernels, {products} tensor-core instructions in attention")
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
