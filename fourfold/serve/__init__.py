"""A trained model behind HTTP, in the protocol OpenAI's clients speak, with a page to play with.

    serve(config, "my-model", host="127.0.0.1", port=8000, ...)     until a signal ends it

    server.py       address, token, model, signals
    connections.py  guard.py  bodies.py      what a connection, a request and a body may be
    protocol.py  asking.py                   fields of a request -> sequences to write
    worker.py  writing.py  judging.py        the thread that owns the model -> pieces of text
    app.py  replies.py  page.py  metrics.py  pieces of text -> replies and streams

Needs the extra `fourfold[serve]`.
"""

from fourfold.serve.limits import Limits
from fourfold.serve.server import read_token, serve

__all__ = ["Limits", "read_token", "serve"]
