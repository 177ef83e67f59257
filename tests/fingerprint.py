"""What the attributes of the libraries around fastlm are, told so that two moments or two processes can be compared."""

import hashlib
import json
import sys
import types

LIBRARIES = ("torch", "transformers", "peft", "trl", "bitsandbytes", "accelerate", "datasets", "huggingface_hub")
MARK = "FINGERPRINT"


def tell(value: object) -> str:
    """Functions by their code, values by their text, everything else by its type."""
    kind = type(value)  # isinstance asks the value itself, and some of torch's start CUDA when asked
    if kind in (classmethod, staticmethod, types.MethodType):
        return tell(value.__func__)
    if kind is property:
        return " ".join(tell(part) for part in (value.fget, value.fset, value.fdel))
    if kind is types.FunctionType:
        code = value.__code__
        return f"{code.co_filename}:{code.co_firstlineno} {code.co_qualname} {hashlib.sha1(code.co_code).hexdigest()}"
    if kind in (int, float, str, bytes):
        return f"= {value!r}"
    if kind in (bool, types.NoneType):
        return repr(value)
    if issubclass(kind, type):
        return f"class {value.__module__}.{value.__qualname__}"
    return f"a {kind.__name__}"


def fingerprint() -> dict[str, str]:
    """ "module:attribute" and "module:Class.member" -> what it is, for every loaded module of the libraries."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    found = {}
    for name, module in list(sys.modules.items()):
        # lazy modules gain names as they are used
        if name.split(".")[0] not in LIBRARIES or type(module) is not types.ModuleType:
            continue
        for key, value in list(vars(module).items()):
            if type(value) is types.ModuleType or key in ("__builtins__", "__path__", "__warningregistry__"):
                continue
            found[f"{name}:{key}"] = tell(value)
            if issubclass(type(value), type) and value.__module__ == name:
                for member, inner in list(vars(value).items()):
                    found[f"{name}:{key}.{member}"] = tell(inner)
    for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        found[f"registry:{type(registry).__name__}"] = " ".join(sorted(registry.keys()))
    return found


def show() -> None:
    print(MARK + json.dumps(fingerprint()))


def read(output: str) -> list[dict[str, str]]:
    """The fingerprints that a process printed by `show`."""
    return [json.loads(line.removeprefix(MARK)) for line in output.splitlines() if line.startswith(MARK)]


def differences(before: dict[str, str], after: dict[str, str]) -> dict[str, tuple[str | None, str | None]]:
    """Attributes of the modules in `before` that were added, removed or replaced."""
    modules = {key.partition(":")[0] for key in before}
    keys = before.keys() | {key for key in after if key.partition(":")[0] in modules}
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}
