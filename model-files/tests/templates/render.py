#!/usr/bin/env python3
"""Renders conversations.json with every NAME.jinja of a folder, as Hugging Face transformers renders chat templates, into
NAME.json: `text`, or `raises` (the message of raise_exception), or `fails` (any other error of jinja2).

    python3 -m venv /tmp/v && /tmp/v/bin/pip install jinja2==3.1.6
    /tmp/v/bin/python render.py [FOLDER]

The environment is that of `_cached_compile_jinja_template` in transformers' chat_template_utils.py; the time stands still.
"""

import glob
import json
import os
import sys
from datetime import datetime, timezone

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

HERE = os.path.dirname(os.path.abspath(__file__))
NOW = datetime(2024, 7, 26, 9, 5, 3, tzinfo=timezone.utc)


class Generation(jinja2.ext.Extension):
    """`{% generation %}`: shows what is in it."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_shown"), [], [], body).set_lineno(line)

    def _shown(self, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment():
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = NOW.strftime
    return made


def outcome(template, case):
    variables = {"bos_token": "<s>", "eos_token": "</s>", "tools": case.get("tools"), "documents": case.get("documents"), **case.get("variables", {})}
    try:
        text = template.render(messages=case["messages"], add_generation_prompt=case.get("add_generation_prompt", True), **variables)
        return {"text": text}
    except jinja2.exceptions.TemplateError as error:
        return {"raises": error.message} if type(error) is jinja2.exceptions.TemplateError else {"fails": str(error)}
    except Exception as error:  # whatever Python says of a value that does not fit
        return {"fails": str(error)}


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else HERE
    with open(os.path.join(HERE, "conversations.json"), encoding="utf-8") as file:
        cases = json.load(file)
    for path in sorted(glob.glob(os.path.join(folder, "*.jinja"))):
        with open(path, encoding="utf-8") as file:
            template = environment().from_string(file.read())
        results = {name: outcome(template, case) for name, case in cases.items()}
        lines = [f"{json.dumps(name)}: {json.dumps(result, ensure_ascii=False)}" for name, result in results.items()]
        with open(path.removesuffix(".jinja") + ".json", "w", encoding="utf-8") as file:
            file.write("{\n" + ",\n".join(lines) + "\n}\n")
        counts = {kind: sum(kind in result for result in results.values()) for kind in ("text", "raises", "fails")}
        print(os.path.basename(path), counts)


if __name__ == "__main__":
    main()
