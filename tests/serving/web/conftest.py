import asyncio
import socket
import threading
import time

import pytest
import uvicorn

from empax.serving.web.app import ServerSettings, make_app


@pytest.fixture
def served():
    """Starts a server; gives it and its address."""
    running = []

    def start(*systems, port=0, **settings):
        place = socket.create_server(("127.0.0.1", port))
        server = uvicorn.Server(uvicorn.Config(make_app(systems, ServerSettings(**settings)), log_level="warning"))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[place])))
        thread.start()
        running.append((server, thread, place))
        while not server.started:
            time.sleep(0.02)
        return server, f"http://127.0.0.1:{place.getsockname()[1]}"

    yield start
    for server, thread, place in running:
        server.should_exit = True
        thread.join(20)
        place.close()
