"""The watch over the network sees what is there, and what is only tried."""

from __future__ import annotations

import json
import socket
from contextlib import suppress

import pytest

from engine.cli import main
from engine.runtime.network import attempts, sockets
from tests import factory


def test_a_socket_that_waits_for_this_computer_only_leads_nowhere():
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = "{}:{}".format(*server.getsockname())
        assert [entry["leaves"] for entry in sockets() if entry["local"] == place] == [False]
    assert place not in [entry["local"] for entry in sockets()]


def test_a_socket_that_waits_for_everybody_leads_away():
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        assert [entry["leaves"] for entry in sockets() if entry["local"] == f"0.0.0.0:{port}"] == [True]


def test_an_attempt_is_heard_within_the_block_only():
    def knock():
        with socket.socket() as probe, suppress(OSError):
            probe.connect(("127.0.0.1", 1))

    knock()
    with attempts() as seen:
        knock()
        with suppress(OSError):
            socket.getaddrinfo("localhost", 1)
    knock()
    assert len(seen) == 2
    assert "127.0.0.1" in seen[0]
    assert "localhost" in seen[1]


@pytest.mark.usefixtures("compiled_kernels")
def test_the_engine_reaches_for_nothing(tmp_path, capsys):
    model = factory.make(tmp_path / "toy")
    assert main(["diagnose", "--network", "--model", str(model), "--json"]) == 0
    network = json.loads(capsys.readouterr().out)["network"]
    assert network["offline"]
    assert network["attempts"] == []
    assert network["answered"] > 0


def test_what_leaves_is_an_exit_code(monkeypatch, capsys):
    found = {"sockets": [], "attempts": ["socket.connect ('example.org', 80)"], "answered": 1, "offline": False}
    monkeypatch.setattr("engine.api.network", lambda _model: iter([found]))
    assert main(["diagnose", "--network"]) == 1
    assert "example.org" in capsys.readouterr().out
