"""A supervisor over the real bucket whose gateway and workers are stand-ins: `stand_in_stack.py FOLDER MODE`.

The bucket is killed instead of drained, which would take 15 s. MODE is `quick`, or `crashing`: its workers die at once
after they became ready.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from lakebed.core.errors import LakebedError
from lakebed.core.runtime import system_runtime
from lakebed.embedded import program
from lakebed.embedded import stack as stack_module
from lakebed.embedded.program import ServerCommand
from lakebed.embedded.stack import Stack
from lakebed.embedded.supervise import run

SERVER = """
import http.server, json, os, signal, subprocess, sys, threading
name, port, folder, crashing = sys.argv[1], int(sys.argv[2]), os.environ["LAKEBED_DIR"], sys.argv[3] == "crashing"
open(f"{folder}/{name}.env", "w").write(json.dumps(dict(os.environ)))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'{"status": "ok"}')
        if crashing and name == "workers": self.wfile.flush(); print("no more of this", flush=True); os._exit(3)
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", port), Handler)
def drain(*_):
    open(f"{folder}/{name}.drained", "w").write("")
    threading.Thread(target=server.shutdown).start()
signal.signal(signal.SIGTERM, drain)
subprocess.Popen(["sleep", "30"])
server.serve_forever()
"""

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a lane in the background would have it ignored
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    program.BUCKET_GRACE_S = 0.2
    stack_module.RESTARTS_MAX = 2 if mode == "crashing" else stack_module.RESTARTS_MAX
    commands = [
        ServerCommand(name, (sys.executable, "-c", SERVER, name, "{port}", mode)) for name in ("gateway", "workers")
    ]
    stack = Stack(
        folder,
        runtime=system_runtime(),
        commands=commands,
        report=lambda event: print(event.name, event.what, f"{event.seconds:.2f}", event.detail, flush=True),
    )
    try:
        asyncio.run(run(stack, ready=lambda endpoints: print("up", endpoints.gateway, flush=True)))
    except LakebedError as error:
        print(f"{type(error).__name__}: {error.message}", flush=True)
        sys.exit(9)
