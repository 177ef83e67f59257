"""Write the notebooks from the scripts beside them, whose cells begin at `# %%`.

python examples/notebooks/build.py          # rewrites the notebooks
python examples/notebooks/build.py --check  # fails if it would change one
"""

import json
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPTS = sorted(path for path in HERE.glob("*.py") if path.name != "build.py")
CELL = re.compile(r"^# %%( \[markdown\])?\n", re.MULTILINE)


def notebook(script: str) -> str:
    """A notebook (nbformat 4.5) of a script's cells, without outputs."""
    _, *parts = CELL.split(script)
    cells = []
    for number, (kind, text) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
        text = text.strip("\n")
        if kind:
            text = re.sub(r"^# ?", "", text, flags=re.MULTILINE)
        cell = dict(cell_type="markdown" if kind else "code", id=f"cell-{number}", metadata={})
        cells.append(
            cell | ({} if kind else dict(execution_count=None, outputs=[])) | dict(source=text.splitlines(True))
        )
    kernel = dict(display_name="Python 3", language="python", name="python3")
    made = dict(
        cells=cells, metadata=dict(kernelspec=kernel, language_info=dict(name="python")), nbformat=4, nbformat_minor=5
    )
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    stale = []
    for script in SCRIPTS:
        path, text = script.with_suffix(".ipynb"), notebook(script.read_text(encoding="utf-8"))
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(text, encoding="utf-8")
    if stale and "--check" in sys.argv:
        raise SystemExit(f"not what the scripts say: {', '.join(stale)}")


if __name__ == "__main__":
    main()
