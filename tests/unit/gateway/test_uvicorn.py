"""The gateway replaces methods of uvicorn that are not public: the allowed versions have them as expected."""

from __future__ import annotations

import inspect
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import Server, ServerState

from lakebed.gateway.fast.protocol import FastProtocol
from lakebed.gateway.protocol import GatewayProtocol

ROOT = Path(__file__).parents[3]
METHODS: dict[type, dict[str, list[str]]] = {
    HttpToolsProtocol: {
        "__init__": ["self", "config", "server_state", "app_state", "_loop"],
        "connection_made": ["self", "transport"],
        "connection_lost": ["self", "exc"],
        "eof_received": ["self"],
        "data_received": ["self", "data"],
        "send_400_response": ["self", "msg"],
        "on_message_begin": ["self"],
        "on_headers_complete": ["self"],
        "on_body": ["self", "body"],
        "on_message_complete": ["self"],
        "on_response_complete": ["self"],
        "shutdown": ["self"],
        "pause_writing": ["self"],
        "resume_writing": ["self"],
        "timeout_keep_alive_handler": ["self"],
        "_start_asgi_task": ["self", "cycle", "app"],
    },
    RequestResponseCycle: {"run_asgi": ["self", "app"], "receive": ["self"]},
    FlowControl: {"pause_reading": ["self"], "resume_reading": ["self"]},
    Server: {"startup": ["self", "sockets"], "serve": ["self", "sockets"], "capture_signals": ["self"]},
}
ATTRIBUTES = {
    HttpToolsProtocol: """app config connections cycle expect_100_continue flow headers loop parser
        pipeline server_state tasks timeout_keep_alive transport""",
    RequestResponseCycle: """disconnected keep_alive message_event more_body on_response response_complete
        response_started transport waiting_for_100_continue""",
    FlowControl: "read_paused",
}
SIGNATURES = [(kind, name, parameters) for kind, found in METHODS.items() for name, parameters in found.items()]


@pytest.mark.parametrize(("kind", "name", "parameters"), SIGNATURES)
def test_a_method_that_is_used_or_replaced_exists_with_its_parameters(
    kind: type, name: str, parameters: list[str]
) -> None:
    assert parameters == list(inspect.signature(getattr(kind, name)).parameters)


@pytest.mark.parametrize(("kind", "names"), [(kind, names.split()) for kind, names in ATTRIBUTES.items()])
def test_an_attribute_that_is_used_is_set_by_its_class(kind: Any, names: list[str]) -> None:
    source = inspect.getsource(kind.__init__)

    assert [] == [name for name in names if f"self.{name} =" not in source and f"self.{name}:" not in source]


def test_what_else_is_used_exists() -> None:
    assert b"HTTP/1.1 431 Request Header Fields Too Large\r\n" == httptools_impl.STATUS_LINE[431]
    assert {"default_headers", "total_requests", "connections", "tasks"} <= set(vars(ServerState()))


@pytest.mark.parametrize("kind", [GatewayProtocol, FastProtocol])
def test_every_method_of_uvicorn_that_is_replaced_is_in_the_table(kind: type) -> None:
    """A new override is added to the table above, so that a version that lacks the method is noticed."""
    ours = {name for name in vars(kind) if callable(getattr(kind, name)) and hasattr(HttpToolsProtocol, name)}

    assert ours - {"__doc__", "__module__"} <= set(METHODS[HttpToolsProtocol])


def test_the_installed_uvicorn_is_inside_the_range_that_the_project_allows() -> None:
    """One minor version: another one is allowed once these tests and the fast path's have run against it."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (wanted,) = [Requirement(line) for line in declared if line.startswith("uvicorn")]
    (bound,) = wanted.specifier

    assert ("~=", 3) == (bound.operator, len(bound.version.split(".")))
    assert wanted.specifier.contains(version("uvicorn"))
    assert not wanted.specifier.contains("0.35.0")  # has no _start_asgi_task


@pytest.mark.parametrize("fast_path", [True, False])
def test_without_the_fast_path_none_of_its_modules_is_loaded(fast_path: bool) -> None:
    """So a gateway whose fast path is off does not depend on methods of uvicorn that are not public."""
    code = f"""
import sys
from lakebed.gateway import app
from lakebed.wiring import processes
from lakebed.gateway.listen import server_config
from lakebed.gateway.settings import GatewaySettings
server_config(lambda scope, receive, send: None, GatewaySettings(fast_path={fast_path}))
print("lakebed.gateway.fast" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert str(fast_path) == ran.stdout.strip()
