"""The fields of a JSON object, taken one by one with their type checked; a complaint names object, key and value."""

import math
from collections.abc import Iterable
from typing import Any, NoReturn

LARGEST = 2**31 - 1
REQUIRED: Any = object()


class Fields:
    """A JSON object with a name for error messages. A key whose value is null counts as absent."""

    def __init__(self, values: dict, name: str):
        self.values = {key: value for key, value in values.items() if value is not None}
        self.mentioned = frozenset(values)  # null values included
        self.name = name

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def require(self, *keys: str) -> None:
        """Raises ValueError with every absent key at once."""
        if absent := [key for key in keys if key not in self]:
            raise ValueError(f"{self.name} lacks {', '.join(absent)}; no value is assumed for what shapes the model.")

    def integer[T](self, key: str, default: T = REQUIRED, *, least: int = 0, most: int = LARGEST) -> int | T:
        value = self._take(key, default)
        if value is not default and not (type(value) is int and least <= value <= most):
            self._refuse(key, value, f"a whole number from {least} to {most}")
        return value

    def number[T](self, key: str, default: T = REQUIRED) -> float | T:
        value = self._take(key, default)
        if value is default:
            return value
        if type(value) not in (int, float) or not math.isfinite(value):
            self._refuse(key, value, "a finite number")
        return float(value)

    def flag[T](self, key: str, default: T = REQUIRED) -> bool | T:
        value = self._take(key, default)
        if value is not default and type(value) is not bool:
            self._refuse(key, value, "true or false")
        return value

    def text[T](self, key: str, default: T = REQUIRED) -> str | T:
        value = self._take(key, default)
        if value is not default and type(value) is not str:
            self._refuse(key, value, "a string")
        return value

    def integers[T](self, key: str, default: T = REQUIRED) -> tuple[int, ...] | T:
        """A list of whole numbers; a single one counts as a list of one."""
        value = self._take(key, default)
        if value is default:
            return value
        items = value if isinstance(value, list) else [value]
        if not all(type(item) is int and 0 <= item <= LARGEST for item in items):
            self._refuse(key, value, "whole numbers from 0")
        return tuple(items)

    def nested(self, key: str) -> "Fields":
        """The object under `key`; an empty one when absent."""
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            self._refuse(key, value, "an object")
        return Fields(value, f"{self.name}'s {key}")

    def _take(self, key: str, default: Any) -> Any:
        if default is REQUIRED:
            self.require(key)
        return self.values.get(key, default)

    def _refuse(self, key: str, value: object, wanted: str) -> NoReturn:
        raise ValueError(f"{self.name}'s {key} must be {wanted}; got {value!r:.200}.")


def agreed(key: str, places: Iterable[Fields]) -> Fields:
    """The place that holds `key`, or any of those that hold it with one value; ValueError when they differ."""
    places = tuple(places)
    holders = [place for place in places if key in place] or [places[0]]
    if any(place.values[key] != holders[0].values[key] for place in holders[1:]):
        values = " and ".join(f"{place.values[key]!r} in {place.name}" for place in holders)
        raise ValueError(f"{key} is given twice and differs: {values}. Keep the right one.")
    return holders[0]
