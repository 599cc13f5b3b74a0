"""Installing without a network: what is needed is read from the project, and what lies there is used."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from deploy.without_network import install
from deploy.without_network.needs import REPOSITORY, canonical, comes_with_the_machine, names_in, project
from deploy.without_network.wheels import _fetched, needs_of


def test_all_that_the_project_says_is_needed_but_what_only_developers_do() -> None:
    names = {canonical(each) for each in project().requirements}
    assert {"msgspec", "nats-py", "xgrammar", "torch", "redis", "typer", "matplotlib", "pytest-asyncio"} <= names
    assert not {"mypy", "ruff", "openai", "ziglang"} & names
    assert project().name == "baton-serve"


def test_whatever_belongs_to_the_gpus_driver_comes_with_the_machine() -> None:
    told = {"numpy"}
    names = ("torch", "triton", "nvidia-cublas", "cuda-bindings", "numpy", "msgspec", "torchmetrics")
    assert [comes_with_the_machine(name, told) for name in names] == [True] * 5 + [False] * 2


@pytest.mark.parametrize(
    "text",
    [
        "numpy, PyYAML, typing_extensions",
        "numpy  2.5.2\nPyYAML 6.0\n\ntyping_extensions 4\n# torch\n",
        "numpy\nPyYAML typing-extensions",
    ],
)
def test_packages_that_are_there_are_listed_as_one_likes(text: str, tmp_path: Path) -> None:
    (tmp_path / "there.txt").write_text(text)
    assert names_in(tmp_path / "there.txt") == {"numpy", "pyyaml", "typing-extensions"}
    assert names_in(None) == frozenset()


def test_a_wheels_needs_are_those_of_the_other_machine(tmp_path: Path) -> None:
    wheel = tmp_path / "made-1-py3-none-any.whl"
    needs = [
        "plain",
        'older; python_version < "3.12"',
        'windows; sys_platform == "win32"',
        'linux>=2; sys_platform == "linux"',
        'more; extra == "more"',
        "torch>=2",
        "numpy",
    ]
    metadata = "Metadata-Version: 2.1\nName: made\nVersion: 1\n" + "".join(f"Requires-Dist: {need}\n" for need in needs)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("made-1.dist-info/METADATA", f"{metadata}\nRequires-Dist: in the description\n")
    assert needs_of(wheel) == needs
    fetched = [need for need in needs_of(wheel) if _fetched(need, "3.12", frozenset({"numpy"}))]
    assert fetched == ["plain", 'linux>=2; sys_platform == "linux"']


def test_an_environment_sees_what_is_there_and_baton_without_anything_being_fetched(tmp_path: Path) -> None:
    """From an empty folder of wheels: all that is needed is seen where this Python has it."""
    wheels, made = tmp_path / "wheels", tmp_path / "venv"
    wheels.mkdir()
    assert install.main(["--wheels", str(wheels), "--venv", str(made)]) == 0
    assert all((made / stamp).is_file() for stamp in (".runtime-installed", ".dev-installed", ".kernels-built"))
    program = "import msgspec, sys; from importlib.metadata import version; print(sys.prefix, version('baton-serve'))"
    command = [str(made / "bin" / "python"), "-c", f"import deploy.cli, services.worker; {program}"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert said.stdout.split() == [str(made), project().version], said.stderr
    helped = subprocess.run(
        [made / "bin" / "baton", "version"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert helped.stdout.startswith(f"baton {project().version}"), helped.stderr


def test_it_needs_nothing_that_is_not_with_every_python() -> None:
    program = "import sys, deploy.without_network.install; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); {program}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    outside = (
        {name.partition(".")[0] for name in done.stdout.split()} - sys.stdlib_module_names - {"deploy", "__main__"}
    )
    assert {name for name in outside if not name.startswith("_")} == set()
