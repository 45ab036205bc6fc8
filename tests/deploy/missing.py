"""What to do where a tool is not installed: skip, but fail in CI, which installs all of them."""

import os
import shutil
import sys


def skip(what):
    print(f"{what} is missing; run scripts/setup", file=sys.stderr)
    sys.exit(1 if os.environ.get("CI") == "true" else 77)


def require_program(name):
    if shutil.which(name) is None:
        skip(name)
    return name
