"""The root namespace: complete, sorted, and light to import."""

import subprocess
import sys

import pytest

import agentcache
from agentcache import errors

LIGHT = [
    "agentcache",
    "agentcache.cache",
    "agentcache.components",
    "agentcache.policy",
    "agentcache.replay",
    "agentcache.sessions",
    "agentcache.tree",
]


def test_public_names_are_sorted_and_unique():
    assert agentcache.__all__ == sorted(set(agentcache.__all__))


@pytest.mark.parametrize("name", agentcache.__all__)
def test_public_name_resolves(name):
    value = getattr(agentcache, name)
    assert name == "__version__" or value.__name__ == name


def test_every_error_is_public():
    assert set(errors.__all__) <= set(agentcache.__all__)


def test_public_names_are_listed_by_dir():
    assert set(agentcache.__all__) <= set(dir(agentcache))


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        agentcache.no_such_name  # noqa: B018 - the access is the test


@pytest.mark.parametrize("package", LIGHT)
def test_room_imports_without_tensors(package):
    code = f"""
import importlib, pkgutil, sys
package = importlib.import_module({package!r})
if {package != "agentcache"} and hasattr(package, "__path__"):
    for module in pkgutil.walk_packages(package.__path__, {package + "."!r}):
        importlib.import_module(module.name)
print(sorted({{"torch", "triton", "transformers"}} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_runtime_imports_without_the_code_of_models():
    code = """
import sys
from agentcache import Runtime
heavy = {"transformers.activations", "transformers.modeling_utils", "sympy", "torch._dynamo"}
print(sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
