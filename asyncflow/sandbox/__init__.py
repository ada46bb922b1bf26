"""Sandbox: processes that run code of the user's, and that can be killed with all that they have started.

      the run's process                           each process: its own session and pipes, no torch
    +---------------------------+  question     +------------------------------------------------------------+
    | pool.py, of process.py:   | ------------> | child.py: one question after another, each with its token  |
    | their owner               | <------------ |   fork --> forked.py: one piece of work, its deadline, its |
    +---------------------------+  answer       |            memory, what it prints; nothing of it stays     |
                 | is it alive?                 +------------------------------------------------------------+
                 v                                                  ^ SIGKILL to the whole session
    +---------------------------+                                   |
    | guard.py                  | ----------------------------------+  when the run's process is gone
    +---------------------------+

Rewards and environments are built on it. It contains mistakes, not malice: code in it may read and write what the user may.
"""
