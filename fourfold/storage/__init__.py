"""Storage off the machine: `s3://`, `gs://` and whatever else fsspec reads.

    local_path(where)      the path that stands for an address; a path stands for itself
    address_of(path)       the address a path stands for, if any; name_of(path) for messages
    status(path)           size and time of a file, here or there
    fetch(path)            the same file, here now
    refresh(directory)     what is below an address now
    open_blocks(path)      a large file there, read in blocks that are kept here

Code that reads works on paths and calls `fetch` or `refresh` first, which do nothing for ordinary
ones. Only what is written differs (`fourfold.checkpoint.bucket`, `fourfold.engine.remote_run`):
a store has no rename, so what makes a checkpoint one is its manifest, put last.
"""

from fourfold.storage.addresses import (
    NotThereError,
    StorageError,
    address_of,
    cache_root,
    is_address,
    local_path,
    name_of,
)
from fourfold.storage.blocks import BlockedFile, limit_blocks, open_blocks
from fourfold.storage.objects import (
    Object,
    children,
    create,
    drop,
    fetch,
    forget,
    noted,
    read,
    refresh,
    remove,
    remove_all,
    status,
    upload,
    write,
)

__all__ = [
    "BlockedFile",
    "NotThereError",
    "Object",
    "StorageError",
    "address_of",
    "cache_root",
    "children",
    "create",
    "drop",
    "fetch",
    "forget",
    "is_address",
    "limit_blocks",
    "local_path",
    "name_of",
    "noted",
    "open_blocks",
    "read",
    "refresh",
    "remove",
    "remove_all",
    "status",
    "upload",
    "write",
]
