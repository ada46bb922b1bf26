"""Reward functions as they are written elsewhere, called with one sample.

    AsyncFlow   f(sample)                                                            -> float | None
    TRL         f(prompts, completions, completion_ids, **columns)                   -> [float | None]
    verl        f(data_source, solution_str, ground_truth, extra_info)               -> float | {"score": float, ...}

Told apart by the names of their parameters; each may be `async`. Options of the configuration are further arguments. Of
TRL's three parameters one is enough: what penalises length may be `f(completion_ids, **kwargs)`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from asyncflow.errors import UserError
from asyncflow.own_metrics import log_metric
from asyncflow.rewards.answers import reference
from asyncflow.rewards.base import Sample
from asyncflow.rows import QUESTIONS, READY_PROMPT, found_in, value_in

# By any of these a function is TRL's.
_TRL = frozenset({"prompts", "completions", "completion_ids"})
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
# What TRL leaves out of the columns that it hands over.
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")


class MissingColumn(Exception):
    """A row has no column that a function takes."""


class Adapted(NamedTuple):
    """A reward function: what to call with a sample, and where the reward is in what it returns, or what comes of awaiting that."""

    call: Callable[[Sample], Any]
    reward_in: Callable[[Any], Any]


def adapted(
    target: Callable[..., Any], options: Mapping[str, Any], prompt_column: str | None = None, prompt_template: str | None = None
) -> Adapted:
    """`target` with its options, to be called with a sample. `prompt_column`, `prompt_template`: what makes a row's prompt, where
    `data` says it. Raises `UserError` for parameters that fit no convention."""
    parameters = _parameters(target)
    bound = functools.partial(target, **options) if options else target
    if not _TRL.isdisjoint(parameters.keys() - options.keys()):
        prompt_of = functools.partial(_prompt_of, prompt_column, prompt_template)
        return Adapted(functools.partial(_as_trl, bound, parameters, prompt_of), _only_one)
    if "solution_str" in parameters:
        if lacking := [name for name in _needed(parameters) if name not in {*_VERL, *options}]:
            raise UserError(
                f"needs {lacking[0]!r}, which verl's functions are not given: set it as an option, or give it a default"
            )
        return Adapted(functools.partial(_as_verl, bound, parameters), _score_in)
    try:
        inspect.signature(bound).bind(None)
    except TypeError:
        raise UserError(
            f"takes ({', '.join(parameters)}), and is called with a sample alone: write it as f(sample), give what else it takes "
            f"as options or defaults, or use the parameters of TRL (completions, ...) or verl (solution_str, ground_truth, ...)"
        ) from None
    except ValueError:  # a callable of C code that does not say
        pass
    return Adapted(bound, lambda returned: returned)


def _only_one(returned: Any) -> Any:
    """Only element of a list, an array or a tensor. Raises `ValueError`."""
    try:
        rewards = [] if isinstance(returned, str | bytes | Mapping) else list(returned)
    except TypeError:  # no list of anything
        rewards = []
    if len(rewards) != 1:
        raise ValueError(f"for one completion it must return a list of one reward, not {returned!r:.100}")
    return rewards[0]


def _score_in(returned: Any) -> Any:
    """verl takes a mapping with a score and whatever else is to be shown."""
    return returned["score"] if isinstance(returned, Mapping) else returned


def _parameters(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):  # a callable of C code that does not say
        return {}


def _needed(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Names of parameters that a caller has to give."""
    are_many = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, each in parameters.items() if each.default is each.empty and each.kind not in are_many]


def _takes(parameters: Mapping[str, inspect.Parameter], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that a function has parameters for; all, if it takes any."""
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}


def _prompt_of(column: str | None, template: str | None, sample: Sample) -> Any:
    """A row's prompt as the data set has it, text or messages, before a chat template. Where the row has none: what was generated
    from, decoded."""
    row = sample.example
    try:
        prompt = template.format_map(row) if template is not None else value_in(row, column or _known_column(row))
    except LookupError:
        return sample.prompt
    return prompt if isinstance(prompt, str | list) else sample.prompt


def _known_column(row: Mapping[str, Any]) -> str:
    return found_in(row, (READY_PROMPT, *QUESTIONS)) or READY_PROMPT


def _as_trl(
    function: Callable[..., Any],
    parameters: Mapping[str, inspect.Parameter],
    prompt_of: Callable[[Sample], Any],
    sample: Sample,
) -> Any:
    """A batch of one. A row whose prompt is a list of messages is conversational, and so is the completion then.

    TRL's trainer also hands over its state, and how to log a metric or a column; here there is no such trainer: functions that take
    its state get None, a metric is one of the run's, `own/<name>`, and a column is left out.
    """
    prompt, completion = prompt_of(sample), sample.response
    is_conversational = not isinstance(prompt, str)
    columns = {name: [value] for name, value in sample.example.items() if name not in _NOT_COLUMNS}
    batch = {
        "prompts": [prompt],
        "completions": [[{"role": "assistant", "content": completion}] if is_conversational else completion],
        "completion_ids": [list(sample.token_ids)],
        "trainer_state": None,
        "log_extra": _log_nothing,
        "log_metric": log_metric,
    }
    given = getattr(function, "keywords", {})
    if lacking := [name for name in _needed(parameters) if name not in {*columns, *batch, *given}]:
        raise MissingColumn(f"takes {lacking[0]!r}, and the row has no such column: it has {', '.join(columns) or 'none'}")
    return function(**_takes(parameters, {**columns, **batch}))


def _log_nothing(name: str, value: Any) -> None:
    """Do nothing, in the place of TRL's `log_extra`."""


def _as_verl(function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], sample: Sample) -> Any:
    extra = sample.example.get("extra_info")
    values = (
        sample.example.get("data_source", "unknown"),
        sample.response,
        reference(sample),
        dict(extra) if isinstance(extra, Mapping) else {},
    )
    arguments = dict(zip(_VERL, values, strict=True))
    return function(**_takes(parameters, arguments))
