"""Options of a class or a function, checked against its signature."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import pytest

from asyncflow.options import checked_options, misfit
from asyncflow.registry import by_name
from asyncflow.types import UserError

if TYPE_CHECKING:
    from somewhere import Unknown


class Shared(TypedDict, total=False):
    decay: float


class Base:
    def __init__(self, *, slope: float = 1.0) -> None: ...


class Closed:
    def __init__(
        self,
        run_dir: Path,
        *,
        count: int = 1,
        rate: float = 0.5,
        many: Sequence[str] = (),
        pair: tuple[int, int] = (1, 2),
        table: Mapping[str, Any] | None = None,
        mode: Literal["fast", "slow"] = "fast",
        is_on: bool = False,
        width: int | Literal["auto"] | None = None,
        odd: int = None,  # type: ignore[assignment] # noqa: RUF013
        other: Unknown = 0,
        anything=None,  # type: ignore[no-untyped-def]
        **shared: Unpack[Shared],
    ) -> None: ...


class Open(Base):
    def __init__(self, *, count: int = 1, **options: Any) -> None:
        super().__init__(**options)


@dataclass(frozen=True)
class Sizes:
    path: Path
    _: KW_ONLY
    width: int = 1
    depth: float = 0.5


class OfRecord:
    @by_name(Sizes)
    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes


class BelowRecord(OfRecord):
    def __init__(self, path: Path, *, own: str = "", **options: Any) -> None:
        super().__init__(path, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"count": 1.5}, "count must be a whole number, not 1.5"),
        ({"count": True}, "count must be a whole number, not true"),
        ({"count": "2"}, 'count must be a whole number, not "2"'),
        ({"count": math.inf}, "count must be a whole number, not .inf"),
        ({"count": 1 << 63}, "count must be a whole number, not 9223372036854775808"),
        ({"rate": True}, "rate must be a number, not true"),
        ({"rate": "0.1"}, 'rate must be a number, not "0.1"'),
        ({"rate": math.nan}, "rate must be a number, not .nan"),
        ({"rate": -math.inf}, "rate must be a number, not -.inf"),
        ({"rate": None}, "rate must be a number, not null"),
        ({"many": "text"}, 'many must be a list, each text, not "text"'),
        ({"many": ["a", 3]}, 'many must be a list, each text, not ["a",3]'),
        ({"pair": [1]}, "pair must be a list, each a whole number, not [1]"),
        ({"table": [1]}, "table must be a mapping or null, not [1]"),
        ({"mode": "quick"}, 'mode must be fast or slow, not "quick"'),
        ({"is_on": "maybe"}, 'is_on must be true or false, not "maybe"'),
        ({"is_on": 1}, "is_on must be true or false, not 1"),
        ({"width": "wide"}, 'width must be a whole number, auto or null, not "wide"'),
        ({"decay": "fast"}, 'decay must be a number, not "fast"'),
        ({"decay": None}, "decay must be a number, not null"),
    ],
)
def test_a_value_of_another_kind_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        checked_options("thing", Closed, options, ["run_dir"])
    assert str(caught.value) == f"thing: {words}"


@pytest.mark.parametrize(
    "options",
    [
        {"count": 7, "rate": 2, "many": ["a"], "pair": [1, 2], "table": {"a": 1}, "mode": "slow", "is_on": True, "decay": 0.1},
        {"width": "auto", "odd": None, "other": object(), "anything": "text"},
        {"width": 3},
        {"width": None, "table": None},
    ],
)
def test_values_of_their_kinds_stay_as_they_are(options: dict[str, Any]) -> None:
    assert checked_options("thing", Closed, options, ["run_dir"]) == options


def test_a_float_without_a_fraction_is_a_whole_number_where_one_is_wanted() -> None:
    made = checked_options("thing", Closed, {"count": 1e3, "rate": 1.0}, ["run_dir"])["count"]
    assert made == 1000 and isinstance(made, int)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cuont": 1}, "has no option 'cuont': did you mean 'count'?"),
        ({"zzz": 1}, "has no option 'zzz': it has count, rate, many, pair, table, mode, is_on, width, odd, other, anything, decay"),
        ({"dekay": 1}, "has no option 'dekay': did you mean 'decay'?"),
    ],
)
def test_an_unknown_name_is_told_the_known_ones_and_not_the_runs_own(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        checked_options("thing", Closed, options, ["run_dir"])
    assert str(caught.value) == f"thing {words}"


def test_what_is_missing_or_cannot_be_given_is_said() -> None:
    with pytest.raises(UserError, match=r"^thing needs the option 'run_dir'"):
        checked_options("thing", Closed, {})
    assert checked_options("thing", Closed, {}, needs_all=False) == {}
    with pytest.raises(UserError, match=r"^thing does not take 'device', which a run gives it"):
        checked_options("thing", Closed, {}, ["run_dir", "device"])


def test_options_that_are_passed_on_are_of_the_kinds_above() -> None:
    assert checked_options("thing", Open, {"count": 1, "slope": 2.0, "more": object}) == {"count": 1, "slope": 2.0, "more": object}
    with pytest.raises(UserError, match=r'^thing: slope must be a number, not "steep"'):
        checked_options("thing", Open, {"slope": "steep"})


def test_fields_of_a_record_are_options() -> None:
    """Of the constructor that takes it, and of a class below, which passes them on."""
    assert OfRecord(Path("a"), width=2).sizes == Sizes(Path("a"), width=2)
    assert checked_options("thing", OfRecord, {"width": 2.0}, ["path"]) == {"width": 2}
    with pytest.raises(UserError, match=r"^thing has no option 'size': it has width, depth$"):
        checked_options("thing", OfRecord, {"size": 2}, ["path"])
    with pytest.raises(UserError, match=r"^thing does not take 'device', which a run gives it"):
        checked_options("thing", OfRecord, {}, ["path", "device"])
    with pytest.raises(UserError, match=r"^thing needs the option 'path'"):
        checked_options("thing", OfRecord, {})
    assert BelowRecord(Path("a"), own="b", depth=2.0).sizes == Sizes(Path("a"), depth=2.0)
    with pytest.raises(UserError, match=r"^thing: depth must be a number, not true"):
        checked_options("thing", BelowRecord, {"depth": True}, ["path"])


def test_a_function_that_says_nothing_of_itself_takes_everything() -> None:
    assert checked_options("thing", dict, {"a": 1}) == {"a": 1}


def test_a_value_may_be_asked_about_alone() -> None:
    assert misfit(3, int) == "" and misfit(3, "no type") == "" and misfit(1.5, int) == "must be a whole number, not 1.5"
