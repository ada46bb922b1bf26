"""Capture: a program of the user's speaks to an endpoint of OpenAI's kind, and each of its calls is kept token by token.

    run(example, base_url, api_key)        endpoint.py (HTTP)       transcript.py (pure)
    +-------------------------------+     +---------------------+  +----------------------------------------------+
    | the user's program, in a      | --> | chat completions,   |->| which sequence the call goes on with, or a   |
    | process of its own, any SDK   | <-- | completions; a key  |<-| new one; what was sampled, with its log-probs|
    +-------------------------------+     | names the episode   |  +----------------------------------------------+
                                          +---------------------+--> the rollout engine

`wire.py` reads requests and writes answers as OpenAI's interface has them. A call whose messages begin with those of an earlier
call and its answer goes on with that call's sequence, in tokens; any other call, and a second one that goes on from the same place,
starts a sequence of its own.
"""
