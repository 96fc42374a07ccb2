"""The rules of the layout: the namespace, who imports whom, what pure code may call."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = (ROOT / "shared" / "baton", ROOT / "services" / "baton")
SOURCES = sorted(path for root in SOURCE_ROOTS for path in root.rglob("*.py"))

#: Modules and calls that would make a decision depend on more than its arguments.
IMPURE_MODULES = frozenset({"asyncio", "random", "secrets", "socket", "threading", "time", "zmq"})
IMPURE_CALLS = frozenset({"open", "print", "input"})
#: Machines: pure although they live beside their shells.
MACHINES = sorted(ROOT.glob("services/baton/*/machine.py"))
PURE = [path for path in SOURCES if path.is_relative_to(ROOT / "shared/baton/core")] + [
    path for path in SOURCES if path.is_relative_to(ROOT / "shared/baton/wire")
]

LINES_LOOK_AGAIN = 500
LINES_MAX = 700


def relative(path: Path) -> str:
    """Return ``path`` as an operator would name it."""
    return str(path.relative_to(ROOT))


def test_baton_is_a_namespace() -> None:
    """No root has an __init__.py, or one root would hide the other; every package has one."""
    for root in SOURCE_ROOTS:
        assert not (root / "__init__.py").exists(), f"{root} must stay a namespace"
        for folder in root.iterdir():
            if folder.is_dir() and any(folder.glob("*.py")):
                assert (folder / "__init__.py").is_file(), f"{folder} needs an __init__.py"


@pytest.mark.parametrize("path", [*PURE, *MACHINES], ids=relative)
def test_pure_code_is_pure(path: Path) -> None:
    """Core, wire and machines use no clock, socket, thread, chance or console."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        where = f"{relative(path)}:{getattr(node, 'lineno', 0)}"
        match node:
            case ast.Import(names=names):
                used = {alias.name.partition(".")[0] for alias in names}
                assert not used & IMPURE_MODULES, where
            case ast.ImportFrom(module=str(module)):
                assert module.partition(".")[0] not in IMPURE_MODULES, where
            case ast.Call(func=ast.Name(id=name)):
                assert name not in IMPURE_CALLS, where
            case _:
                pass


def test_every_module_says_what_it_decides() -> None:
    """Each module has a docstring, and a service's __main__ only wires (< 60 lines)."""
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        if path.name != "__init__.py":
            assert ast.get_docstring(ast.parse(text)), f"{relative(path)} has no docstring"
        if path.name == "__main__.py" and (path.parent / "machine.py").exists():
            assert len(text.splitlines()) < 60, f"{relative(path)} does more than wire"


def test_file_length() -> None:
    """No file is longer than 700 lines; those over 500 are named, to be looked at again."""
    lengths = {relative(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert not {name: n for name, n in lengths.items() if n > LINES_MAX}
    long = {name: n for name, n in lengths.items() if n > LINES_LOOK_AGAIN}
    if long:
        warnings.warn(f"look again at {long}", stacklevel=1)


_RUNS_WHAT_IT_READS = re.compile(
    r"\b(pickle|cPickle|dill|cloudpickle|marshal|shelve)\b|recv_pyobj|send_pyobj"
    r"|yaml\.load\b|torch\.load\(|(?<![.\w])(eval|exec)\("
)


def test_nothing_is_unpickled() -> None:
    """(129) No wire, file or memory is read by something that can run code."""
    found = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if _RUNS_WHAT_IT_READS.search(line.partition("#")[0])
    ]
    assert found == []


_BEGINS_TASKS = re.compile(r"\b(create_task|ensure_future)\(|\bTaskGroup\(")
#: Who begins tasks, and looks at their ends: services by the first, the start of a process, and an
#: adapter that is below both.
_TASKS_OF = frozenset(
    f"shared/baton/{name}.py" for name in ("runtime/tasks", "runtime/shell", "ledger/redis_ledger")
)
#: Tools that run from outside: what they begin is awaited by the run.
_TOOLS = tuple(ROOT / "services/baton" / name for name in ("bench", "cli"))


def test_no_task_is_begun_that_nobody_looks_at() -> None:
    """(127) A task's error is lost unless somebody asks for it: there is one way to begin one."""
    found = {
        relative(path)
        for path in SOURCES
        if not any(path.is_relative_to(tool) for tool in _TOOLS)
        and _BEGINS_TASKS.search(path.read_text())
    }
    assert found == _TASKS_OF


# --- import rules, with import-linter -----------------------------------------------------------


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter over the tree at ``root``."""
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": "shared:services", "NO_COLOR": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_import_rules_hold() -> None:
    """Layers, independence of services, no simulator in production, no torch outside engines."""
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_import_rules_catch_violations(tmp_path: Path) -> None:
    """A planted violation of each rule is found: the contracts are not vacuous."""
    for root in ("shared", "services"):
        shutil.copytree(ROOT / root, tmp_path / root, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    planted = {
        "shared/baton/core/planted.py": "import baton.wire.messages\nimport socket\n",
        "services/baton/gateway/planted.py": "import baton.router\nimport baton.runtime.planted\n",
        "shared/baton/runtime/planted.py": "import transformers\nimport baton.sim\n",
    }
    for name, text in planted.items():
        (tmp_path / name).write_text(text)
    result = lint_imports(tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    for chain in (
        "baton.core is not allowed to import baton.wire",
        "baton.core is not allowed to import socket",
        "baton.gateway is not allowed to import baton.router",
        "baton.gateway is not allowed to import transformers",
        "baton.runtime is not allowed to import baton.sim",
    ):
        assert chain in result.stdout, f"not found: {chain}\n{result.stdout}"
