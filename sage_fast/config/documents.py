"""YAML 1.2 as configurations are written: plain values, and an error for what programs
read differently. Apart from `files.py`, which every machine can import.
"""

import io
import json
import re
from functools import lru_cache
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    CollectionEndEvent,
    CollectionStartEvent,
    ScalarEvent,
)
from ruamel.yaml.parser import Parser
from ruamel.yaml.representer import SafeRepresenter

from sage_fast.config.errors import ConfigError

MAX_DEPTH = 50
"""Of a YAML document; the time of the reader grows with its square."""


class _Representer(SafeRepresenter):
    def represent_float(self, data: float) -> Any:
        node = super().represent_float(data)
        if "." not in node.value:  # without a point YAML 1.1 reads 1e-07 as a word
            node.value = node.value.replace("e", ".0e")
        return node


_Representer.add_representer(float, _Representer.represent_float)


class _Parser(Parser):
    """Refuses events that programs read differently, as it hands them out."""

    depth = 0

    def get_event(self) -> Any:
        event = super().get_event()
        self.depth += isinstance(event, CollectionStartEvent)
        self.depth -= isinstance(event, CollectionEndEvent)
        problem = _problem(event, self.depth)
        if problem:
            raise MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return event


def _yaml() -> YAML:
    """Reader and writer of YAML 1.2 in pure Python: plain values, no code."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Parser = _Parser
    yaml.Representer = _Representer
    yaml.default_flow_style = False  # type: ignore[assignment]
    yaml.allow_unicode = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    return yaml


@lru_cache(maxsize=64)
def _as_json(text: str) -> str:
    """The document as JSON, whose keys are words and which has no dates. Remembered: a
    run reads its files again for every page that it writes, at 20 ms each.
    """
    return json.dumps(_yaml().load(text), default=str)


def read_yaml(text: str, where: str) -> Any:
    """The value of a YAML 1.2 document; None where it is empty. Nothing in a document
    is ever run.

    Args:
        text: the document.
        where: start of a message, such as the path.

    Raises:
        ConfigError: the text is not YAML, gives a key twice, or has an alias or a
            number such as 010; the message names the line.
    """
    try:
        return json.loads(_as_json(text))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark and "\n" in text else ""
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{where}{line}: not valid YAML ({reason})") from error
    except (YAMLError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{where}: not valid YAML ({reason})") from error


def _problem(event: Any, depth: int) -> str:
    """Explain a piece of YAML that programs read differently; empty for others."""
    if depth > MAX_DEPTH:
        return f"nested deeper than {MAX_DEPTH}"
    if isinstance(event, AliasEvent):
        # A few lines of nested aliases stand for gigabytes.
        return "aliases are not read; repeat the value"
    plain = isinstance(event, ScalarEvent) and event.style is None
    if plain and re.fullmatch("[-+]?0[0-9_]+", event.value):
        return (
            f"{event.value[:40]} is an octal number to some programs; write it without "
            "the 0, or in quotes if it is text"
        )
    return ""


def dump_yaml(value: Any) -> str:
    """A YAML document that `read_yaml` reads back to an equal value; only ASCII."""
    stream = io.StringIO()
    _yaml().dump(value, stream)
    return stream.getvalue()
