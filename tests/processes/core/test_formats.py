"""What is printed for a shell, as a shell understands it."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from skyctl.core.urls import FORMATS, Access, FleetUrls, notes
from tests.unit.core.urls import BARE, URLS


@pytest.mark.parametrize("urls", [URLS, BARE])
def test_env_is_understood_by_a_shell_and_never_holds_the_key(urls: FleetUrls) -> None:
    script = f"DEMO_KEY=s3cret; {FORMATS['env'](urls)}\nprintenv OPENAI_BASE_URL OPENAI_API_KEY"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    key = "s3cret" if urls.access.api_key_env else "EMPTY"
    assert done.stdout.split() == [f"{urls.entry}/v1", key]


def test_a_key_that_skyctl_made_is_named_in_every_format_and_printed_in_none(
    tmp_path: Path,
) -> None:
    file = tmp_path / "it's" / "api.key"
    file.parent.mkdir()
    file.write_text("s3cret\n")
    access = Access(api_key_file=str(file), control_token_file=str(file))
    own = replace(URLS, access=access, trainer="http://gpu7:8001")
    texts = {name: form(own) + "\n".join(notes(name, own)) for name, form in FORMATS.items()}
    assert not any("s3cret" in text for text in texts.values())
    script = f"{FORMATS['env'](own)}\nprintenv OPENAI_API_KEY"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "s3cret\n"
    assert "OPENAI_API_KEY=${SKYCTL_API_KEY}" in texts["openai"]
    assert 'api_key_var = "SKYCTL_TRAINER_TOKEN"' in texts["prime-rl"]  # of the fleet URL
    alone = replace(own, trainer=None)
    assert 'api_key_var = "SKYCTL_API_KEY"' in FORMATS["prime-rl"](alone)
    export = next(line for line in notes("openai", own) if "export" in line)
    command = export[export.index("export") :]
    done = subprocess.run(
        ["sh", "-c", f"{command}; printenv SKYCTL_API_KEY"], capture_output=True, text=True
    )
    assert done.stdout == "s3cret\n"
    assert "skyctl urls --format trainer" in notes("skyrl", own)[0]
    assert "auth: none" in notes("skyrl", alone)[0]
