"""`python -m deploy.without_network.install`: a virtual environment from a folder of wheels, without a network.

It sees all that the Python which runs this sees: PyTorch and whatever else lies there is used as it is, unless it is
too old, for which the folder has another. Nothing is built; the repository is used where it stands, as by an editable
install.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

from deploy.wheel.names import LIBRARY, library_package
from deploy.without_network.needs import REPOSITORY, Project, project

_INSTALL_SECONDS = 300
_STAMPS = (".runtime-installed", ".dev-installed", ".kernels-built")
"""By which the Makefile knows that it has nothing to fetch."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, or pip's own where it fails."""
    options = _parsed(argv)
    ours = project()
    venv.EnvBuilder(with_pip=False, clear=True).create(options.venv)
    python, packages = options.venv / "bin" / "python", _packages(options.venv)
    _see_what_is_there(packages)
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(options.wheels)]
    done = subprocess.run([*command, *ours.requirements], timeout=_INSTALL_SECONDS, check=False)
    if done.returncode != 0:
        return done.returncode
    _add_ourselves(packages, python, ours)
    for stamp in _STAMPS:
        (options.venv / stamp).touch()
    print(f"installed in {options.venv}: {options.venv}/bin/baton, make test-gpu VENV={options.venv}")
    return 0


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m deploy.without_network.install", description=__doc__)
    parser.add_argument("--wheels", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--venv", type=Path, required=True, metavar="DIR", help="Virtual environment; it is created anew."
    )
    return parser.parse_args(argv)


def _packages(where: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(where), "platbase": str(where)}))


def _see_what_is_there(packages: Path) -> None:
    """Behind the environment's own packages. `--system-site-packages` would show those of the Python from which another
    virtual environment was made, not that one's."""
    folders = [each for each in sys.path if Path(each).name in ("site-packages", "dist-packages")]
    lines = [f"import site; site.addsitedir({folder!r})" for folder in folders]
    (packages / "what-is-there.pth").write_text("\n".join(lines) + "\n")


def _add_ourselves(packages: Path, python: Path, ours: Project) -> None:
    (packages / "baton-repository.pth").write_text(f"{REPOSITORY}\n")
    library = {f"{packages}/{name}": content for name, content in library_package(LIBRARY).items()}
    for path, content in library.items():
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_bytes(content)
    described = packages / f"{ours.name.replace('-', '_')}-{ours.version}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {ours.name}\nVersion: {ours.version}\n")
    command = python.with_name("baton")
    command.write_text(f"#!{python.absolute()}\nfrom deploy.cli import main\n\nmain()\n")
    command.chmod(0o755)


if __name__ == "__main__":
    raise SystemExit(main())
