"""The server page: other programs on this computer ask the models, in OpenAI's protocol."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any

from PySide6.QtCore import Qt
from PySide6.QtGui import QHideEvent, QShowEvent
from PySide6.QtWidgets import QComboBox, QHBoxLayout, QLineEdit, QPlainTextEdit, QTabBar
from typing_extensions import override

from engine.settings import ServerSettings
from gui.chat.transcript import CopyButton
from gui.kit.controls import button, label
from gui.kit.forms import Form
from gui.kit.i18n import tr
from gui.kit.layout import Page, card
from gui.kit.theme import code_font, look
from gui.kit.timing import timer
from gui.kit.words import count_words
from gui.session import Session

__all__ = ["SERVER", "ServerPage"]

SERVER = ("host", "port", "queue", "idle_minutes", "log_prompts")
_WIDTH = 760
_LOOK_MS = 700
_SHOWN = 12  # requests

_SNIPPETS = {
    "Python": """from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key="{key}")
answer = client.chat.completions.create(
    model="{model}",
    messages=[{{"role": "user", "content": "Hello"}}],
)
print(answer.choices[0].message.content)""",
    "curl": """curl {url}/v1/chat/completions \\
  -H "Content-Type: application/json" \\
  -H "Authorization: Bearer {key}" \\
  -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'""",
    "JavaScript": """const response = await fetch("{url}/v1/chat/completions", {{
  method: "POST",
  headers: {{ "Content-Type": "application/json", Authorization: "Bearer {key}" }},
  body: JSON.stringify({{ model: "{model}", messages: [{{ role: "user", content: "Hello" }}] }}),
}});
console.log((await response.json()).choices[0].message.content);""",
}


class ServerPage(Page):
    """Start, stop, address, key, requests, and code to copy."""

    def __init__(self, session: Session) -> None:
        super().__init__("serverPage", tr("Server"), _WIDTH)
        self._session = session
        words = tr("Other programs on this computer can ask your models as they would ask OpenAI's service."
                   " Nothing leaves the computer unless you let it listen to others.")  # fmt: skip
        self.column.addWidget(label(words, "muted", wrap=True))
        self._make_state()
        self._make_settings()
        self._make_snippets()
        self._make_requests()
        self.column.addStretch(1)
        self._timer = timer(self, _LOOK_MS, self._look)
        session.serving.changed.connect(self._show)
        session.library_changed.connect(self._show_models)
        session.preferences.changed.connect(self._show_settings)
        self._show_models()
        self._show_settings()
        self._show()

    # ---- parts

    def _make_state(self) -> None:
        made, column = card()
        row = QHBoxLayout()
        row.setSpacing(10)
        self._model = QComboBox()
        self._model.setObjectName("serverModel")
        self._model.setAccessibleName(tr("Model to serve"))
        row.addWidget(self._model, 1)
        self._start = button(tr("Start"), "primary", "play", "on_accent")
        self._start.setObjectName("startServer")
        self._start.clicked.connect(self._begin)
        row.addWidget(self._start)
        self._stop = button(tr("Stop"))
        self._stop.setObjectName("stopServer")
        self._stop.clicked.connect(self._session.serving.stop)
        row.addWidget(self._stop)
        column.addLayout(row)
        self._words = label("", "strong", wrap=True)
        self._words.setObjectName("serverState")
        column.addWidget(self._words)
        address = QHBoxLayout()
        self._address = QLineEdit()
        self._address.setObjectName("serverAddress")
        self._address.setAccessibleName(tr("Address of the server"))
        self._address.setReadOnly(True)
        self._address.setFont(code_font(13))
        address.addWidget(self._address, 1)
        self._copy = CopyButton(made, tr("Copy the address"))
        self._copy.source = self._address.text
        address.addWidget(self._copy)
        column.addLayout(address)
        self.column.addWidget(made)

    def _make_settings(self) -> None:
        made, column = card(tr("Address and key"))
        key = QHBoxLayout()
        key.setSpacing(8)
        key.addWidget(label(tr("Key"), "field"))
        self._key = QLineEdit()
        self._key.setObjectName("serverKey")
        self._key.setAccessibleName(tr("Key that programs have to show"))
        self._key.setPlaceholderText(tr("none: every program on this computer may ask"))
        self._key.editingFinished.connect(self._keep_key)
        key.addWidget(self._key, 1)
        new = button(tr("New key"), "tiny")
        new.setObjectName("newKey")
        new.clicked.connect(self._new_key)
        key.addWidget(new)
        column.addLayout(key)
        self._form = Form(ServerSettings, SERVER, spacing=18)
        self._form.changed.connect(self._changed)
        column.addWidget(self._form)
        column.addWidget(label(tr("Takes effect when the server is started."), "caption", wrap=True))
        self.column.addWidget(made)

    def _make_snippets(self) -> None:
        made, column = card(tr("How to ask it"))
        row = QHBoxLayout()
        self._tabs = QTabBar()
        self._tabs.setObjectName("snippetTabs")
        self._tabs.setAccessibleName(tr("Language of the example"))
        self._tabs.setDrawBase(False)
        for name in _SNIPPETS:
            self._tabs.addTab(name)
        self._tabs.currentChanged.connect(lambda _index: self._show_snippet())
        row.addWidget(self._tabs)
        row.addStretch(1)
        copy = CopyButton(made, tr("Copy code"))
        copy.setObjectName("copySnippet")
        copy.source = self._snippet
        row.addWidget(copy)
        column.addLayout(row)
        self._code = QPlainTextEdit()
        self._code.setObjectName("snippet")
        self._code.setAccessibleName(tr("Code"))
        self._code.setReadOnly(True)
        self._code.setTabChangesFocus(True)
        self._code.setLineWrapMode(QPlainTextEdit.LineWrapMode.NoWrap)
        self._code.setFixedHeight(look().px(13) * 9 + 60)
        column.addWidget(self._code)
        self.column.addWidget(made)

    def _make_requests(self) -> None:
        made, column = card(tr("Requests"))
        self._live = label("", "muted", wrap=True)
        self._live.setObjectName("serverLive")
        column.addWidget(self._live)
        self._latest = label("", wrap=True)
        self._latest.setObjectName("serverRequests")
        self._latest.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        column.addWidget(self._latest)
        self.column.addWidget(made)

    # ---- what the user does

    def _begin(self) -> None:
        path = Path(self._model.currentData() or "")
        if path.name:
            self._keep_key()
            values = self._session.preferences.values
            self._session.serving.start(path, values.engine, values.server)

    def _changed(self, name: str, value: Any) -> None:
        server = self._session.preferences.values.server.model_copy(update={name: value})
        self._session.preferences.change(server=server)

    def _keep_key(self) -> None:
        key = self._key.text().strip()
        self._changed("api_key", (key,) if key else ())

    def _new_key(self) -> None:
        self._key.setText(f"nook-{secrets.token_urlsafe(24)}")
        self._keep_key()

    # ---- what is to be seen

    def arrive(self) -> None:
        """The page comes into view."""
        (self._stop if self._session.serving.state.kind == "on" else self._start).setFocus()

    def _show_models(self) -> None:
        chosen = self._model.currentData()
        self._model.clear()
        for entry in self._session.models:
            self._model.addItem(entry.name, str(entry.path))
        self._model.setCurrentIndex(max(0, self._model.findData(chosen)))
        self._show()

    def _show_settings(self, _before: object = None) -> None:
        server = self._session.preferences.values.server
        self._form.show_values(server, ServerSettings())
        if not self._key.hasFocus():
            self._key.setText(server.api_key[0] if server.api_key else "")
        self._show_snippet()

    def _show(self) -> None:
        state = self._session.serving.state
        words = {
            "off": tr("The server is off."),
            "starting": tr("{name} is loaded for the server…", name=state.model),
            "on": tr("{name} answers at this address.", name=state.model),
            "stopping": tr("The server finishes what is being answered…"),
            "failed": state.sentence,
        }
        self._words.setText(words[state.kind])
        self._words.setProperty("role", "bad" if state.kind == "failed" else "strong")
        self._words.style().unpolish(self._words)
        self._words.style().polish(self._words)
        idle = state.kind in {"off", "failed"}
        self._model.setEnabled(idle)
        self._start.setVisible(idle)
        self._start.setEnabled(self._model.count() > 0)
        self._stop.setVisible(not idle)
        self._stop.setEnabled(state.kind in {"starting", "on"})
        self._address.setText(f"{state.url}/v1" if state.url else "")
        self._address.setVisible(state.kind == "on")
        self._copy.setVisible(state.kind == "on")
        self._show_snippet()
        self._look()

    def _snippet(self) -> str:
        values = self._session.preferences.values.server
        state = self._session.serving.state
        return _SNIPPETS[self._tabs.tabText(self._tabs.currentIndex())].format(
            url=state.url or f"http://{values.host}:{values.port}",
            key=values.api_key[0] if values.api_key else "none",
            model=state.model or Path(self._model.currentData() or "model").stem,
        )

    def _show_snippet(self) -> None:
        self._code.setFont(code_font(12))
        self._code.setPlainText(self._snippet())

    def _look(self) -> None:
        serving = self._session.serving
        if serving.state.kind != "on":
            self._live.setText(tr("Requests are listed here while the server runs."))
            self._latest.hide()
            return
        self._live.setText(tr("Under way or waiting: {count}", count=count_words(serving.answers)))
        lines = [
            f"{time.strftime('%H:%M:%S', time.localtime(row.at_s))}   {row.status}   {row.endpoint}   {row.model}"
            for row in serving.latest[-_SHOWN:][::-1]
        ]
        self._latest.setText("\n".join(lines))
        self._latest.setVisible(bool(lines))

    @override
    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._look()
        self._timer.start()

    @override
    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self._timer.stop()
