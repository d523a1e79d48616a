"""Grammars of tool calls: for calls that must be made, and for what follows the marker of a call."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ikpy.engine.grammars.gbnf import GrammarError, literal
from ikpy.engine.grammars.json_schema import schema_to_gbnf
from ikpy.engine.grammars.schema_budget import Budget
from ikpy.server.errors import bad_request

if TYPE_CHECKING:
    from ikpy.server.chat.tool_reading import Rules, ToolFormat
    from ikpy.vocab import Vocab

GRAMMAR_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|[A-Za-z][A-Za-z0-9-]*')
MARKER = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|@\{([^}]*)\}')
"""A marker; texts and sets of characters, which may look like one, come before it."""

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
"""Schema of a tool that names none: OpenAI's API reference says that it has an empty parameter list then."""

ANY_PARAMETERS = {"type": "object"}
Mark = Callable[[str], str]


def marker_rule(vocab: Vocab) -> Mark:
    """GBNF of a marker: the control token with this text if there is one, those in it if there are, or the text."""

    def mark(text: str) -> str:
        parts = []
        for token in control_tokens(vocab, text):
            before, _, text = text.partition(vocab.token_text(token))
            parts += [literal(before)] * bool(before) + [f"<[{token}]>"]
        return " ".join(parts + [literal(text)] * bool(text or not parts))

    return mark


def control_tokens(vocab: Vocab, text: str) -> list[int]:
    """Tokens in a text that the model's output does not show, in order."""
    token = vocab.token_id(text)
    ids = vocab.tokenize(text, add_special=False, parse_special=True) if token is None else [token]
    return [i for i in ids if not vocab.token_to_piece(i)]


class SchemaRules:
    """Rules of one tool, with a prefix that keeps them apart from those of others; ``shared`` are those of all."""

    def __init__(self, prefix: str, shared: dict[str, str], budget: Budget) -> None:
        self._prefix = prefix
        self.shared = shared
        self._budget = budget
        self.rules: list[str] = []

    def spend(self) -> None:
        """Counts a schema of which other rules are made; raises GrammarError for too many."""
        self._budget.spend()

    def schema(self, schema: Any, root: Any = None) -> str:
        """Name of a rule for the JSON values of a schema; its references are looked up in ``root`` if it is a part."""
        prefix = f"{self._prefix}{len(self.rules)}-"
        self.rules.append(prefixed(schema_to_gbnf(schema, root, self._budget), prefix))
        return f"{prefix}root"

    def rule(self, text: str) -> str:
        """Name of a rule that stands in the grammar once, however often it is asked for."""
        return self.shared.setdefault(text, f"shared{len(self.shared)}")


def prefixed(rules: str, prefix: str) -> str:
    """GBNF text with a prefix before every rule name."""
    names = set(re.findall(r"^([A-Za-z][A-Za-z0-9-]*) ::=", rules, re.MULTILINE))
    return GRAMMAR_WORD.sub(lambda match: prefix + match[0] if match[0] in names else match[0], rules)


def call_grammar(
    format_: ToolFormat, tools: Sequence[Mapping[str, Any]], mark: Mark = literal, *, several: bool, lazy: bool = False
) -> str:
    """GBNF that allows exactly a call of one of the tools (several: one after another).

    ``lazy``: what follows the opening marker of the first call. Raises ApiError 400 for parameters that cannot be used.
    """
    rules, alternatives = [], []
    shared: dict[str, str] = {}
    budget = Budget()
    for i, tool in enumerate(tools):
        book = SchemaRules(f"tool{i}-", dict(shared), budget)
        try:
            call = format_.call(tool["name"], tool.get("parameters") or NO_PARAMETERS, book)
        except GrammarError as error:
            if not lazy:
                raise bad_request(f"parameters of tool {tool['name']}: {error}") from None
            # The call was not asked for by the client: any arguments will do.
            book = SchemaRules(f"tool{i}-", dict(shared), Budget())
            call = format_.call(tool["name"], ANY_PARAMETERS, book)
        alternatives.append(call)
        rules += book.rules
        shared = book.shared
    rules += [f"{name} ::= {text}\n" for text, name in shared.items()]
    lead = format_.lead or f"@{{{format_.opening}}}"
    again = f"({format_.again} {lead} {format_.behind})*" if several and format_.again else ""
    first = "" if lazy else f"{lead} "
    more = f"({format_.separator} call)*" if several else ""
    text = (
        f"root ::= {first}{format_.behind} {again}\ncall ::= {' | '.join(alternatives)}\n"
        f"calls ::= call {more}\n" + "".join(rules)
    )
    return MARKER.sub(lambda match: match[0] if match[1] is None else mark(match[1]), text)


# one call of every family


def json_call(head: str, arguments: str = "arguments") -> Callable[[str, Any, Rules], str]:
    """An object with name and arguments, of which ``head`` is not part of an opening marker."""

    def call(name: str, schema: Any, rules: Rules) -> str:
        begin = literal(f'{head}{json.dumps(name, ensure_ascii=False)}, "{arguments}": ')
        return f'{begin} {rules.schema(schema)} "}}"'

    return call


def deepseek_call(name: str, schema: Any, rules: Rules) -> str:
    """DeepSeek V3 and R1: the arguments in a code block."""
    return (
        f'@{{<｜tool▁call▁begin｜>}} "function" @{{<｜tool▁sep｜>}} {literal(name)} "\\n```json\\n" '
        f'{rules.schema(schema)} "\\n```" @{{<｜tool▁call▁end｜>}}'
    )


def deepseek_plain_call(name: str, schema: Any, rules: Rules) -> str:
    """DeepSeek V3.1: name and arguments."""
    arguments = rules.schema(schema)
    return f"@{{<｜tool▁call▁begin｜>}} {literal(name)} @{{<｜tool▁sep｜>}} {arguments} @{{<｜tool▁call▁end｜>}}"


def kimi_call(name: str, schema: Any, rules: Rules) -> str:
    """Kimi K2: an identifier that carries the name."""
    return (
        f"@{{<|tool_call_begin|>}} {literal(f'functions.{name}:')} [0-9]+ @{{<|tool_call_argument_begin|>}} "
        f"{rules.schema(schema)} @{{<|tool_call_end|>}}"
    )


def solar_call(name: str, schema: Any, rules: Rules) -> str:
    """Solar Open: an id, the name and the arguments behind markers."""
    return (
        f"@{{<|tool_call:begin|>}} [a-z0-9]{{1,16}} @{{<|tool_call:name|>}} {literal(name)} @{{<|tool_call:args|>}} "
        f"{rules.schema(schema)} @{{<|tool_call:end|>}}"
    )


def mistral_list_call(name: str, schema: Any, rules: Rules) -> str:
    """Mistral before Small 3.2: an object of a list, with an id if the model writes one."""
    begin, call_id = literal(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '), literal(', "id": "')
    return f'{begin} {rules.schema(schema)} ({call_id} [a-zA-Z0-9]{{9}} "\\"")? "}}"'


def mistral_call(name: str, schema: Any, rules: Rules) -> str:
    """Mistral since Small 3.2: the name, an id if the model writes one, and the arguments behind a marker."""
    return f"{literal(name)} (@{{[CALL_ID]}} [a-zA-Z0-9]{{9}})? @{{[ARGS]}} {rules.schema(schema)}"


def function_call(name: str, schema: Any, rules: Rules) -> str:
    """Functionary 3.1: the name in the opening tag."""
    return f'{literal(f"{name}>")} {rules.schema(schema)} "</function>"'


def cohere_call(name: str, schema: Any, rules: Rules) -> str:
    """Command R7B and Command A: a number, the name and the parameters."""
    number, head = literal('{"tool_call_id": "'), literal(f'", "tool_name": {json.dumps(name, ensure_ascii=False)}')
    return f'{number} [0-9]{{1,4}} {head} ", \\"parameters\\": " {rules.schema(schema)} "}}"'


def harmony_call(name: str, schema: Any, rules: Rules) -> str:
    """GPT-OSS: the name is the recipient of a message of the commentary channel. Its template writes the type of
    earlier calls without a marker."""
    kind = '(" "? (@{<|constrain|>} " "?)? "json")?'
    return f'{literal(name)} (" "? @{{<|channel|>}} "commentary")? {kind} " "? @{{<|message|>}} {rules.schema(schema)}'
