"""The classes that the tests of Apple's SDK generate; its sdist has the tests, but not these."""

from __future__ import annotations

from typing import Optional

import apple_fm_sdk as fm


@fm.generable("How old a cat is")
class Age:
    years: int = fm.guide("Full years", range=(0, 30))
    months: int = fm.guide("Months since the last birthday", range=(0, 11))


@fm.generable("A cat")
class Cat:
    name: str = fm.guide("Its name")
    age: Age = fm.guide("How old it is")
    profile: str = fm.guide("What it is like")


@fm.generable("A hedgehog")
class Hedgehog:
    name: str = fm.guide("Its name", constant="Sonic")
    age: int = fm.guide("Years", range=(0, 10))
    favoriteFood: str = fm.guide("What it likes most", anyOf=["carrots", "worms", "turnips"])
    home: str = fm.guide("Where it lives", constant="a hedge")
    hobbies: list[str] = fm.guide("What it does all day", count=3)


@fm.generable("A person")
class Person:
    name: str = fm.guide("The name")
    age: Optional[int] = fm.guide("Years", range=(0, 120))  # noqa: UP045  as scripts write it
    children: list[Person] = fm.guide("Sons and daughters", max_items=3)


@fm.generable("A shelter")
class Shelter:
    cats: list[Cat] = fm.guide("Who lives there")


@fm.generable("A club of people with pets")
class PetClub:
    members: list[Person] = fm.guide("Who pays", max_items=3)
    cats: list[Cat] = fm.guide("Their cats", max_items=3)
    hedgehogs: list[Hedgehog] = fm.guide("Their hedgehogs", max_items=3)
    otherPets: list[str] = fm.guide("Kinds of other pets", max_items=3)
    presidentName: str = fm.guide("Who presides")


@fm.generable("A newsletter")
class ShelterNewsletter:
    title: str = fm.guide("Its title")
    topic: str = fm.guide("What it is about")
    sponsor: str | None = fm.guide("Who pays for it")
    issueNumber: int | None = fm.guide("Its number", minimum=1)
    tags: list[str] | None = fm.guide("Words to find it by", max_items=3)
    featuredCats: list[Cat] | None = fm.guide("Cats in it", max_items=3)
    featuredHedgehog: Hedgehog | None = fm.guide("A hedgehog in it")
    featuredStaff: list[Person] | None = fm.guide("People in it", max_items=3)
