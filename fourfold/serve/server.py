"""From a configuration to a listening server: address, token, model, and its end.

What can be refused is refused before a weight is read.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import uvicorn

from fourfold.config import Config
from fourfold.errors import UserError
from fourfold.generate.module import GenerationModule
from fourfold.serve.app import Service, create_app
from fourfold.serve.asking import Terms
from fourfold.serve.connections import bounded_protocol
from fourfold.serve.guard import access_log
from fourfold.serve.limits import Limits
from fourfold.serve.metrics import Metrics
from fourfold.serve.worker import Worker

TOKEN_VARIABLE = "FOURFOLD_TOKEN"
SHORTEST_TOKEN = 16
Notice = Callable[[str], None]


def serve(
    config: Config,
    name: str,
    *,
    host: str,
    port: int,
    token: str | None,
    slots: int,
    limits: Limits,
    logs_requests: bool,
    on_notice: Notice,
) -> bool:
    """Serve the configuration's model until a signal ends it. `name` is the model's for clients.

    False where the model failed and ended it instead: clients were told, and the log says why.
    """
    check_servable(config)
    listener = bind(host, port, token)
    try:
        service = make_service(config, name, token, slots, limits, on_notice)
        server = make_server(service)
        if logs_requests:
            log_requests()
        on_notice(f"{service.terms.positions} positions, {slots} slots")
        on_notice(f"serving {name} at {url_of(listener)}")
        with quiet_signals():
            server.run(sockets=[listener])
        return not service.worker.failed
    finally:
        listener.close()


def make_service(
    config: Config,
    name: str,
    token: str | None,
    slots: int,
    limits: Limits,
    on_notice: Notice,
) -> Service:
    module = GenerationModule(config, on_notice)
    for key, is_given, field in (
        ("num_return_sequences", config.Generation.num_return_sequences != 1, "n"),
        ("seed", config.Generation.seed is not None, "seed"),
    ):
        if is_given:
            on_notice(f"Generation.{key} has no effect here; a request asks for its own, {field}")
    metrics = Metrics()
    terms = Terms(
        tokenizer=module.tokenizer,
        defaults=replace(module.options, num_return_sequences=1),
        default_stop=tuple(config.Generation.stop),
        positions=module.decoder.max_positions,
        limits=limits,
    )
    worker = Worker(module, slots, limits, metrics)
    return Service(name, int(time.time()), terms, worker, metrics, token)


def make_server(service: Service) -> uvicorn.Server:
    limits = service.terms.limits
    settings = uvicorn.Config(
        create_app(service),
        http=bounded_protocol(limits),
        ws="none",
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=int(limits.shutdown_seconds),
        h11_max_incomplete_event_size=limits.head_bytes,
    )
    server = uvicorn.Server(settings)
    # Without its model a server is of no use, and one that ends can be started again.
    service.worker.on_failure = lambda: setattr(server, "should_exit", True)
    return server


def log_requests() -> None:
    """A line for each request on standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    access_log.addHandler(handler)
    access_log.setLevel(logging.INFO)
    access_log.propagate = False


def check_servable(config: Config) -> None:
    if config.Generation.decode_strategy == "beam_search":
        raise UserError(
            "Generation.decode_strategy='beam_search' cannot be served, since its texts cannot "
            "share a batch; set sampling or greedy_search"
        )


# Address and token


def bind(host: str, port: int, token: str | None) -> socket.socket:
    """A socket at the address, which must be this machine's own unless there is a token."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, OverflowError, UnicodeError) as error:
        raise UserError(f"--host {host}: {error}; name an address of this machine") from None
    addresses = [ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in found]
    if token is None and not all(address.is_loopback for address in addresses):
        raise UserError(
            f"--host {host} can be reached from other machines, and without a token anyone there "
            f"could use the model; give one with --token-file or {TOKEN_VARIABLE}, or keep to "
            "127.0.0.1"
        )
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        return listener
    except OSError as error:
        listener.close()
        raise UserError(
            f"{host} port {port}: {error.strerror}; choose another with --port, or --port 0 for "
            "any that is free"
        ) from None


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def read_token(file: Path | None) -> str | None:
    """The token of a file, or of the environment; None where there is neither."""
    if file is None:
        source, token = TOKEN_VARIABLE, os.environ.get(TOKEN_VARIABLE)
        if token is None:
            return None
    else:
        source = str(file)
        try:
            with file.open("rb") as stream:
                token = stream.read(4097).decode("ascii", "replace")
        except OSError as error:
            raise UserError(f"--token-file {file}: {error.strerror}") from None
    token = token.strip()
    plain = token.isascii() and token.isprintable() and " " not in token
    if not (SHORTEST_TOKEN <= len(token) <= 4096 and plain):
        raise UserError(
            f"{source}: a token is one word of at least {SHORTEST_TOKEN} letters, digits and "
            "signs; make one with: python -c 'import secrets; print(secrets.token_urlsafe())'"
        )
    return token


@contextmanager
def quiet_signals() -> Iterator[None]:
    """uvicorn ends at these signals and raises them once more; by then all is done."""
    before = {
        number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, action)
