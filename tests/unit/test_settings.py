"""Sections of settings, whatever they are: read, overridden, checked, written."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, PositiveInt

from asyncflow.settings import Choice, Chosen, Section, apply_override, checked, from_yaml, refuse_overrides, to_yaml
from asyncflow.types import UserError


class Wheel(Section):
    spokes: int = 32
    tyre: Chosen = Choice(name="slick")
    width: PositiveInt | Literal["auto"] | None = "auto"
    sizes: tuple[float, float] = (1.0, 2.0)
    made_of: str | list[str] | None = None
    holes: Annotated[int, Field(ge=1, le=1 << 20)] = 1


class Cart(Section):
    front: Wheel = Wheel()
    load: float = 0.0


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ({"front": {"spoke": 3}}, "unknown key 'front.spoke': did you mean 'spokes'?"),
        ({"spokes": 3}, "unknown key 'spokes': did you mean 'front.spokes'?"),
        ({"colour": 3}, "unknown key 'colour': known here are front, load"),
        ({"load": float("nan")}, "load: must be a finite number, not .nan"),
        ({"load": float("inf")}, "load: must be a finite number, not .inf"),
        ({"front": {"spokes": 10**23}}, f"front.spokes: must be a smaller number, not {10**23}"),
        ({"front": {"holes": 1 << 21}}, "front.holes: must be 1048576 or less, not 2097152"),
        ({"front": {"width": "wide"}}, "front.width: must be a whole number or 'auto', not wide"),
        ({"front": {"width": 0}}, "front.width: must be more than 0 or 'auto', not 0"),
        ({"front": {"sizes": [1.0]}}, "front.sizes: must be a list of 2, not [1.0]"),
        ({"front": {"sizes": [1.0, "big"]}}, "front.sizes.1: must be a number, not big"),
        ({"front": {"made_of": 3}}, "front.made_of: must be text or a list, not 3"),
        ({"front": {"tyre": 5}}, "front.tyre: must be a name, or a mapping with a name and its options, not 5"),
        ({"front": {"tyre": None}}, "front.tyre: must be a name, or a mapping with a name and its options, not null"),
        ({1: 2}, "the key 1 is no text: known are front, load"),
        ({"front": {"spokes": "many"}}, "front.spokes: must be a whole number, not many"),
        ({"front": {"spokes": True}}, "front.spokes: true is neither a number nor a name here"),
        (
            {"front": {"tyre": {"name": "a", "path": "b"}}},
            "front.tyre: has both the name 'a' and the path 'b': leave one of them out",
        ),
    ],
)
def test_a_mistake_is_said_in_the_words_of_the_section_that_was_asked_for(tree: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        checked(Cart, tree)
    assert str(caught.value) == sentence


def test_an_override_makes_what_it_needs() -> None:
    tree: dict[str, Any] = {"front": None}
    for override in ("front.spokes=36", "front.tyre=winter", "front.tyre.studs=1e2", "load=1e-3"):
        apply_override(tree, override)
    cart = checked(Cart, tree)
    assert (cart.front.spokes, cart.load) == (36, 0.001)
    assert cart.front.tyre == Choice(name="winter", options={"studs": 100.0})


def test_a_path_that_an_override_gives_replaces_the_name() -> None:
    for before in ("slick", {"name": "slick"}, {}, None):
        tree: dict[str, Any] = {"front": {"tyre": before}}
        apply_override(tree, "front.tyre.path=my.py:Tyre")
        assert checked(Cart, tree).front.tyre == Choice(name="my.py:Tyre")
    tree = {"front": {"tyre": {"name": "slick", "studs": 3}}}
    apply_override(tree, "front.tyre.path=my.py:Tyre")
    with pytest.raises(UserError, match=r"has both the name 'slick' and the path 'my.py:Tyre': leave one of them out"):
        checked(Cart, tree)  # whose options are they?


def test_yaml_comes_back_as_what_it_was() -> None:
    tree = {"text": "1e5", "number": 1e-5, "nested": {"none": None, "many": [1, "2"]}}
    assert from_yaml(to_yaml(tree)) == tree
    assert from_yaml("3e4") == 30000.0 and list(from_yaml(to_yaml({"b": 1, "a": 2}))) == ["b", "a"]


@pytest.mark.parametrize("override", ["run.dir=x", "run={dir: x, seed: 1}", "run.dir.deeper=x", "queue.num_units=2", "queue={}"])
def test_keys_that_are_not_the_users_are_refused_however_they_are_written(override: str) -> None:
    with pytest.raises(UserError, match=r": (run\.dir|queue) is mine"):
        refuse_overrides(["train.x=1", override], ["run.dir", "queue"], "{key} is mine")


def test_their_neighbours_are_not() -> None:
    refuse_overrides(["run.directory=x", "run={seed: 1}", "dir=x", "queues.num_units=2"], ["run.dir", "queue"], "{key} is mine")
