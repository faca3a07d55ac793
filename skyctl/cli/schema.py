"""`skyctl schema`: the fleet file's JSON Schema."""

from __future__ import annotations

import json

from rich.text import Text

from skyctl import output
from skyctl.cli.options import JsonOption


def schema(as_json: JsonOption = False) -> None:
    """Print the JSON Schema of fleet.yaml, for editors.

    \b
    Example:
      skyctl schema > fleet.schema.json
      # then, as the first line of fleet.yaml:
      # yaml-language-server: $schema=fleet.schema.json
    """
    from skyctl.fleetfile.schema import json_schema

    document = json_schema()
    output.emit(document, Text(json.dumps(document, indent=2, ensure_ascii=False)))
