"""An HTTP server for a trained model: OpenAI's API, and a page to play with.

    serve(config, "my-model", host="127.0.0.1", port=8000, ...)     until a signal ends it

    server.py      address, token, model, routes, streams of events, the playground
    http.py        bounds on connections and bodies, the security middleware
    protocol.py    limits, errors and the fields of a request
    requests.py    fields of a request -> sequences to write
    worker.py      the thread that owns the model: continuous batching
    replies.py     tokens -> pieces of text -> replies and chunks
    metrics.py     counters for Prometheus

Needs the extra `fourfold[serve]`.
"""

from fourfold.serve.protocol import Limits
from fourfold.serve.server import read_token, serve

__all__ = ["Limits", "read_token", "serve"]
