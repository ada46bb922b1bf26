"""Environments: what an episode of several turns talks to. They run in processes of their own that can be killed.

    produce (loops/episode.py)        pool.py                        worker.py: a process (sandbox/)
    +-------------------------+  +--------------------+  question  +-----------------------------------------------+
    | generate, observe,      |->| EnvironmentPool:   | ---------> | the environment, built; an episode in a fork, |
    | generate, ... until it  |  | one Episode a row  | <--------- | or as one of several where it says it can     |
    | is done                 |  +--------------------+   answer   +-----------------------------------------------+
    +-------------------------+
              | `TurnFormat` (base.py): an observation as tokens, a turn's tokens as an action

`base.py` is the contract, `text.py` the format of plain text. An environment that raises, hangs, exits or eats memory fails its row
with an `EnvironmentFailure`, which has its words.
"""

ENVIRONMENTS = {
    "agent": "asyncflow.environments.agent:Agent",
    "gymnasium": "asyncflow.environments.gymnasium:Gymnasium",
    "openenv": "asyncflow.environments.openenv:OpenEnv",
    "skyrl_gym": "asyncflow.environments.skyrl_gym:SkyRLGym",
    "textarena": "asyncflow.environments.textarena:TextArena",
    "tools": "asyncflow.environments.tools:Tools",
    "trl": "asyncflow.environments.trl:TRLEnvironment",
    "verifiers": "asyncflow.environments.verifiers:Verifiers",
}

TURN_FORMATS = {
    "chat": "asyncflow.environments.chat:ChatFormat",
    "text": "asyncflow.environments.text:TextFormat",
}
