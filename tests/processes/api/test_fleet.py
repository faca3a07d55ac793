"""What `import skyctl` costs."""

from __future__ import annotations

import subprocess
import sys


def test_importing_skyctl_stays_light() -> None:
    code = (
        "import sys, skyctl; "
        "heavy = {'httpx', 'pydantic', 'torch', 'vllm', 'psutil', 'asyncio'} & set(sys.modules); "
        "assert not heavy, heavy; from skyctl import Fleet; "
        "assert not {'torch', 'vllm', 'typer'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
