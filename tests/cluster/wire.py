"""wire.py NEAR FAR DELAY LOSS_FORTH LOSS_BACK RATE: joins two interfaces by a wire that is bad.

A frame that comes in at NEAR leaves at FAR after DELAY seconds and what RATE bytes per second need
(0: no limit), or is lost with the probability LOSS_FORTH; the other way with LOSS_BACK. Kernels
without netem cannot do that. Ends when its standard input does; writes + once it carries.
"""

from __future__ import annotations

import heapq
import random
import select
import socket
import struct
import sys
import time
from contextlib import suppress

ETH_P_ALL = 3
SOL_PACKET, PACKET_ADD_MEMBERSHIP, PACKET_IGNORE_OUTGOING = 263, 1, 23
PROMISCUOUS = 1
LONGEST_QUEUE = (
    2.0  # seconds of a slow wire's queue; what does not fit is dropped, as a switch does
)


def open_end(interface: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    end.bind((interface, 0))
    end.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    membership = struct.pack("IHH8s", socket.if_nametoindex(interface), PROMISCUOUS, 0, b"")
    end.setsockopt(SOL_PACKET, PACKET_ADD_MEMBERSHIP, membership)
    end.setblocking(False)
    return end


def carry(names: list[str], delay: float, losses: list[float], rate: float) -> None:
    ends = [open_end(name) for name in names]
    lots = random.Random(1)
    queue: list[tuple[float, int, int, bytes]] = []  # when, number, leaving end, frame
    count, free = 0, [0.0, 0.0]
    print("+", end="", flush=True)
    while True:
        wait = max(0.0, queue[0][0] - time.monotonic()) if queue else None
        readable = select.select([*ends, sys.stdin], [], [], wait)[0]
        if sys.stdin in readable:
            return
        for end in readable:
            side = ends.index(end)
            while True:
                try:
                    frame = end.recv(65536)
                except BlockingIOError:
                    break
                if lots.random() < losses[side]:
                    continue
                now = time.monotonic()
                if rate:
                    if free[side] > now + LONGEST_QUEUE:
                        continue
                    free[side] = max(free[side], now) + len(frame) / rate
                    now = free[side]
                count += 1
                heapq.heappush(queue, (now + delay, count, 1 - side, frame))
        while queue and queue[0][0] <= time.monotonic():
            _, _, side, frame = heapq.heappop(queue)
            with suppress(OSError):  # an end that is down
                ends[side].send(frame)


if __name__ == "__main__":
    delay, forth, back, rate = (float(word) for word in sys.argv[3:7])
    carry(sys.argv[1:3], delay, [forth, back], rate)
