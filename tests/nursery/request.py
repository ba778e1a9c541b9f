"""What travels between tests and their nursery: a request with open files, then a process id, then its exit status."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

NUMBER = struct.Struct("!i")


@dataclass(frozen=True)
class Request:
    """What to run: as `python -u -m MODULE ARGUMENTS` in a folder, with these open files under these numbers and no other."""

    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    files: Sequence[int]

    def send(self, connection: socket.socket, files: Sequence[int]) -> None:
        """`files` as this process knows them, in the order of their numbers over there."""
        message = json.dumps(asdict(self)).encode()
        socket.send_fds(connection, [NUMBER.pack(len(message))], list(files))
        connection.sendall(message)

    @staticmethod
    def receive(connection: socket.socket) -> tuple[Request, list[int]]:
        length, files, *_ = socket.recv_fds(connection, NUMBER.size, 16)
        return Request(**json.loads(received(connection, NUMBER.unpack(length)[0]))), files


def send_number(connection: socket.socket, number: int) -> None:
    connection.sendall(NUMBER.pack(number))


def receive_number(connection: socket.socket) -> int:
    number: int = NUMBER.unpack(received(connection, NUMBER.size))[0]
    return number


def received(connection: socket.socket, count: int) -> bytes:
    """Exactly so many bytes."""
    message = b""
    while len(message) < count:
        more = connection.recv(count - len(message))
        if not more:
            raise EOFError("the nursery of ranks is gone")
        message += more
    return message
