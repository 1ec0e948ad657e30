"""What a user installs: built from the tree, put in an empty environment, every module imported.

Third-party packages come from the running environment by a .pth line, so nothing is downloaded;
such a line does not carry over the running environment's own editable install.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from agentcache.kernels import rows
from agentcache.pools.pages import IS_COMPILED

pytestmark = pytest.mark.timeout(600)  # a wheel is compiled for a minute
ROOT = Path(__file__).parents[2]
ROOMS = ["engine", "kernels", "integrations"]
SOURCES = ["pyproject.toml", "setup.py", "README.md", "LICENSE", "agentcache", *ROOMS]


class Distributions(NamedTuple):
    """What one build leaves: the sdist, and the wheel that was made from that sdist."""

    sdist: Path
    wheel: Path


class Environment(NamedTuple):
    """A virtual environment: its folder, interpreter and site-packages."""

    home: Path
    python: Path
    site: Path


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that must succeed."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Distributions:
    """Built from a copy, so that no earlier build's leftovers slip in and none are left."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "*.so", "_pages.c", "_rows.c")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy2(ROOT / name, source / name)
    run(sys.executable, "-P", "-m", "build", "--no-isolation", "--outdir", out, ".", cwd=source)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return Distributions(sdist, wheel)


@pytest.fixture(scope="module")
def empty(built, tmp_path_factory) -> Environment:
    """An environment that holds the wheel and, by a .pth line, the packages it depends on."""
    home = tmp_path_factory.mktemp("empty")
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    install = ["install", "--no-deps", "--no-index", "--no-compile", built.wheel]
    run(sys.executable, "-P", "-m", "pip", "--python", python, *install, cwd=home)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(python, "-I", "-c", where, cwd=home).strip())
    (site / "third_party.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Environment(home, python, site)


def modules_in(wheel: Path) -> list[str]:
    """Import names of all Python files in a wheel."""
    names = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")]
    return sorted(
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in names
    )


def tree_files() -> set[str]:
    """Every file of the package in the tree, links followed, by its path in a wheel."""
    return {
        (Path(folder) / name).relative_to(ROOT).as_posix()
        for folder, _, names in os.walk(ROOT / "agentcache", followlinks=True)
        for name in names
        if not folder.endswith("__pycache__")
    }


def test_wheel_holds_every_module_of_the_tree(built):
    names = zipfile.ZipFile(built.wheel).namelist()
    assert {name for name in names if name.endswith(".py")} == {
        name for name in tree_files() if name.endswith(".py")
    }


def test_wheel_has_one_top_level_package(built):
    tops = {name.split("/")[0] for name in zipfile.ZipFile(built.wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"agentcache"}


def test_sdist_holds_plain_files_and_folders_only(built):
    with tarfile.open(built.sdist) as sdist:
        members = sdist.getmembers()
    assert all(member.isfile() or member.isdir() for member in members)
    tops = {member.name.split("/")[1] for member in members if "/" in member.name}
    assert not tops & set(ROOMS)


def test_distributions_hold_what_is_compiled(built):
    """A wheel is built from the sdist, so the sources in that are enough."""
    names = zipfile.ZipFile(built.wheel).namelist()
    held = any(n.startswith("agentcache/kernels/_rows.") and n.endswith(".so") for n in names)
    assert held == rows.IS_COMPILED
    with tarfile.open(built.sdist) as sdist:
        inside = {name.partition("/")[2] for name in sdist.getnames()}
    assert {
        f"agentcache/kernels/{path.name}"
        for path in (ROOT / "kernels").glob("_rows*")
        if path.suffix in (".h", ".pyx")
    } <= inside


def test_wheel_holds_the_data_of_the_package(built):
    tree = tree_files()
    data = {name for name in tree if name.startswith("agentcache/data/")}
    assets = {
        name
        for name in tree
        if (name.startswith("agentcache/engine/") and name.endswith((".json", ".jinja")))
        or "/assets/" in name
        or name.startswith("agentcache/store/migrations/")
    }
    assert data
    assert any(name.endswith(".jinja") for name in assets)
    assert any(name.startswith("agentcache/integrations/server/assets/") for name in assets)
    names = zipfile.ZipFile(built.wheel).namelist()
    assert data | assets | {"agentcache/py.typed"} <= set(names)


def test_every_module_imports_from_an_empty_environment(built, empty):
    code = """
import importlib, sys
for name in sys.argv[1:]:
    print(getattr(importlib.import_module(name), "__file__"))
"""
    modules = modules_in(built.wheel)
    files = run(empty.python, "-I", "-c", code, *modules, cwd=empty.home).splitlines()
    assert len(files) == len(modules)
    assert all(Path(file).is_relative_to(empty.site / "agentcache") for file in files)


def test_wheel_holds_the_compiled_allocator_where_there_is_a_compiler(built, empty):
    code = "from agentcache.pools.pages import IS_COMPILED; print(IS_COMPILED)"
    assert run(empty.python, "-I", "-c", code, cwd=empty.home).strip() == str(IS_COMPILED)


def test_rooms_are_no_top_level_modules(empty):
    code = f"""
import importlib.util, sys
sys.path.append({str(empty.site)!r})
print([name for name in sys.argv[1:] if importlib.util.find_spec(name)])
"""
    # -S leaves out the .pth line, and with it what third parties may have installed
    found = run(empty.python, "-S", "-P", "-c", code, "agentcache", *ROOMS, cwd=empty.home)
    assert found.strip() == "['agentcache']"


def test_command_is_installed(empty):
    assert "replay" in run(empty.python.parent / "agentcache", "--help", cwd=empty.home)


@pytest.mark.parametrize("room", ROOMS)
def test_room_is_a_relative_link_in_the_tree(room):
    assert os.readlink(ROOT / "agentcache" / room) == f"../{room}"


def test_kernels_folder_has_no_init():
    """transformers runs any top-level kernels/__init__.py that it can import."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
