"""Setting up: PyTorch as it fits the machine, and how much is fetched, by the real pip on indexes of our own."""

from __future__ import annotations

import functools
import importlib.metadata
import threading
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from deploy import set_up
from deploy.set_up import PlanFailed, build_for_cpus, chosen, main, plan, sizes, told

TORCH = "torch>=2.11,<2.14"
CUDA_BYTES = 300_000


class Index(SimpleHTTPRequestHandler):
    """Files of a folder; a folder's listing is what pip looks for wheels in."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


def wheel(folder: Path, name: str, version: str, requires: tuple[str, ...] = (), content: bytes = b"") -> None:
    folder = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    with zipfile.ZipFile(folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{info}/METADATA", metadata + "".join(f"Requires-Dist: {each}\n" for each in requires))
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
        archive.writestr(f"{name.replace('-', '_')}.py", content)


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a server with `pypi`, whose PyTorch needs CUDA, `cpu`, whose does not, and `nothing`."""
    root = tmp_path_factory.mktemp("indexes")
    wheel(root / "pypi", "serving", "1.0", (TORCH, "plain"))
    wheel(root / "pypi", "plain", "3.1")
    wheel(root / "pypi", "torch", "2.13.0", ("nvidia-cublas==13.1", "plain"))
    wheel(root / "pypi", "torch", "2.14.0", ("nvidia-cublas==13.1",))
    wheel(root / "pypi", "nvidia-cublas", "13.1", content=b"0" * CUDA_BYTES)
    for version in ("2.12.0+cpu", "2.13.0+cpu", "2.14.0+cpu"):
        wheel(root / "cpu", "torch", version, ("plain",))
    (root / "nothing" / "torch").mkdir(parents=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Index, directory=str(root))) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def pypi(indexes: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The arguments of every `pip install` begin with it: nothing of this machine's own configuration."""
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", f"{indexes}/pypi")
    return indexes


def named(packages: tuple[set_up.WantedPackage, ...]) -> list[str]:
    return sorted(f"{each.name} {each.version}" for each in packages)


def arguments(folder: Path) -> list[str]:
    """Where nothing is installed yet."""
    return ["--target", str(folder), "serving"]


def test_a_build_with_cuda_is_replaced_by_one_without(pypi: str, tmp_path: Path) -> None:
    found = plan(arguments(tmp_path))
    assert named(found.packages) == ["nvidia-cublas 13.1", "plain 3.1", "serving 1.0", "torch 2.13.0"]
    instead = plan([*found.arguments, *build_for_cpus(found, TORCH, f"{pypi}/cpu")])
    assert named(instead.packages) == ["plain 3.1", "serving 1.0", "torch 2.13.0+cpu"]
    # What pip found is what one wants: nobody is asked.
    assert build_for_cpus(instead, TORCH, "http://nowhere.invalid") == ()


def test_where_there_is_no_other_index_the_reason_is_told(pypi: str, tmp_path: Path) -> None:
    with pytest.raises(PlanFailed, match="torch"):
        build_for_cpus(plan(arguments(tmp_path)), TORCH, f"{pypi}/nothing")


def test_what_is_installed_without_a_driver_brings_no_cuda_and_its_size_is_said_before(
    pypi: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(set_up, "DRIVER", (str(tmp_path / "none"),))
    assert main(["--cpu-index", f"{pypi}/cpu", *arguments(tmp_path / "there")]) == 0
    there = importlib.metadata.distributions(path=[str(tmp_path / "there")])
    assert {each.metadata["Name"]: each.version for each in there} == {
        "serving": "1.0",
        "plain": "3.1",
        "torch": "2.13.0+cpu",
    }
    assert "set-up: fetching 3 packages, 0 MB: " in capfd.readouterr().out


def test_without_an_announcement_the_same_is_installed(
    pypi: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(set_up, "DRIVER", (str(tmp_path / "none"),))
    assert main(["--unannounced", "--cpu-index", f"{pypi}/cpu", *arguments(tmp_path / "there")]) == 0
    there = importlib.metadata.distributions(path=[str(tmp_path / "there")])
    versions = {each.metadata["Name"]: each.version for each in there}
    assert versions == {"serving": "1.0", "plain": "3.1", "torch": "2.13.0+cpu"}
    assert "fetching" not in capfd.readouterr().out


@pytest.mark.parametrize(("driver", "index"), [(True, "cpu"), (False, "nothing")])
def test_with_a_driver_or_without_another_index_it_is_what_pip_finds(
    pypi: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    driver: bool,
    index: str,
) -> None:
    (tmp_path / "driver").touch()
    monkeypatch.setattr(set_up, "DRIVER", (str(tmp_path / ("driver" if driver else "none")),))
    wanted = arguments(tmp_path / "there")
    assert list(chosen(wanted, "auto", f"{pypi}/{index}")) == wanted
    said = capfd.readouterr().out
    assert "set-up: fetching 4 packages, " in said
    assert ("no build without was found" in said) == (index == "nothing")


def test_what_pip_cannot_find_is_its_own_error(pypi: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--torch", "any", "--target", str(tmp_path), "no-such-package"]) != 0
    said = capfd.readouterr()
    assert (
        "how much will be fetched is not known: ERROR: No matching distribution found for no-such-package" in said.out
    )
    assert "no-such-package" in said.err


def test_sizes_are_what_servers_and_files_say(pypi: str, tmp_path: Path) -> None:
    (tmp_path / "x.whl").write_bytes(b"0" * 12_000_000)
    packages = [
        *(each for each in plan(arguments(tmp_path / "there")).packages if each.name == "nvidia-cublas"),
        set_up.WantedPackage("x", "1", (tmp_path / "x.whl").as_uri(), ()),
        set_up.WantedPackage("gone", "2", f"{pypi}/pypi/gone.whl", ()),
    ]
    found = sizes(packages)
    cuda = found.pop("nvidia-cublas 13.1")
    assert cuda is not None
    assert cuda > CUDA_BYTES
    assert found == {"x 1": 12_000_000, "gone 2": None}
    assert told(found) == "2 packages, 12 MB and 1 of unknown size: x 1 12 MB, 1 more"
