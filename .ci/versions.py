"""Fails unless this interpreter imports exactly the releases that a requirements file pins, and lacks those named `--without`.

python .ci/versions.py .ci/newest.txt --without kernels
"""

import argparse
import importlib
import importlib.util
from importlib.metadata import version
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("requirements", type=Path)
parser.add_argument("--without", nargs="*", default=[])
arguments = parser.parse_args()
for line in arguments.requirements.read_text().splitlines():
    name, pinned = line.split("#")[0].strip().partition("==")[::2]
    if not name:
        continue
    imported = importlib.import_module(name)
    if not version(name) == imported.__version__ == pinned:
        raise SystemExit(f"{name}: pinned {pinned}, installed {version(name)}, imported {imported.__version__}")
    print(f"{name} {pinned}")
for name in arguments.without:
    # a folder without __init__.py, like this repository's kernels/, is found too: only a real package counts
    found = importlib.util.find_spec(name)
    if found is not None and found.origin is not None:
        raise SystemExit(f"{name} must not be installed here, found {found.origin}")
    print(f"{name} is absent")
