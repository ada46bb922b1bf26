"""Algorithms with a critic, and with a statistic of the whole step, that want groups whose rewards vary."""

from __future__ import annotations

from asyncflow.algorithms.ppo import PPO
from asyncflow.algorithms.reinforce_plus_plus import ReinforcePlusPlus


class VariedPPO(PPO):
    wants_varied_groups = True


class VariedReinforce(ReinforcePlusPlus):
    wants_varied_groups = True
