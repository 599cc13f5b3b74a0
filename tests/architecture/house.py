"""The size and order of the code base in figures: `make house`, or `python -m tests.architecture.house`.

    --checkout DIR      of another checkout, an older one for example
    --json              one JSON object, to be kept
    --beside FILE       such an object in a column of its own, to the left
    --walk              the two walks too, file by file; --quick: without walks and wheel
    --test-minutes N    what `make test` took, for the table

The product is the Python below shared, services, kvstore and deploy, without what is generated. This reads files only,
and so works for checkouts of other names and rules than this one's; only the walks and the wheel run their code.
"""

from __future__ import annotations

import argparse
import ast
import gc
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tokenize
import zipfile
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

PRODUCT = ("shared", "services", "kvstore", "deploy")
MAX_MODULES_OF_A_FOLDER = 15
MAX_LINES_OF_A_MODULE = 500
SETTINGS = ("enforce_eager", "kv_cache_dtype", "load_format")
"""Settings of a worker whose mentions are counted. What takes effect lies in the worker: everything outside it, and the
worker's configuration, is an edit that a new setting would need, too. Benchmarks have options of their own."""
TAKES_EFFECT = ("services/worker/", "services/bench/", "deploy/bench/")  # the last one of older checkouts
PLUMBING = ("docker-compose.yml", ".env.example")
"""Files beside the product's that settings are written into."""
DOCSTRING_RULES = "D100,D101,D102,D103,D104,D106"
WALKER = Path(__file__).with_name("walk.py")


class Module(NamedTuple):
    """A file of the product."""

    path: str
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """As it is imported."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def is_package(self) -> bool:
        """Whether it is an `__init__.py`."""
        return self.path.endswith("/__init__.py")

    @property
    def lines(self) -> int:
        """All of them."""
        return self.text.count("\n")

    @property
    def code_lines(self) -> int:
        """Those that hold code: no docstrings (of attributes neither), comments and blank lines."""
        documented: set[int] = set()
        for node in ast.walk(self.tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                documented.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        quiet = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
        held: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in quiet:
                held.update(range(token.start[0], token.end[0] + 1))
        return len(held - documented)


def parsed(texts: Iterable[str]) -> list[ast.Module]:
    """Without the garbage collector: it would look through all that is kept time and again, for thrice as long."""
    gc.disable()
    try:
        return [ast.parse(text) for text in texts]
    finally:
        gc.enable()


class House:
    """The product of one checkout. Reads it once; every figure is computed from what was read."""

    def __init__(self, checkout: Path) -> None:
        self.checkout = checkout
        paths = sorted(path for folder in PRODUCT for path in (checkout / folder).rglob("*.py"))
        kept = [path for path in paths if not path.stem.endswith("_pb2")]
        texts = {path: path.read_text(encoding="utf-8") for path in kept}
        trees = parsed(texts.values())
        names = [str(path.relative_to(checkout)) for path in kept]
        self.modules = [Module(*each) for each in zip(names, texts.values(), trees, strict=True)]

    @cached_property
    def sizes(self) -> list[int]:
        """Lines of each module, ascending; `__init__.py` is none."""
        return sorted(module.lines for module in self.modules if not module.is_package)

    def long_modules(self) -> list[str]:
        """Those with more lines than a reader wants to open."""
        return [module.path for module in self.modules if module.lines > MAX_LINES_OF_A_MODULE]

    def folders(self) -> dict[str, int]:
        """How many modules lie in each folder, `__init__.py` not counted, the fullest first."""
        counted = Counter(str(Path(module.path).parent) for module in self.modules if not module.is_package)
        return dict(counted.most_common())

    def full_folders(self) -> dict[str, int]:
        """Those with more modules than a reader wants to choose from."""
        return {folder: count for folder, count in self.folders().items() if count > MAX_MODULES_OF_A_FOLDER}

    def repeated_classes(self) -> dict[str, list[str]]:
        """Classes of the same name, private ones too, and where they are defined."""
        found: defaultdict[str, list[str]] = defaultdict(list)
        for module in self.modules:
            for node in ast.walk(module.tree):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(module.path)
        return {name: paths for name, paths in sorted(found.items()) if len(paths) > 1}

    def imports(self) -> dict[str, set[str]]:
        """Which modules of the product each imports, anywhere in it, for types alone excepted."""
        known = {module.name for module in self.modules}
        return {module.name: set(_imported(module.tree, known)) for module in self.modules}

    def package_cycles(self) -> list[list[str]]:
        """Sibling packages that import each other, in a circle; modules that lie beside them do not count."""
        packages = {module.name for module in self.modules if module.is_package}
        found = []
        for parent in ["", *sorted(packages)]:
            siblings = {name for name in packages if name.rpartition(".")[0] == parent}
            arrows: defaultdict[str, set[str]] = defaultdict(set)
            for importer, imported in self.imports_of_packages(siblings):
                arrows[importer].add(imported)
            found += _cycles(arrows)
        return found

    def imports_of_packages(self, packages: Collection[str]) -> Iterator[tuple[str, str]]:
        """Pairs of different ones, of which the first imports the second."""
        for importer, imported in self._imports.items():
            above = _belongs_to(importer, packages)
            if above is not None:
                others = {_belongs_to(each, packages) for each in imported} - {above, None}
                yield from ((above, other) for other in others if other is not None)

    @cached_property
    def _imports(self) -> dict[str, set[str]]:
        return self.imports()

    def undocumented(self) -> list[str]:
        """Public names without docstring, as ruff finds them: magic methods and `__init__` need none."""
        command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--output-format=concise"]
        command += [f"--select={DOCSTRING_RULES}", "--extend-exclude=*_pb2.py", "--exit-zero", *PRODUCT]
        done = subprocess.run(command, cwd=self.checkout, capture_output=True, text=True, check=True)
        return [line for line in done.stdout.splitlines() if re.search(r": D\d+ ", line)]

    def mentions(self, setting: str) -> list[str]:
        """Lines that name a setting in any spelling where it does not take effect: `path:line`."""
        spelled = re.compile(setting.replace("_", "[_-]"), re.IGNORECASE)
        texts = {module.path: module.text for module in self.modules if _is_plumbing(module.path)}
        texts |= {name: (self.checkout / name).read_text() for name in PLUMBING if (self.checkout / name).is_file()}
        return [
            f"{path}:{number}"
            for path, text in texts.items()
            for number, line in enumerate(text.splitlines(), 1)
            if spelled.search(line)
        ]


def _is_plumbing(path: str) -> bool:
    return path == "services/worker/config.py" or not path.startswith(TAKES_EFFECT)


def _imported(tree: ast.Module, known: Collection[str]) -> Iterator[str]:
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            within = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in within if name in known)
            if node.module in known and not all(name in known for name in within):
                yield node.module
        waiting += ast.iter_child_nodes(node)


def _belongs_to(module: str, packages: Collection[str]) -> str | None:
    """Which of several packages, none of them in another, a module lies in; None: in none."""
    parts = module.split(".")
    above = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return next((name for name in above if name in packages), None)


def _cycles(arrows: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Strongly connected parts of more than one node."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            new = set(arrows.get(waiting.pop(), ())) - found
            found |= new
            waiting += new
        return found

    reach = {node: reached(node) for node in arrows}
    parts = {tuple(sorted({node} | {other for other in reach[node] if node in reach.get(other, ())})) for node in reach}
    return [list(part) for part in sorted(parts) if len(part) > 1]


def percentile(values: Sequence[int], percent: int) -> int:
    """The nearest of ascending values."""
    return values[min(len(values) - 1, len(values) * percent // 100)] if values else 0


def walks(checkout: Path) -> dict[str, Any]:
    """Functions and files of one request and one step, as `walk.py` traces them. Empty where it cannot."""
    command = [sys.executable, str(WALKER), str(checkout), "--json"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        print(f"no walks: {done.stderr[-500:]}", file=sys.stderr)
        return {}
    found = json.loads(done.stdout.splitlines()[-1])
    return {
        key: value
        for name, walk in found.items()
        for key, value in (
            (f"{name}_functions", len(walk)),
            (f"{name}_files", len({file for file, _, _ in walk})),
        )
    }


def wheel(checkout: Path) -> dict[str, Any]:
    """Size and top-level names of the wheel, built in a copy of what git knows. Empty where it cannot be built."""
    with tempfile.TemporaryDirectory(prefix="baton-house-") as folder:
        copy = Path(folder) / "checkout"
        listed = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
        names = subprocess.run(listed, cwd=checkout, capture_output=True, text=True, check=True).stdout.split("\0")
        for name in filter(None, names):
            if (checkout / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(checkout / name, copy / name)
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--quiet"]
        command += ["--no-build-isolation", "--wheel-dir", folder, str(copy)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        built = next(Path(folder).glob("*.whl"), None)
        if done.returncode != 0 or built is None:
            print(f"no wheel: {done.stderr[-500:]}", file=sys.stderr)
            return {}
        with zipfile.ZipFile(built) as archive:
            top = sorted({name.split("/")[0] for name in archive.namelist() if ".dist-info" not in name})
        return {"wheel_kib": built.stat().st_size // 1024, "wheel_top_level": ", ".join(top)}


def figures(house: House, *, quick: bool, test_minutes: float | None) -> dict[str, Any]:
    """Every figure of the table, by its key."""
    mentions = {setting: house.mentions(setting) for setting in SETTINGS}
    found: dict[str, Any] = {
        "files": len(house.modules),
        "lines": sum(module.lines for module in house.modules),
        "code_lines": sum(module.code_lines for module in house.modules),
        "median_module": percentile(house.sizes, 50),
        "p90_module": percentile(house.sizes, 90),
        "long_modules": len(house.long_modules()),
        "folders": len(house.folders()),
        "fullest_folder": max(house.folders().values()),
        "full_folders": len(house.full_folders()),
        "package_cycles": len(house.package_cycles()),
        "repeated_classes": len(house.repeated_classes()),
        "undocumented": len(house.undocumented()),
        "setting_edits": sum(map(len, mentions.values())) / len(mentions),
        "setting_files": sum(len({line.split(":")[0] for line in lines}) for lines in mentions.values())
        / len(mentions),
    }
    if not quick:
        found |= walks(house.checkout) | wheel(house.checkout)
    if test_minutes is not None:
        found["test_minutes"] = test_minutes
    return found


TITLES = {
    "files": "files of the product",
    "lines": "lines",
    "code_lines": "lines of code: no docstrings, comments, blanks",
    "median_module": "lines of a module, median",
    "p90_module": "lines of a module, 90th percentile",
    "long_modules": f"modules above {MAX_LINES_OF_A_MODULE} lines",
    "folders": "folders with modules",
    "fullest_folder": "modules of the fullest folder",
    "full_folders": f"folders above {MAX_MODULES_OF_A_FOLDER} modules",
    "request_functions": "one chat request: functions",
    "request_files": "one chat request: files",
    "step_functions": "one decode step: functions",
    "step_files": "one decode step: files",
    "package_cycles": "import cycles of sibling packages",
    "repeated_classes": "class names used more than once",
    "undocumented": "public names without docstring",
    "setting_edits": "lines that name a worker's setting outside where it takes effect, mean of three",
    "setting_files": "files of these",
    "wheel_kib": "wheel, KiB",
    "wheel_top_level": "wheel, top-level names",
    "test_minutes": "make test, minutes",
}


def table(columns: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: a row for each figure, a column for each checkout."""
    rows = [["", *columns]]
    for key, title in TITLES.items():
        if any(key in found for found in columns.values()):
            rows.append([title, *(_shown(found.get(key)) for found in columns.values())])
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    rows.insert(1, ["-" * widths[0], *(f"{'-' * (width - 1)}:" for width in widths[1:])])
    return "\n".join(
        "| "
        + " | ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        + " |"
        for row in rows
    )


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def details(house: House) -> str:
    """What the counts are of: the names behind each rule that does not hold."""
    lines = [f"above {MAX_LINES_OF_A_MODULE} lines: {path}" for path in house.long_modules()]
    lines += [f"{count} modules: {folder}" for folder, count in house.full_folders().items()]
    lines += [f"cycle: {' ↔ '.join(cycle)}" for cycle in house.package_cycles()]
    lines += [f"class {name}: {', '.join(paths)}" for name, paths in house.repeated_classes().items()]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, default=Path(__file__).parents[2])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--beside", type=Path, metavar="FILE")
    parser.add_argument("--details", action="store_true", help="name what breaks a rule")
    parser.add_argument("--walk", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--test-minutes", type=float)
    options = parser.parse_args(argv)
    house = House(options.checkout.resolve())
    found = figures(house, quick=options.quick, test_minutes=options.test_minutes)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    before = {} if options.beside is None else {"before": json.loads(options.beside.read_text())}
    print(table({**before, "now": found}))
    if options.details:
        print("\n" + details(house))
    if options.walk:
        print(flush=True)
        subprocess.run([sys.executable, str(WALKER), str(house.checkout)], cwd=house.checkout, check=False)


if __name__ == "__main__":
    main()
