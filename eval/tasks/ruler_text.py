"""The wording of RULER's tasks: our own, or read from the files of a RULER checkout.

Nothing of a checkout is imported or executed; its constants are parsed.
"""

from __future__ import annotations

import ast
import hashlib
import json
import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from ...errors import ConfigError
from .haystack import noise

__all__ = ["TEMPLATE_PARAM", "PromptParts", "RulerTemplate", "RulerWording", "wording_of"]

TEMPLATE_PARAM = "templates"
_FOLDER = Path("scripts/data/synthetic")


class PromptParts(TypedDict):
    """The fields of an `Example` that make its prompt."""

    context: str
    joint: str
    question: str
    answer_prefix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RulerTemplate:
    """A prompt with the field `{context}`, fields of the task, and the beginning of the answer."""

    text: str
    answer_prefix: str

    def singular(self) -> RulerTemplate:
        """RULER's edits for a question about one value."""
        edits = (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer"))
        text, prefix = self.text, self.answer_prefix
        for plural, single in edits:
            text, prefix = text.replace(plural, single), prefix.replace(plural, single)
        return RulerTemplate(text=text, answer_prefix=prefix)

    def parts(self, context: str, **fields: Any) -> PromptParts:
        """The prompt with its fields filled in.

        Everything before the text belongs to the context; what follows it may name what is asked for.
        """
        before, _, after = self.text.partition("{context}")
        tail = after.format(**fields)
        return {
            "context": f"{before.format(**fields)}{context}",
            "joint": tail[: len(tail) - len(tail.lstrip())],
            "question": tail.strip(),
            # A template that is one string sets its prefix off with a space; here the prompt does.
            "answer_prefix": self.answer_prefix.format(**fields).lstrip(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RulerWording:
    """All templates by RULER's name of the generator, the needle sentence, and a line of noise."""

    source: str
    templates: Mapping[str, RulerTemplate]
    needle: str
    noise_line: str

    @property
    def provenance(self) -> dict[str, str]:
        """Whose words they are, and their digest."""
        words = {name: [t.text, t.answer_prefix] for name, t in self.templates.items()}
        payload = json.dumps([words, self.needle, self.noise_line], sort_keys=True)
        return {"templates": self.source, "templates_sha256": hashlib.sha256(payload.encode()).hexdigest()}


OURS = RulerWording(
    source="ours",
    needle="Among the registered {type_needle_v} of {key} is {value}.",
    noise_line=" ".join(noise().sentences),
    templates={
        "niah": RulerTemplate(
            text="Some registered {type_needle_v} are mentioned somewhere in the text below. Keep this in mind for a "
            "question at the end.\n\n{context}\n\nWhat are all the registered {type_needle_v} of {query} in the text "
            "above?",
            answer_prefix="The registered {type_needle_v} of {query} are",
        ),
        "variable_tracking": RulerTemplate(
            text="Variables get their values somewhere in the text below. Follow each value from variable to variable."
            "\n\n{context}\nQuestion: Which variables hold the value {query} in the text above?",
            answer_prefix="Answer: In the text above, {num_v} variables hold the value {query}:",
        ),
        "common_words_extraction": RulerTemplate(
            text="The numbered list below repeats some words more often than others. Keep count of the words.\n"
            "{context}\nQuestion: Which 10 words occur most often in the list above?",
            answer_prefix="Answer: The 10 words that occur most often in the list are:",
        ),
        "freq_words_extraction": RulerTemplate(
            text="The text below is made of coded words. Keep count of each of them. {context}\nQuestion: Which three "
            "coded words occur most often in the text above? Give the words alone and leave out the dots '....'.",
            answer_prefix="Answer: The three coded words that occur most often in the text above are:",
        ),
        "qa": RulerTemplate(
            text="Read the documents below. The question at the end wants the answer alone, in as few words as "
            "possible.\n\n{context}\n\nQuestion: {query}",
            answer_prefix="Answer:",
        ),
    },
)


def wording_of(checkout: str | None) -> RulerWording:
    """Our own wording, or that of a RULER checkout.

    Raises:
        ConfigError: the folder holds no RULER, or its files hold something else than expected.
    """
    if checkout is None:
        return OURS
    folder = Path(checkout) / _FOLDER
    try:
        tasks = _assigned(folder / "constants.py", "TASKS")
        wording = RulerWording(
            source="RULER checkout",
            needle=_assigned(folder / "niah.py", "needle"),
            noise_line=_assigned(folder / "niah.py", "haystack").strip(),
            templates={
                name: RulerTemplate(text=tasks[name]["template"], answer_prefix=tasks[name]["answer_prefix"])
                for name in OURS.templates
            },
        )
        _check_fields(wording)
    except (OSError, SyntaxError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{TEMPLATE_PARAM}: {checkout!r} is no RULER checkout whose templates can be read from {_FOLDER}: {error}. "
            "Give the folder of a checkout, or leave the parameter out for our own wording."
        ) from error
    return wording


def _check_fields(wording: RulerWording) -> None:
    """Refuse a template that cannot be filled in as ours can; ValueError, or whatever parsing raises.

    Without `{context}` a prompt would have no text, and without `{value}` a needle nothing to find.
    """
    for name, template in wording.templates.items():
        ours = OURS.templates[name]
        known = _fields(ours.text) | _fields(ours.answer_prefix)
        _check_known(f"the template of {name}", _fields(template.text), known, needed="context")
        _check_known(f"the answer prefix of {name}", _fields(template.answer_prefix), known - {"context"})
    known = _fields(OURS.needle)
    _check_known("the needle", _fields(wording.needle), known, needed="value")


def _fields(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}


def _check_known(where: str, found: set[str], known: set[str], *, needed: str | None = None) -> None:
    unknown = sorted(found - known)
    if unknown or (needed is not None and needed not in found):
        problem = f"has the field {unknown[0]!r}" if unknown else f"lacks the field {needed!r}"
        raise ValueError(f"{where} {problem}; its fields are {', '.join(sorted(known))}")


def _assigned(file: Path, name: str) -> Any:
    """The literal that a Python file first assigns to a name, anywhere in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            try:
                return ast.literal_eval(node.value)
            except ValueError:
                continue  # computed, not written down
    raise LookupError(f"{file.name} assigns no plain value to {name}")
