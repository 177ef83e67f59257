"""Makes the builders importable here, and fastlm in the processes that some checks start elsewhere."""

import importlib.util
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
# the processes must see the very packages that this one sees, installed or not
_ROOTS = [str(Path(importlib.util.find_spec(name).origin).parents[1]) for name in ("fastlm", "fastlm_kernels")]
os.environ["PYTHONPATH"] = os.pathsep.join([*_ROOTS, *filter(None, [os.environ.get("PYTHONPATH")])])
