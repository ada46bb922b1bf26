"""Requests and frames between processes.

    proxy(PolicyVersions, peer, "versions").publish(...) --frame--> Server: services["versions"].publish(...) --frame--> the answer

A service is a plain object whose remote methods are marked `@remote`; a proxy has the same type, so a loop cannot tell whether its
queue, ledger or versions are in this process or in another one. A request may be parked: its handler simply awaits.

    frames.py       what a message looks like in a stream of bytes
    limits.py       what a message and a connection may cost
    codec.py        messages, and values with numpy arrays in them
    stream.py       byte streams: private unix sockets, TLS
    credentials.py  the key of a run: a process that has it may connect by TLS
    arena.py        memory for large arrays, readable from another process
    connection.py   a client, as its server sees it
    server.py       Server
    peer.py         Peer, proxy
    ahead.py        many bytes of a service, in chunks
    torch_store.py  where torch.distributed's processes find one another: by calls like these

Addresses are `unix:/path/to.sock` (mode 0600; a `Path` means the same) and `tls:host:port`, which needs credentials. Left out:
requests from a server to its clients, and reconnecting.
"""

from asyncflow.transport.arena import Arena
from asyncflow.transport.codec import ConnectionLost, RemoteError, client_key, client_name, remote
from asyncflow.transport.credentials import Credentials
from asyncflow.transport.limits import FrameLimits
from asyncflow.transport.peer import Peer, proxy
from asyncflow.transport.server import Server
from asyncflow.transport.stream import socket_path

__all__ = [
    "Arena",
    "ConnectionLost",
    "Credentials",
    "FrameLimits",
    "Peer",
    "RemoteError",
    "Server",
    "client_key",
    "client_name",
    "proxy",
    "remote",
    "socket_path",
]
